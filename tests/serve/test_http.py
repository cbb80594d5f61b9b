"""The routes over real HTTP, as OpenAI's own client and plain requests see them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from served import LENGTH, STOP, make_engine, make_model, served, wait_for

from tba.types import Prompt, Request, Sampling, Weights

httpx, openai, _ = (
    pytest.importorskip(name, reason="pip install -e '.[dev]' brings it") for name in ("httpx", "openai", "uvicorn")
)

WORDS = "w5 w9 w12"
LONG = {"max_tokens": LENGTH - 8, "min_tokens": LENGTH - 8}
"""A response that takes a second or two."""


@pytest.fixture(scope="module")
def server():
    with served() as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(client, **options):
    messages = [{"role": "user", "content": WORDS}]
    return client.chat.completions.create(**{"model": "tiny", "messages": messages, "max_tokens": 12, **options})


def complete(client, **options):
    return client.completions.create(**{"model": "tiny", "prompt": WORDS, "max_tokens": 12, **options})


def prompt_ids(server):
    return server.tokenizer(WORDS, add_special_tokens=False)["input_ids"]


def generated(server, sampling, *, sample=0, engine=None):
    """What an engine of its own generates after the same prompt."""
    prompt = Prompt(id="p", token_ids=np.array(prompt_ids(server), np.int32), text="")
    request = Request(prompt=prompt, first_sample=sample)
    (found,) = (engine or make_engine()).generate([request], samples_per_prompt=1, sampling=sampling)
    return found


# --- responses ---------------------------------------------------------------------------------------------------------


def test_the_model_names_its_longest_sequence(server, client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", LENGTH)


def test_a_greedy_chat_is_what_the_engine_generates(server, client):
    expected = generated(server, Sampling(max_new_tokens=12, greedy=True))
    found = chat(client, temperature=0, extra_body={"return_token_ids": True})
    assert found.prompt_token_ids == prompt_ids(server)
    assert found.choices[0].token_ids == expected.token_ids.tolist()
    assert found.choices[0].message.content == server.tokenizer.decode(expected.token_ids, skip_special_tokens=True)
    assert found.choices[0].finish_reason == expected.finish
    assert found.usage.completion_tokens == len(expected.token_ids)
    assert found.tba == {"version": 0}


def test_log_probs_are_those_of_a_plain_pass(server, client):
    found = chat(client, logprobs=True, temperature=0.7, top_p=0.8, seed=3, extra_body={"return_token_ids": True})
    prompt, tokens = prompt_ids(server), found.choices[0].token_ids
    with torch.no_grad():
        logits = make_model()(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / 0.7
    expected = torch.log_softmax(logits, -1)[range(len(tokens)), tokens]
    np.testing.assert_allclose([entry.logprob for entry in found.choices[0].logprobs.content], expected, atol=1e-4)
    words = [entry.token for entry in found.choices[0].logprobs.content]
    assert words == [server.tokenizer.decode([token]) for token in tokens]


def test_samples_of_one_request_differ_and_a_seed_repeats_them(client):
    first, again, other = ([choice.text for choice in complete(client, n=3, seed=seed).choices] for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 3


def test_the_same_prompt_twice_with_one_seed_has_one_answer_twice(server, client):
    """Both have the same key: the second waits for the first."""
    first, second = complete(client, prompt=[prompt_ids(server)] * 2, seed=3).choices
    assert first.text == second.text


def test_without_a_seed_no_two_requests_are_alike(client):
    assert complete(client).choices[0].text != complete(client).choices[0].text


def test_prompts_of_one_request_are_answered_in_order(server, client):
    prompts = [prompt_ids(server), [7, 8], prompt_ids(server)]
    found = complete(client, prompt=prompts, n=2, temperature=0, extra_body={"return_token_ids": True})
    texts = [choice.text for choice in found.choices]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3, 4, 5]
    assert texts[0] == texts[1] == texts[4] == texts[5] != texts[2] == texts[3]
    assert [choice.prompt_token_ids for choice in found.choices][2:4] == [[7, 8], [7, 8]]


@pytest.mark.parametrize("stop", [None, "w"])
def test_pieces_of_a_stream_join_to_the_whole(client, stop):
    options = {"n": 2, "seed": 5, "max_tokens": 120, "extra_body": {"min_tokens": 120, "return_token_ids": True}}
    if stop is not None:  # a word that occurs, with the beginning of the next
        options["stop"] = chat(client, **options).choices[0].message.content.split()[50] + " w"
    whole = chat(client, **options, logprobs=True)
    chunks = list(chat(client, **options, logprobs=True, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [token for part in parts for token in part.token_ids] == choice.token_ids
        entries = [entry.logprob for part in parts for entry in part.logprobs.content]
        np.testing.assert_allclose(entries, [entry.logprob for entry in choice.logprobs.content], atol=1e-5)
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
    assert chunks[-1].usage == whole.usage


def test_a_stop_string_ends_a_response_and_the_engine_does_not_go_on(server, client):
    options = {"seed": 5, "max_tokens": LONG["max_tokens"], "extra_body": {"min_tokens": LONG["max_tokens"]}}
    options["extra_body"]["return_token_ids"] = True
    free = chat(client, **{**options, "max_tokens": 60, "extra_body": {"min_tokens": 60}}).choices[0].message.content
    word = free.split()[20]
    found = chat(client, **options, stop=[f"{word} "]).choices[0]
    assert found.finish_reason == "stop"
    assert found.message.content == free[: free.index(f"{word} ")]
    assert len(found.token_ids) <= 22
    assert len(server.driver.finished[-1].token_ids) < LONG["max_tokens"]


def test_a_stop_token_of_a_request_is_the_last_of_its_response(server):
    expected = generated(server, Sampling(max_new_tokens=60, min_new_tokens=60, greedy=True)).token_ids.tolist()
    stop = expected[-1]
    body = {"temperature": 0, "max_tokens": 60, "min_tokens": 60, "stop_token_ids": [stop]}
    found = httpx.post(
        f"{server.url}/inference/v1/generate", json={"token_ids": prompt_ids(server), "sampling_params": body}
    ).json()["choices"][0]
    assert found["token_ids"] == expected[: expected.index(stop) + 1]
    assert found["finish_reason"] == "stop"


def test_the_route_of_verifiers_has_its_exact_shape(server):
    sampling = {"stop_token_ids": [STOP], "logprobs": 1, "max_tokens": 3, "min_tokens": 3, "temperature": 0}
    sampling |= {"skip_special_tokens": False, "routed_experts_prompt_start": 0}  # as its client sends it
    body = {"model": "tiny", "token_ids": prompt_ids(server), "sampling_params": sampling, "cache_salt": "0"}
    found = httpx.post(f"{server.url}/inference/v1/generate", json=body).json()
    expected = generated(server, Sampling(max_new_tokens=3, min_new_tokens=3, greedy=True))
    (choice,) = found["choices"]
    assert choice["token_ids"] == expected.token_ids.tolist()
    assert choice["finish_reason"] == "length"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in expected.token_ids]
    log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    np.testing.assert_allclose(log_probs, expected.policy_log_probs, atol=1e-5)


def test_new_weights_are_used_in_flight_and_named_in_the_response():
    model, other = make_model(), make_model(seed=1)
    tensors = {name: parameter.detach() for name, parameter in other.named_parameters()}
    with served(make_engine(model)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = chat(client, max_tokens=LONG["max_tokens"], extra_body={"min_tokens": LONG["max_tokens"]}, stream=True)
        next(iter(stream))
        server.driver.load(Weights(version=7, tensors=tensors))
        last = list(stream)[-1]
        assert [version for _, version in last.choices[0].version_spans] == [0, 7]
        assert last.tba == {"version": 0}
        found = chat(client, temperature=0, extra_body={"return_token_ids": True})
        assert found.tba == {"version": 7}
        expected = generated(server, Sampling(max_new_tokens=12, greedy=True), engine=make_engine(other))
        assert found.choices[0].token_ids == expected.token_ids.tolist()


# --- clients that leave, a full queue ------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_slot(streams):
    with served(make_engine(slots=1)) as server:
        body = {"prompt": WORDS, "stream": streams, **LONG}
        if streams:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.2))
        wait_for(lambda: server.driver.num_open == 0)
        assert all(len(completion.token_ids) < LONG["max_tokens"] for completion in server.driver.finished)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        assert complete(client).usage.completion_tokens <= 12


def test_a_full_queue_says_when_to_come_again():
    with served(make_engine(slots=1), max_waiting=1) as server, httpx.Client(base_url=server.url) as web:
        body = {"prompt": WORDS, "stream": True, **LONG}
        with web.stream("POST", "/v1/completions", json=body), web.stream("POST", "/v1/completions", json=body):
            refused = web.post("/v1/completions", json={"prompt": WORDS})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "queue_full"
            too_many = web.post("/v1/completions", json={"prompt": WORDS, "n": 3})
            assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
        wait_for(lambda: server.driver.num_open == 0)


def test_clients_share_decode_steps(server, client):
    """Two streams, the second of which is asked for while the first goes on, and ends before it."""
    first = complete(client, stream=True, max_tokens=LONG["max_tokens"], extra_body={"min_tokens": LONG["max_tokens"]})
    next(iter(first))
    count = len(server.driver.finished)
    complete(client)
    assert len(server.driver.finished) == count + 1
    assert sum(len(chunk.choices[0].text.split()) for chunk in first) > 0


# --- wrong requests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"max_tokens": 5}, "prompt", "Field required"),
        ({"prompt": WORDS, "max_tokens": "5"}, "max_tokens", "valid integer, got '5'"),
        ({"prompt": WORDS, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"prompt": WORDS, "temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"prompt": WORDS, "temperature": 1e-6}, "temperature", "is below 0.01"),
        ({"prompt": WORDS, "presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({"prompt": WORDS, "tempreature": 1}, "tempreature", "no such field"),
        ({"prompt": WORDS, "stop": [""]}, "stop", "empty"),
        ({"prompt": [5, 40]}, "prompt", "beyond the vocabulary of 40"),
        ({"prompt": [[5], []]}, "prompt", "no tokens"),
        ({"prompt": WORDS, "logprobs": 5}, "logprobs", "0 or 1"),
        ({"prompt": WORDS, "min_tokens": 9, "max_tokens": 8}, "min_tokens", "more than max_tokens=8"),
    ],
)
def test_a_wrong_field_is_named(server, body, param, words):
    found = httpx.post(f"{server.url}/v1/completions", json=body)
    error = found.json()["error"]
    assert (found.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]


def test_a_prompt_that_is_too_long_says_how_long_it_may_be(client):
    with pytest.raises(openai.BadRequestError, match=f"beyond this model's {LENGTH}") as refused:
        complete(client, prompt=[5] * LENGTH)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=f"beyond this model's {LENGTH}"):
        complete(client, max_tokens=LENGTH)


def test_another_model_is_not_served(client):
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here"):
        complete(client, model="gpt-5")


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"[]", "application/json", 400),
        (b'{"prompt": "w5"}', "text/plain", 415),
        (b" " * (2**25 + 1), "application/json", 413),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(server, content, kind, status):
    headers = {"Content-Type": kind}
    found = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=60)
    assert (found.status_code, found.json()["error"]["type"]) == (status, "invalid_request_error")


def test_a_message_that_is_no_text_and_a_template_of_a_client_are_refused(client):
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(openai.BadRequestError, match="'image_url' is not supported"):
        chat(client, messages=[{"role": "user", "content": image}])
    with pytest.raises(openai.BadRequestError, match="chat_template is not for the template"):
        chat(client, extra_body={"chat_template_kwargs": {"chat_template": "{{ 1 }}"}})
    text = [{"type": "text", "text": "w5"}]
    found = chat(
        client,
        messages=[{"role": "user", "content": text}],
        extra_body={"chat_template_kwargs": {"extra": "w7"}, "return_token_ids": True},
    )
    assert found.prompt_token_ids == [5, 7]


def test_without_the_token_nothing_is_answered():
    with served(token="secret") as server:
        for path in ("/v1/completions", "/rl/start_session", "/inference/v1/generate"):
            found = httpx.post(f"{server.url}{path}", json={"prompt": WORDS})
            assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        with pytest.raises(openai.AuthenticationError):
            complete(openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong"))
        key = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret")
        assert complete(key).object == "text_completion"


def test_an_engine_that_fails_ends_its_responses_and_goes_on(server):
    """Weights that are NaN: the logits are NaN from the next token on."""
    model = make_model()
    with served(make_engine(model)) as server:
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
        server.driver.load(Weights(version=1, tensors=broken))
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.InternalServerError, match="NaN"):
            complete(client)
        with pytest.raises(openai.APIError, match="NaN"):
            list(complete(client, stream=True))
        server.driver.load(Weights(version=2, tensors=tensors))
        assert complete(client).tba == {"version": 2}


# --- sessions ------------------------------------------------------------------------------------------------------------


def test_a_session_gives_its_episode_with_the_tokens_of_its_calls(server, client):
    web = httpx.Client(base_url=server.url)
    key = web.post("/rl/start_session", json={"task_id": "t1"}).json()["api_key"]
    agent = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
    first = complete(agent, prompt=[5, 9], temperature=0, extra_body={"return_token_ids": True})
    tokens = first.choices[0].token_ids
    second = complete(agent, prompt=[5, 9, *tokens, 7], extra_body={"return_token_ids": True}, stream=True)
    more = [token for chunk in second for token in chunk.choices[0].token_ids]
    complete(client, prompt=[5, 9])  # of no session
    headers = {"Authorization": f"Bearer {key}"}
    assert web.post("/rl/set_reward", json={"reward": 1}, headers=headers).json()["interaction_count"] == 2
    wrong = web.post("/rl/set_reward", json={"reward": 1, "interaction_id": "x"}, headers=headers)
    assert wrong.json()["error"]["param"] == "interaction_id"
    assert web.post("/rl/set_reward", json={"reward": 0.5, "interaction_id": first.id}, headers=headers).json() == {
        "message": "success",
        "interaction_count": 2,
    }
    found = web.post("/rl/end_session", headers=headers).json()
    (trajectory,) = found["trajectories"]
    assert (found["task_id"], found["reward"]) == ("t1", 1.0)
    assert trajectory["prompt_ids"] == [5, 9]
    assert trajectory["token_ids"] == [*tokens, 7, *more]
    assert trajectory["loss_mask"] == [1] * len(tokens) + [0] + [1] * len(more)
    assert [turn["reward"] for turn in trajectory["turns"]] == [0.5, None]
    assert trajectory["log_probs"][len(tokens)] is None
    assert trajectory["version_spans"] == [[0, 0]]
    assert web.post("/rl/end_session", headers=headers).status_code == 401
    with pytest.raises(openai.AuthenticationError, match="session has ended"):
        complete(agent)


def test_a_session_needs_its_key_and_there_are_not_too_many():
    with served(most_sessions=1) as server, httpx.Client(base_url=server.url) as web:
        assert web.post("/rl/set_reward", json={"reward": 1}).status_code == 401
        assert web.post("/rl/start_session").status_code == 200
        refused = web.post("/rl/start_session")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_sessions")


def test_a_session_key_serves_as_the_token():
    with served(token="secret") as server, httpx.Client(base_url=server.url) as web:
        key = web.post("/rl/start_session", headers={"Authorization": "Bearer secret"}).json()["api_key"]
        complete(openai.OpenAI(base_url=f"{server.url}/v1", api_key=key))
        found = web.post("/rl/end_session", headers={"Authorization": f"Bearer {key}"}).json()
        assert found["interaction_count"] == 1


def test_events_of_a_stream_are_json_and_end_with_done(server):
    with httpx.stream("POST", f"{server.url}/v1/completions", json={"prompt": WORDS, "stream": True}) as found:
        events = [line.removeprefix("data: ") for line in found.iter_lines() if line]
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] == "text_completion" for event in events[:-1])
