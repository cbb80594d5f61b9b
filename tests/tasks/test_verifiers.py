"""Tasksets of verifiers: prompts, splits, the package's own rewards from a worker, and what takes more than a turn."""

import importlib.util
from pathlib import Path

import pytest
from builders import completion
from chat_families import family_tokenizer

from recipes.arithmetic import make_tokenizer
from tba.config import TaskConfig, load_config
from tba.run.checks import check_inputs
from tba.tasks.data.make_prompt import question_key
from tba.tasks.outcomes import RewardFailed
from tba.tasks.registry import make_task
from tba.tasks.rewards.pool import WorkerRewards, score_all
from tba.tasks.task import FinishedGroup

is_there = importlib.util.find_spec("verifiers") is not None and importlib.util.find_spec("verifiers.v1") is not None
needs_package = pytest.mark.skipif(not is_there, reason="verifiers 0.4 is not installed")

SUMS = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        if "raise" in trace.last_reply:
            raise ValueError("no number")
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.25)
    async def thought(self, trace: vf.Trace) -> float:
        assert [message.role for message in trace.messages] == ["system", "user", "assistant"]
        assert trace.num_turns == 1
        return float(bool(trace.messages[-1].reasoning_content))


class SumsConfig(vf.TasksetConfig):
    largest: int = 9


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for a in range(self.config.largest + 1):
            for b in range(self.config.largest + 1):
                data = SumData(prompt=f"{a}+{b}=", system_prompt="Add.", answer=a + b)
                yield SumTask(data, self.config.task)
"""


@pytest.fixture
def sums(tmp_path) -> Path:
    file = tmp_path / "sums.py"
    file.write_text(SUMS)
    return file


def make(name, tokenizer=None, max_prompt_tokens=4000, **settings):
    config = TaskConfig(name=f"verifiers:{name}", settings=settings)
    return make_task(config, tokenizer or make_tokenizer(), max_prompt_tokens=max_prompt_tokens)


@needs_package
def test_tasks_are_split_by_a_hash_of_the_prompt_and_equal_in_every_role(sums):
    first, second = (make(sums) for _ in range(2))
    splits = {split: [p.text for p in first.prompts(split)] for split in ("train", "validation", "held_out")}
    assert splits == {split: [p.text for p in second.prompts(split)] for split in splits}
    # 100 sums, and at most a tenth of them on either side.
    assert [len(texts) for texts in splits.values()] == [80, 10, 10]
    assert len({question_key(text) for texts in splits.values() for text in texts}) == 100
    assert splits["train"][0].startswith("Add.\n\n")
    assert splits["train"][0].endswith("=\n")


@needs_package
def test_few_tasks_are_not_split(sums):
    task = make(sums, options={"largest": 3})
    assert len(task.prompts("train")) == len(task.prompts("held_out")) == 16


@needs_package
def test_scores_are_the_packages_and_come_from_a_reward_worker(sums, tmp_path):
    task = make(sums, family_tokenizer("qwen_3"))
    prompt = task.prompts("train")[3]
    assert [message["role"] for message in prompt.text] == ["system", "user"]
    answer = str(prompt.columns["task"]["answer"])
    texts = [answer, f"<think>\nHm.\n</think>\n\n{answer}", "<think>Hm.</think> none", "raise"]
    group = FinishedGroup(prompt=prompt, completions=[completion(prompt, i) for i in range(4)], texts=texts)
    rewards = WorkerRewards(task.isolated_rewards, timeout_seconds=60.0, log=tmp_path / "rewards.log")
    try:
        (outcomes,) = score_all(rewards, [group])
    finally:
        rewards.close()
    assert outcomes[:3] == [{"score": 0.75}, {"score": 1.0}, {"score": 0.25}]
    # A reward that raises costs its own sample.
    assert isinstance(outcomes[3], RewardFailed)
    assert "no number" in outcomes[3].reason
    assert [task.solved(outcome) for outcome in outcomes] == [False, True, False, False]


MORE = {
    "tools": ("class T(Own):\n    @classmethod\n    def toolsets(cls, config): return ['search']", "tools"),
    "setup": ("class T(Own):\n    async def setup(self, trace, runtime): pass", "the method setup"),
    "container": ("class T(Own):\n    NEEDS_CONTAINER = True", "container"),
    "runtime": ("class T(Own):\n    @vf.reward\n    async def file(self, trace, runtime): return 1.0", "reward file"),
    "no_reward": ("class T(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]): pass", "no reward"),
    "environment": ("class T(Own): pass\nclass Two(vf.Env[vf.EnvConfig]): pass", "environment, Two"),
    "user": ("class T(Own): pass\nPROMPT = None", "no prompt"),
}


@needs_package
@pytest.mark.parametrize("kind", MORE)
def test_what_takes_more_than_a_turn_is_refused_in_words(tmp_path, kind):
    code, reason = MORE[kind]
    (tmp_path / "more.py").write_text(
        f"""import verifiers.v1 as vf
PROMPT = "Hello"
class Own(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def any(self, trace): return 1.0
{code}
class More(vf.Taskset[T, vf.TasksetConfig]):
    def load(self): return [T(vf.TaskData(prompt=PROMPT), self.config.task)]
"""
    )
    with pytest.raises(ValueError, match=rf"{reason}.*tba serve") as error:
        make(tmp_path / "more.py")
    assert "verifiers:" in str(error.value)


@needs_package
@pytest.mark.parametrize(
    ("settings", "message"),
    [({"options": {"largst": 3}}, "options=.*largst"), ({"num": 3}, "num"), ({"num_held_out": 0}, "num_held_out")],
)
def test_wrong_options_are_refused(sums, settings, message):
    with pytest.raises(ValueError, match=message):
        make(sums, **settings)


@needs_package
def test_an_unknown_taskset_is_refused():
    with pytest.raises(ValueError, match="no_such_taskset"):
        make("no-such-taskset")


@pytest.mark.skipif(is_there, reason="verifiers is installed")
def test_without_the_package_the_error_names_it(tmp_path):
    with pytest.raises(ValueError, match="pip install 'verifiers"):
        check_inputs(load_config(None, ["task.name=verifiers:gsm8k", "model.path=tba:arithmetic"]))


def test_a_file_is_kept_in_full_and_names_the_task_by_its_stem(tmp_path, monkeypatch):
    (tmp_path / "sums.py").write_text("")
    monkeypatch.chdir(tmp_path)
    config = TaskConfig(name="verifiers:sums.py")
    assert config.name == f"verifiers:{tmp_path / 'sums.py'}"
    assert config.label == config.folder_label == "sums"
    assert TaskConfig(name="verifiers:owner/gsm8k").label == "gsm8k"
    assert not config.is_own_file
