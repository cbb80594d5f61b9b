"""A task from a file outside the package, task.name=file.py:Class: it is trained, evaluated later, or refused."""

from pathlib import Path

import pytest
from problem import SETTINGS

from tba.config import TaskConfig, load_config
from tba.run import evaluate_model, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "small_sums.py"

TASK = """
from pydantic import BaseModel
from tba.tasks.data.make_prompt import make_prompt
from tba.tasks.evaluation import respond

class Settings(BaseModel):
    word: str
    num_prompts: int = 12

class CountWords:
    \"\"\"Reward: how often a word is said.\"\"\"

    Settings = Settings
    isolated_rewards = ()

    def __init__(self, inputs):
        self.word, self.reward_weights = inputs.settings.word, {"count": 1.0}
        self.all = [
            make_prompt(
                id=str(i), text=f"w{i + 3}", columns={}, tokenizer=inputs.tokenizer, max_tokens=inputs.max_prompt_tokens
            )
            for i in range(inputs.settings.num_prompts)
        ]

    def prompts(self, split):
        return self.all[4:] if split == "train" else self.all[:4]

    def score(self, prompt, texts, completions):
        return [{"count": float(text.split().count(self.word))} for text in texts]

    def solved(self, outcome):
        return outcome["count"] > 0

    def make_evaluator(self, inputs):
        return Evaluator(self, inputs)

class Evaluator:
    def __init__(self, task, inputs):
        self.task, self.inputs, self.prompts = task, inputs, inputs.prompts(task)

    def __call__(self, engine, between_steps=None):
        sampling = self.inputs.sampling
        groups = respond(engine, self.inputs.tokenizer, self.prompts, samples_per_prompt=2, sampling=sampling)
        texts = [text for group in groups for text in group.texts]
        return {"words": sum(len(text.split()) for text in texts), "num_texts": len(texts)}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the file of a task."""
    (tmp_path / "my_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_config(folder, *overrides, name="my_task.py:CountWords"):
    values = {"model": {"path": str(folder / "model")}, "task": {"name": name}, "output": str(folder / "runs")}
    return load_config(None, [*SETTINGS, *overrides], **values)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_task_from_a_file_trains_and_its_own_metric_is_in_the_summary(folder, here, monkeypatch, mode):
    config = make_config(folder, f"mode={mode}", "task.settings.word=w7", "train.max_steps=3", "overwrite=true")
    assert config.run_folder.name == "CountWords-tb-seed0"
    summary = train(config)
    assert (summary["task"], summary["steps"]) == ("CountWords", 3)
    # 8 responses of at most generate.max_new_tokens=8 words each
    assert 0 < summary["final"]["words"] <= 64
    assert "eval/CountWords/words" in (config.run_folder / "metrics.jsonl").read_text()
    # The path was written in full, so that the run is known in another working directory too.
    monkeypatch.chdir("/")
    assert evaluate_model(str(config.run_folder), [])["num_texts"] == 8


@pytest.mark.slow
def test_the_example_trains_and_measures_lines(tmp_path):
    settings = [
        "task.settings.largest=12", "mode=sync", "train.max_steps=2", "train.responses_per_step=16",
        "evaluate.every=0", "evaluate.num_prompts=4", "observe.progress=false",
    ]  # fmt: skip
    config = load_config(None, [f"task.name={EXAMPLE}:SmallSums", *settings], output=str(tmp_path))
    summary = train(config)
    assert summary["task"] == "SmallSums"
    # Two equations and the line of the answer, as the start model was taught.
    assert summary["final"]["lines"] == 3.0
    assert 0.0 <= summary["final"]["accuracy"] <= 1.0


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "none.py:Mine",
            {},
            r"task.name=.*none.py:Mine: file .*none.py does not exist. Give a Python file, relative to",
        ),
        ("my_task.py:", {}, r"task.name=.*my_task.py:: write file.py:class"),
        ("my_task.py:CountWord", {}, r"my_task.py has no class 'CountWord'; it has CountWords"),
        (
            "my_task.py:CountWords",
            {},
            r"task.settings.word: Field required, got {}. CountWords takes word, num_prompts",
        ),
        ("my_task.py:CountWords", {"word": 3}, r"task.settings.word: Input should be a valid string, got 3"),
        (
            "bad.py:Empty",
            {},
            r"Empty has no isolated_rewards, .*make_evaluator. A task needs isolated_rewards, .*score",
        ),
        ("bad.py:Empty", {"size": 3}, r"task.settings={'size': 3}: Empty takes no settings"),
        ("arithmetik", {}, r"task.name='arithmetik' is not known: it may be arithmetic, .* or file.py:Class"),
        ("arithmetic", {"size": 3}, r"arithmetic takes no settings"),
    ],
)
def test_what_cannot_be_a_task_is_refused_before_there_is_a_run_folder(folder, here, name, settings, message):
    (here / "bad.py").write_text("class Empty:\n    def __init__(self, inputs): pass\n")
    config = make_config(folder, f"task.settings={settings}", "name=refused", name=name)
    with pytest.raises(ValueError, match=message):
        train(config)
    assert not config.run_folder.exists()


ODD = """
from dataclasses import replace
import numpy as np
from my_task import CountWords

class NumPy(CountWords):
    def score(self, prompt, texts, completions):
        return [{"count": np.float32(outcome["count"])} for outcome in super().score(prompt, texts, completions)]

    def make_evaluator(self, inputs):
        return Said(self, {"words": np.float32(3.0)})

class Said:
    def __init__(self, task, metrics):
        self.prompts, self.metrics = task.prompts("held_out"), metrics

    def __call__(self, engine, between_steps=None):
        return self.metrics

class Few(CountWords):
    def score(self, prompt, texts, completions):
        return super().score(prompt, texts, completions)[1:]

class Bare(CountWords):
    def score(self, prompt, texts, completions):
        return [1.0 for _ in texts]

class Misspelt(CountWords):
    def score(self, prompt, texts, completions):
        return [{"cuont": 1.0} for _ in texts]

class Words(CountWords):
    def score(self, prompt, texts, completions):
        return [{"count": "many"} for _ in texts]

class Nothing(CountWords):
    def prompts(self, split):
        return []

class Twice(CountWords):
    def prompts(self, split):
        return [replace(prompt, id="x") for prompt in super().prompts(split)]

class Generated(CountWords):
    def prompts(self, split):
        return (prompt for prompt in super().prompts(split))

class Texts(CountWords):
    def prompts(self, split):
        return ["w7"]

class Number(CountWords):
    def make_evaluator(self, inputs):
        return Said(self, 0.5)

class NoNumber(CountWords):
    def make_evaluator(self, inputs):
        return Said(self, {"words": None})
"""


def odd_config(folder, here, name, mode="sync"):
    (here / "odd.py").write_text(ODD)
    settings = (f"mode={mode}", "task.settings.word=w7", "train.max_steps=1", f"name=odd-{name}-{mode}")
    return make_config(folder, *settings, name=f"odd.py:{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Few", r"Few.score returned 3 outcomes for 4 responses: return a list with one for each"),
        (
            "Bare",
            r"Bare.score returned 1.0 for a response: return its reward components by name, such as {'count': 1.0}",
        ),
        ("Misspelt", r"Misspelt.score returned 'cuont', without a weight: reward_weights has count"),
        ("Words", r"Words.score returned count='many': it is a number, or None"),
        ("Nothing", r"Nothing.prompts\('train'\) is empty: there is nothing to train on"),
        ("Twice", r"Twice.prompts\('train'\): id 'x' occurs twice; ids must be unique"),
        ("Generated", r"Generated.prompts\('train'\) is a generator: return a list"),
        ("Texts", r"Texts.prompts\('train'\)\[0\] is a str: make prompts with tba.tasks.data.make_prompt.make_prompt"),
        ("Number", r"the evaluator returned 0.5: return metrics by name"),
        ("NoNumber", r"the evaluator returned words=None: a metric is a number"),
    ],
)
def test_what_a_task_hands_over_wrongly_is_named(folder, here, name, message):
    with pytest.raises(ValueError, match=message):
        train(odd_config(folder, here, name))


@pytest.mark.slow
def test_a_searcher_whose_task_returns_no_outcomes_is_not_replaced(folder, here, caplog):
    """A new one would be given the same."""
    config = odd_config(folder, here, "Few", mode="async")
    with pytest.raises(RuntimeError, match=r"Few.score returned 3 outcomes for 4 responses"):
        train(config)
    assert "It is replaced" not in caplog.text


RAISES = """
from my_task import CountWords, Evaluator
from tba.tasks.data.make_prompt import make_prompt

class Score(CountWords):
    def score(self, prompt, texts, completions):
        return [{"count": float(prompt.columns["answer"])} for text in texts]

class Once(CountWords):
    def score(self, prompt, texts, completions):
        if prompt.id == "5":
            raise KeyError(prompt.id)
        return super().score(prompt, texts, completions)

class Init(CountWords):
    def __init__(self, inputs):
        super().__init__(inputs)
        self.first = self.all[99]

class Prompts(CountWords):
    def prompts(self, split):
        return self.every[split]

class Counts(CountWords):
    def make_evaluator(self, inputs):
        return Divides(self, inputs)

class Divides(Evaluator):
    def __call__(self, engine, between_steps=None):
        super().__call__(engine)
        return {"words": 1 / 0}

class Inside(CountWords):
    def __init__(self, inputs):
        make_prompt(id="x", text="w3", columns={}, tokenizer=None, max_tokens=8)
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Init", r"^Init\.__init__ failed at {file}:18: IndexError: list index out of range$"),
        ("Prompts", r"^Prompts\.prompts\('train'\) failed at {file}:22: AttributeError: .* has no attribute 'every'"),
        ("Counts", r"^Divides failed at {file}:31: ZeroDivisionError: division by zero$"),
    ],
)
def test_what_a_task_raises_is_told_with_its_own_file_and_line(folder, here, name, message):
    (here / "raises.py").write_text(RAISES)
    settings = ("mode=sync", "task.settings.word=w7", "train.max_steps=1", f"name=raises-{name}")
    with pytest.raises(ValueError, match=message.format(file=here / "raises.py")):
        train(make_config(folder, *settings, name=f"raises.py:{name}"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_score_that_always_raises_ends_the_run_with_its_line(folder, here, caplog, mode):
    """As a reward function that raises does; a new searcher would meet it again, so that none is started."""
    (here / "raises.py").write_text(RAISES)
    settings = (f"mode={mode}", "task.settings.word=w7", f"name=always-{mode}")
    config = make_config(folder, *settings, name="raises.py:Score")
    where = f"{here / 'raises.py'}:7: KeyError: 'answer'"
    with pytest.raises(
        RuntimeError, match=rf"failed on 100 samples in a row; the last: Score\.score failed at {where}"
    ):
        train(config)
    assert "It is replaced" not in caplog.text


def test_a_score_that_raises_for_one_prompt_costs_its_group(folder, here):
    """Eight steps of four groups draw each of the eight prompts four times; four responses of one are lost each time."""
    (here / "raises.py").write_text(RAISES)
    settings = ("mode=sync", "task.settings.word=w7", "train.max_steps=8", "name=once")
    assert train(make_config(folder, *settings, name="raises.py:Once"))["lost"]["responses"] == 16


def test_what_the_package_raises_for_a_task_stays_as_it_is(folder, here):
    (here / "raises.py").write_text(RAISES)
    with pytest.raises(AttributeError, match="NoneType"):
        train(make_config(folder, "task.settings.word=w7", "name=inside", name="raises.py:Inside"))


def test_numbers_of_numpy_are_numbers(folder, here):
    assert train(odd_config(folder, here, "NumPy"))["final"] == {"words": 3.0}


def test_configs_with_settings_can_be_keys_of_a_dict(here):
    """Runs of a study share what they load by their model and task."""
    first, same = (TaskConfig(name="my_task.py:CountWords", settings={"word": "w7"}) for _ in range(2))
    other = TaskConfig(name="my_task.py:CountWords", settings={"word": "w8"})
    assert len({first: 1, same: 2, other: 3}) == 2
