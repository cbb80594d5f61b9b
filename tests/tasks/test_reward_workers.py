"""Rewards in worker processes: what hangs, dies, fills memory or disk, or starts processes of its own costs its samples."""

import os
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tba.config import RewardConfig
from tba.runtime.processes import RoleProcess
from tba.tasks.outcomes import RewardFailed
from tba.tasks.rewards.pool import RewardUnusable, WorkerRewards, score_all
from tba.tasks.rewards.worker import LOG_BYTES
from tba.tasks.task import FinishedGroup
from tba.types import Completion, Prompt

REWARDS = """
import os, subprocess, sys, time
from pathlib import Path

HERE = Path(__file__).parent
with (HERE / "imports.txt").open("a") as file:
    file.write(f"{os.getpid()}\\n")
kept = []

def calls(completions, **columns):
    with (HERE / "calls.txt").open("a") as file:
        file.write(f"{len(completions)}\\n")
    if "hang" in completions:
        time.sleep(600)
    return [float(len(text)) for text in completions]

def one_by_one(completions, **columns):
    return calls(completions)

one_by_one.per_sample = True

def starts(completions, **columns):
    for text in completions:
        started = subprocess.Popen(["sleep", "600"], start_new_session=text == "session")
        (HERE / f"{text}.pid").write_text(str(started.pid))
    if "hang" in completions:
        time.sleep(600)
    return [1.0] * len(completions)

def fills(completions, **columns):
    if "fill" in completions:
        kept.append(bytearray(10**9))
    return [float(len(kept))] * len(completions)

def prints(completions, **columns):
    print("x" * 3_000_000, "the end")
    return [1.0] * len(completions)

def heavy(completions, **columns):
    return [float(name in sys.modules) for name in completions]

def sees(completions, **columns):
    return [float(name in os.environ) for name in completions]

def needs_key(completions, **columns):
    return [float(os.environ["JUDGE_API_KEY"])] * len(completions)

def dies(completions, **columns):
    os._exit(7)

def meets(completions, **columns):
    # 1 for each where as many calls as the text says run at once
    if completions == ["first"]:
        return [1.0]
    (HERE / f"here-{os.getpid()}").touch()
    for _ in range(1000):
        if len(list(HERE.glob("here-*"))) == int(completions[0]):
            return [1.0] * len(completions)
        time.sleep(0.01)
    return [0.0] * len(completions)

async def async_meets(completions, **columns):
    return meets(completions)

no_function = 3
"""


@pytest.fixture
def rewards(tmp_path):
    """Make the workers of a reward of the file above; they are closed in the end."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    made = []

    def make(name, timeout_seconds=30.0, **settings):
        config = RewardConfig(function=f"{tmp_path}/rewards.py:{name}")
        log = tmp_path / "logs" / "rewards.log"
        made.append(WorkerRewards([config], timeout_seconds=timeout_seconds, log=log, **settings))
        return made[-1]

    yield make
    for own in made:
        own.close()


def group(*texts: str) -> FinishedGroup:
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
    return FinishedGroup(
        prompt=Prompt(id="p", token_ids=np.array([1], np.int32), text="p"), completions=completions, texts=texts
    )


def lines(path: Path) -> list[str]:
    return path.read_text().split()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_call_that_hangs_loses_its_group_and_is_not_repeated_sample_by_sample(rewards, tmp_path):
    workers = rewards("calls", timeout_seconds=1.0)
    good, bad, after = score_all(workers, [group("a", "bc"), group("a", "hang", "b"), group("abc")])
    assert good == [{"calls": 1.0}, {"calls": 2.0}]
    assert after == [{"calls": 3.0}]
    assert all(isinstance(outcome, RewardFailed) for outcome in bad)
    assert "the reward 'calls' took longer than search.reward_timeout_seconds=1 s (all 3 samples" in str(bad[0])
    assert lines(tmp_path / "calls.txt") == ["2", "3", "1"]
    # Once in the first worker and once in the one that replaced it.
    assert len(lines(tmp_path / "imports.txt")) == len(set(lines(tmp_path / "imports.txt"))) == 2
    assert str(os.getpid()) not in lines(tmp_path / "imports.txt")


def test_a_per_sample_reward_is_tried_sample_by_sample_after_it_hung(rewards, tmp_path):
    [outcomes] = score_all(rewards("one_by_one", timeout_seconds=1.0), [group("a", "hang", "bc")])
    assert (outcomes[0], outcomes[2]) == ({"one_by_one": 1.0}, {"one_by_one": 2.0})
    assert "took longer than" in str(outcomes[1])
    assert lines(tmp_path / "calls.txt") == ["3", "1", "1", "1"]


def test_a_reward_that_never_answers_is_named_after_two_calls(rewards, monkeypatch):
    """1.5 s in all: the second call has half a second left of it."""
    monkeypatch.setattr("tba.tasks.rewards.pool.FIRST_ANSWER_SECONDS", 1.5)
    workers = rewards("calls", timeout_seconds=1.0)
    with pytest.raises(RewardUnusable, match=r"'calls' has not answered once: every call hung .*raise search.reward"):
        score_all(workers, [group("hang") for _ in range(5)])


def test_the_log_has_the_line_at_which_a_call_hung(rewards, tmp_path):
    score_all(rewards("calls", timeout_seconds=1.0), [group("a"), group("hang")])
    line = REWARDS.splitlines().index("        time.sleep(600)") + 1
    log = (tmp_path / "logs" / "rewards.log").read_text()
    assert f'File "{tmp_path}/rewards.py", line {line} in calls' in log


@pytest.mark.parametrize(
    ("name", "message"),
    [("no_function", r"rewards.py has no function 'no_function'; it has calls"), ("missing", r"no function 'missing'")],
)
def test_a_reward_that_cannot_be_loaded_is_an_error_at_once(rewards, name, message):
    with pytest.raises(RewardUnusable, match=message):
        score_all(rewards(name), [group("a")])


def test_a_worker_that_dies_costs_its_group_and_says_how_it_ended(rewards):
    [outcomes] = score_all(rewards("dies"), [group("a", "b")])
    assert "the reward worker died (exit status 7); see" in str(outcomes[1])


def test_nothing_that_a_reward_started_outlives_its_worker(rewards, tmp_path):
    """Neither after a call that hung nor when the run closes its workers, with a session of its own or without."""
    workers = rewards("starts", timeout_seconds=2.0)
    score_all(workers, [group("plain", "session", "hang")])
    assert all(is_gone(int((tmp_path / f"{name}.pid").read_text())) for name in ("plain", "session", "hang"))
    score_all(workers, [group("plain", "session")])
    started = [int((tmp_path / f"{name}.pid").read_text()) for name in ("plain", "session")]
    assert not any(map(is_gone, started))
    workers.close()
    assert all(map(is_gone, started))


def hold_rewards(link, folder):
    """A stand-in for a searcher: has a reward called, then waits to be killed."""
    config = RewardConfig(function=f"{folder}/rewards.py:starts")
    score_all(WorkerRewards([config], timeout_seconds=30.0, log=folder / "inner.log"), [group("plain", "session")])
    link.send("scored")
    link.receive(timeout_seconds=None)


def test_nothing_that_a_reward_started_outlives_a_killed_searcher(rewards, tmp_path):
    searcher = RoleProcess("searcher", hold_rewards, {"folder": tmp_path}, log=tmp_path / "searcher.log", forked=True)
    assert searcher.link.receive(timeout_seconds=60) == "scored", (tmp_path / "searcher.log").read_text()
    started = [int((tmp_path / f"{name}.pid").read_text()) for name in ("plain", "session")]
    started += [child.pid for child in psutil.Process(searcher.pid).children(recursive=True)]
    searcher.kill()
    assert wait_for(lambda: all(map(is_gone, started)))


def test_a_worker_has_a_memory_limit_and_is_replaced_when_it_is_reached(rewards, monkeypatch):
    monkeypatch.setattr("tba.tasks.rewards.worker.memory_limit", lambda: 2**29)
    workers = rewards("fills")
    before, full, after = score_all(workers, [group("a"), group("fill", "a"), group("b")])
    assert before == after == [{"fills": 0.0}]
    assert "MemoryError (a reward worker may use 0.5 GB, half of the memory there is" in str(full[1])


def test_the_log_of_a_reward_that_prints_without_end_keeps_its_end(rewards, tmp_path):
    workers = rewards("prints")
    score_all(workers, [group("a") for _ in range(3)])
    workers.close()
    text = (tmp_path / "logs" / "rewards.log").read_text()
    assert len(text) <= LOG_BYTES + 100
    assert text.startswith("(the beginning of this log")
    assert text.endswith("xxx the end\n")


def test_a_deleted_log_folder_does_not_stop_the_workers(rewards, tmp_path):
    import shutil

    workers = rewards("calls", timeout_seconds=1.0)
    score_all(workers, [group("a")])
    shutil.rmtree(tmp_path / "logs")
    assert score_all(workers, [group("hang"), group("ab")])[1] == [{"calls": 2.0}]


@pytest.mark.parametrize(("name", "settings"), [("meets", {"num_workers": 3}), ("async_meets", {})])
def test_calls_of_different_groups_run_at_once(rewards, tmp_path, name, settings):
    """In as many workers as are allowed, of rewards that are async without being told. The first answer is one's alone."""
    workers = rewards(name, **settings)
    score_all(workers, [group("first")])
    assert score_all(workers, [group("3") for _ in range(3)]) == [[{name: 1.0}]] * 3
    assert len(lines(tmp_path / "imports.txt")) == 3


def test_a_call_that_hangs_costs_only_its_own_worker(rewards):
    workers = rewards("calls", timeout_seconds=2.0, num_workers=2)
    score_all(workers, [group("a")])
    hung, *others = score_all(workers, [group("hang"), group("ab"), group("abc")])
    assert "took longer than" in str(hung[0])
    assert others == [[{"calls": 2.0}], [{"calls": 3.0}]]


def test_a_reward_that_computes_is_called_by_one_worker_unless_told_otherwise(rewards, tmp_path):
    workers = rewards("calls")
    score_all(workers, [group("a") for _ in range(4)])
    assert len(lines(tmp_path / "imports.txt")) == 1


def test_a_worker_is_light_because_many_are_started(rewards):
    [found] = score_all(rewards("heavy"), [group("torch", "numpy", "pydantic", "asyncio")])
    assert [outcome["heavy"] for outcome in found] == [0.0] * 4


def test_a_reward_gets_no_secrets_but_those_that_are_passed_on(rewards, tmp_path, monkeypatch):
    secrets = ["HF_TOKEN", "JUDGE_API_KEY", "PGPASSWORD", "AWS_REGION", "my_secret", "SSH_AUTH_SOCK", "AZURE_X"]
    others = ["TOKENIZERS_PARALLELISM", "PATH", "JUDGE_MAX_TOKENS", "KEYBOARD", "AUTHOR"]
    for name in [*secrets, *others[1:]]:
        monkeypatch.setenv(name, os.environ.get(name, "7"))
    (outcomes,) = score_all(rewards("sees"), [group(*secrets, *others)])
    assert [outcome["sees"] for outcome in outcomes] == [0.0] * len(secrets) + [1.0] * len(others)
    (told,) = (tmp_path / "logs" / "rewards.log").read_text().splitlines()
    assert all(name in told for name in secrets)
    assert told.endswith("search.reward_environment=[NAME] passes one on.")
    (outcomes,) = score_all(rewards("sees", passed_on=["HF_TOKEN"]), [group("HF_TOKEN", "JUDGE_API_KEY")])
    assert [outcome["sees"] for outcome in outcomes] == [1.0, 0.0]
    (outcomes,) = score_all(rewards("needs_key", passed_on=["JUDGE_API_KEY"]), [group("a")])
    assert outcomes == [{"needs_key": 7.0}]


def test_a_reward_that_fails_for_want_of_a_secret_says_what_to_set(rewards, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "7")
    ((failed,),) = score_all(rewards("needs_key"), [group("a")])
    assert isinstance(failed, RewardFailed)
    assert (
        "KeyError: 'JUDGE_API_KEY' (rewards do not get JUDGE_API_KEY: search.reward_environment=[JUDGE_API_KEY]"
        in str(failed)
    )
