"""A judge behind an endpoint: a server of this process speaks chat completions as vLLM and OpenAI do."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import cloudpickle
import numpy as np
import pytest

from tba import Judge
from tba.config import RewardConfig
from tba.tasks.outcomes import RewardFailed
from tba.tasks.rewards.functions import RewardFunction
from tba.tasks.rewards.judge import ranking_in, score_in
from tba.tasks.rewards.pool import RewardUnusable, WorkerRewards, score_all
from tba.tasks.task import FinishedGroup
from tba.types import Completion, Prompt

SCORED = "Q: {prompt} True: {truth} A: <{response}>"
RANKED = "Q: {prompt}\n{responses}"


class Server:
    """An endpoint. `answer(question)` returns the judge's words, or status, headers and body of a reply."""

    def __init__(self):
        self.answer = lambda question: "Score: 5"
        self.requests, self.keys = [], []
        self.ended = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.ended.set()
        self._http.shutdown()
        self._http.server_close()


def handler_of(server):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v1/chat/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append(body)
            server.keys.append(self.headers.get("Authorization"))
            answer = server.answer(body["messages"][0]["content"])
            status, headers, text = answer if isinstance(answer, tuple) else (200, {}, completion(answer))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *parts):
            pass

    return Handler


def completion(words, finish="stop"):
    choice = {"message": {"role": "assistant", "content": words}, "finish_reason": finish}
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 3}})


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


def rewards_of(judge, *texts, prompt="2+2?", truth="4"):
    return RewardFunction(judge, name="helpful")(prompt, {"truth": truth}, texts, [[5]] * len(texts))


def length_score(question):
    """The length of the response between < and >, as its score."""
    return f"Some thoughts.\nScore: {len(re.search('<(.*)>', question)[1])}/10"


def longest_first(question):
    """The numbers of the responses shown, the longest first."""
    shown = re.findall(r"\[(\d+)\]\n(\w+)", question)
    return "Ranking: " + " > ".join(number for number, _ in sorted(shown, key=lambda own: -len(own[1])))


def test_scores_are_tenths_and_columns_stand_in_the_question(server):
    server.answer = length_score
    judge = Judge(url=server.url, model="m", prompt=SCORED, request={"temperature": 0})
    assert rewards_of(judge, "aaa", "aaaaaaa") == [0.3, 0.7]
    first = min(server.requests, key=lambda own: len(own["messages"][0]["content"]))
    assert first["messages"][0]["content"].startswith(
        "Q: 2+2? True: 4 A: <aaa>\n\nEnd your answer with the line `Score: N`"
    )
    assert (first["model"], first["temperature"]) == ("m", 0)
    assert judge.counts == {"requests": 2, "sent": 20, "received": 6}


def test_a_url_may_be_that_of_the_route(server):
    assert rewards_of(Judge(url=f"{server.url}/chat/completions", model="m", prompt=SCORED), "a") == [0.5]


def test_chats_are_shown_as_text(server):
    judge = Judge(url=server.url, model="m", prompt="{prompt} | {response}")
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert rewards_of(judge, "hello", prompt=chat) == [0.5]
    assert server.requests[0]["messages"][0]["content"].startswith("system: be kind\nuser: hi | hello\n")


def test_a_ranking_is_one_request_and_gives_rewards_by_rank(server):
    server.answer = longest_first
    judge = Judge(url=server.url, model="m", prompt=RANKED)
    # Equal responses are shown once and share their reward: three different ones have the rewards 1, .5 and 0.
    assert rewards_of(judge, "aa", "a", "aaa", "aa") == [0.5, 0.0, 1.0, 0.5]
    assert len(server.requests) == 1
    assert rewards_of(judge, "a", "a") == [0.5, 0.5]
    assert len(server.requests) == 1


def test_the_order_shown_depends_on_the_seed_and_the_texts_alone(server):
    server.answer = longest_first
    texts = ["a", "aa", "aaa", "aaaa", "aaaaa"]
    for seed in (0, 1):
        for given in (texts, texts[::-1]):
            rewards = rewards_of(Judge(url=server.url, model="m", prompt=RANKED, seed=seed), *given)
            assert dict(zip(given, rewards)) == {"a": 0.0, "aa": 0.25, "aaa": 0.5, "aaaa": 0.75, "aaaaa": 1.0}
    orders = [re.findall(r"\]\n(\w+)", own["messages"][0]["content"]) for own in server.requests]
    # Of each seed one: the reversed group is the same question, and is answered from the cache.
    assert len(orders) == 2
    assert orders[0] != orders[1]
    assert texts not in orders


def test_the_questions_of_a_group_are_in_flight_at_once(server):
    together = threading.Barrier(4)

    def answer(question):
        together.wait(20)
        return "Score: 1"

    server.answer = answer
    assert rewards_of(Judge(url=server.url, model="m", prompt=SCORED), "a", "b", "c", "d") == [0.1] * 4


def test_a_server_that_never_answers_costs_its_sample_alone_and_is_named(server):
    server.answer = lambda question: "Score: 9" if "<a>" in question else str(server.ended.wait(60))
    good, bad = rewards_of(Judge(url=server.url, model="m", prompt=SCORED, timeout_seconds=2), "a", "b")
    assert good == 0.9
    assert isinstance(bad, RewardFailed)
    assert str(bad).startswith(f"helpful failed JudgeError: {server.url} did not answer within timeout_seconds=2: ")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_overload_is_waited_out_as_long_as_the_server_asks(server, status):
    replies = [(status, {"Retry-After": "0"}, "busy"), (status, {"Retry-After": "0"}, "busy"), "Score: 4"]
    server.answer = lambda question: replies.pop(0)
    judge = Judge(url=server.url, model="m", prompt=SCORED)
    assert rewards_of(judge, "a") == [0.4]
    assert judge.counts["requests"] == 3


def test_a_wait_beyond_the_deadline_fails_at_once(server):
    server.answer = lambda question: (429, {"Retry-After": "3600"}, "quota is used up")
    [failed] = rewards_of(Judge(url=server.url, model="m", prompt=SCORED), "a")
    assert "did not answer within timeout_seconds=25: HTTP status 429: quota is used up" in str(failed)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((401, {}, "no such key"), "HTTP status 401: no such key"),
        ((200, {}, "<html>hello"), "sent no chat completion: <html>hello"),
        ((200, {}, '{"choices": []}'), 'sent no chat completion: {"choices": []}'),
        ((200, {}, completion("Score: 7", finish="length")), "cut off or empty (finish_reason=length)"),
        ((200, {}, completion(None)), "cut off or empty (finish_reason=stop)"),
        ("I like it.", "has no score from 0 to 10: I like it."),
        ("Score: 85", "has no score from 0 to 10: Score: 85"),
    ],
)
def test_answers_that_cannot_be_read_are_failures_and_are_not_kept(server, reply, message):
    judge = Judge(url=server.url, model="m", prompt=SCORED)
    server.answer = lambda question: reply
    [failed] = rewards_of(judge, "a")
    assert isinstance(failed, RewardFailed)
    assert message in str(failed)
    assert len(server.requests) == 1
    server.answer = lambda question: "Score: 2"
    assert rewards_of(judge, "a") == [0.2]


def test_a_ranking_that_cannot_be_read_fails_each_sample(server):
    server.answer = lambda question: "Ranking: 1 > 1 > 2"
    failed = rewards_of(Judge(url=server.url, model="m", prompt=RANKED), "a", "b", "c")
    assert [str(own) for own in failed] == [
        "helpful failed JudgeError: the judge's answer does not rank the 3 responses: Ranking: 1 > 1 > 2"
    ] * 3


@pytest.mark.parametrize(
    ("answer", "score"),
    [("7", 0.7), ("7.5/10", 0.75), ("**Score:** 10", 1.0), ("score 2, no: Score: 8/10. Bye.", 0.8), ("Score: 0", 0.0)],
)
def test_scores_are_read_from_what_judges_write(answer, score):
    assert score_in(answer) == score


@pytest.mark.parametrize("answer", ["3 reasons", "Score: -3", "Score: 11", "a score of sorts", ""])
def test_other_numbers_are_no_scores(answer):
    with pytest.raises(RuntimeError, match="has no score from 0 to 10"):
        score_in(answer)


@pytest.mark.parametrize(
    "answer", ["3 > 1 > 2", "[3, 1, 2]", "Ranking: 1 > 2 > 3? No.\n**Ranking:** [3] > [1] > [2]\n4 is not there."]
)
def test_rankings_are_read_from_what_judges_write(answer):
    assert ranking_in(answer, 3) == [3, 1, 2]


def test_equal_questions_are_asked_once_also_by_later_processes(server, tmp_path):
    """In real workers: three responses of two texts, and then the same ones in a new worker, as after a resume."""
    server.answer = length_score
    for _ in range(2):
        settings = f"url={server.url!r}, cache_file='{tmp_path}/answers.sqlite'"
        assert in_workers(tmp_path, settings, "aa", "a", "aa") == [{"helpful": 0.2}, {"helpful": 0.1}, {"helpful": 0.2}]
        assert len(server.requests) == 2
    log = (tmp_path / "rewards.log").read_text().splitlines()
    assert [line for line in log if line.startswith("judge")] == [
        "judge m: 2 requests, 0 answers from the cache, 20 + 6 tokens",
        "judge m: 0 requests, 2 answers from the cache, 0 + 0 tokens",
    ]


def test_the_key_comes_from_the_environment_where_the_run_passes_it_on(server, tmp_path, monkeypatch):
    monkeypatch.setenv("A_JUDGE_KEY", "sesame")
    settings = f"url={server.url!r}, key_env='A_JUDGE_KEY'"
    with pytest.raises(
        RewardUnusable, match=r"A_JUDGE_KEY is not set.*search.reward_environment=\[A_JUDGE_KEY\] passes"
    ):
        in_workers(tmp_path, settings, "a")
    assert in_workers(tmp_path, settings, "a", passed_on=["A_JUDGE_KEY"]) == [{"helpful": 0.5}]
    assert server.keys == ["Bearer sesame"]


def test_a_judge_can_be_given_to_a_trainer_also_after_its_use(server, monkeypatch):
    monkeypatch.setenv("A_JUDGE_KEY", "sesame")
    judge = Judge(url=server.url, model="m", prompt=SCORED, key_env="A_JUDGE_KEY")
    rewards_of(judge, "a")
    pickled = cloudpickle.dumps(judge)
    assert b"sesame" not in pickled
    assert rewards_of(cloudpickle.loads(pickled), "a") == [0.5]


def test_a_column_that_the_data_does_not_have_is_named(server):
    [failed] = rewards_of(Judge(url=server.url, model="m", prompt="{response} {answer}"), "a")
    assert "prompt of the judge has {answer}, which is no column of the data: it has " in str(failed)
    assert server.requests == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": "Is it good?"}, "write {response} where"),
        ({"prompt": "{response} {responses}"}, "write {response} where"),
        ({"url": "127.0.0.1:8000/v1"}, "begins with http"),
        ({"key_env": "NOT_THERE_KEY"}, "the environment variable NOT_THERE_KEY is not set"),
    ],
)
def test_a_judge_that_cannot_work_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Judge(**{"url": "http://127.0.0.1:1/v1", "model": "m", "prompt": SCORED, **settings})


def in_workers(folder, settings, *texts, **more):
    """Outcomes of a group, by the judge of a file in a worker of its own."""
    code = f"from tba import Judge\nhelpful = Judge(model='m', prompt={SCORED!r}, {settings})\n"
    (folder / "rewards.py").write_text(code)
    config = RewardConfig(function=f"{folder}/rewards.py:helpful")
    workers = WorkerRewards([config], timeout_seconds=30.0, log=folder / "rewards.log", **more)
    try:
        return score_all(workers, [group(*texts)])[0]
    finally:
        workers.close()


def group(*texts):
    logs = np.zeros(1, np.float32)
    completions = [
        Completion(
            prompt_id="p",
            sample_index=index,
            token_ids=np.array([5], np.int32),
            behaviour_log_probs=logs,
            policy_log_probs=logs,
            version_spans=((0, 0),),
            finish="stop",
        )
        for index in range(len(texts))
    ]
    prompt = Prompt(id="p", token_ids=np.array([1], np.int32), text="p", columns={"truth": "4"})
    return FinishedGroup(prompt=prompt, completions=completions, texts=texts)
