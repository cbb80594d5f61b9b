"""A whole problem of a user's own, on a tiny random model: what the launch tests run."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from builders import tiny_llama, tiny_tokenizer
from transformers import LlamaForCausalLM

from tba.config import Config, load_config
from tba.observe.metrics import Evaluation
from tba.observe.run_folder import RunFolder
from tba.run import evaluate_model

REWARDS = """
import time

def sevens(completions, want, **columns):
    return [text.split().count(word) / max(1, len(text.split())) for text, word in zip(completions, want)]

def takes_its_time(completions, want, **columns):
    # Longer than the trainer of a tiny model takes for a step, however busy the machine is.
    sum(number * number for number in range(800_000))
    return sevens(completions, want)

def hangs_on_w9(completions, **columns):
    if any("w9" in text.split() for text in completions):
        time.sleep(600)
    return [1.0] * len(completions)

hangs_on_w9.per_sample = True

def always_one(completions, **columns):
    return [1.0] * len(completions)

def always_zero(completions, **columns):
    return [0.0] * len(completions)

def of_the_prompt(prompts, completions, **columns):
    return [float(len(prompt.split()) % 3) for prompt in prompts]

def always_raises(completions, **columns):
    raise KeyError("answer")

def fails_on_w5_prompts(prompts, completions, **columns):
    if any("w5" in prompt.split() for prompt in prompts):
        raise ValueError("not this one")
    return [1.0] * len(completions)

def fails_on_most(prompts, completions, **columns):
    if any(sum(map(ord, prompt)) % 5 for prompt in prompts):
        raise ValueError("not these four of five")
    return [1.0] * len(completions)

def sometimes_nan(completions, **columns):
    return [float("nan") if "w9" in text.split() else 1.0 for text in completions]
"""

SETTINGS = (
    "train.max_steps=6",
    "evaluate.every=0",
    "train.responses_per_step=16",
    "train.samples_per_prompt=4",
    "train.learning_rate=1e-3",
    "generate.max_new_tokens=8",
    "generate.slots=16",
    "train.tokens_per_micro_batch=4096",
    "evaluate.num_prompts=4",
    "search.num_searchers=1",
    "observe.progress=false",
)


def with_settings(*arguments: str, base: Sequence[str] = SETTINGS) -> list[str]:
    """Arguments of a command with those of `base`. Of settings that stand there twice the last is kept: a key has one value
    on a command line."""
    settings = {part.partition("=")[0]: part for part in (*base, *arguments) if "=" in part}
    return [*(part for part in arguments if "=" not in part), *settings.values()]


def start_model(layers: int = 1) -> LlamaForCausalLM:
    """One layer unless a test needs more: nearly all of a step's time is the interpreter's, layer by layer."""
    return tiny_llama(num_hidden_layers=layers)


def write_problem(folder: Path, *, num_prompts: int = 30, layers: int = 1) -> None:
    """model/, data.jsonl and rewards.py."""
    start_model(layers).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    generator = random.Random(0)
    rows = [
        {"prompt": " ".join(f"w{generator.randint(3, 39)}" for _ in range(generator.randint(2, 6))), "want": "w7"}
        for _ in range(num_prompts)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)


def make_config(folder: Path, *overrides: str, reward: str = "sevens") -> Config:
    task = {
        "name": "custom",
        "data": str(folder / "data.jsonl"),
        "rewards": [{"function": f"{folder}/rewards.py:{reward}"}],
    }
    values = {"model": {"path": str(folder / "model")}, "task": task, "output": str(folder / "runs")}
    return load_config(None, [*SETTINGS, *overrides], **values)


def scores_of(config: Config) -> dict[str, float]:
    """What `tba evaluate` says of a run's newest checkpoint, without standard errors."""
    return dict(Evaluation.of(evaluate_model(str(config.run_folder), [])).values)


def children() -> list[psutil.Process]:
    """Living processes that this one has started, and theirs; but for the server that roles are forked from, the one that
    watches over the GPU's MPS daemon and those that torch compiles in, which serve the next run too."""
    return [p for p in psutil.Process().children(recursive=True) if _is_of_a_run(p)]


def _is_of_a_run(process: psutil.Process) -> bool:
    try:
        is_server = "serve" in process.cmdline() and not process.name().startswith("searcher-")
        watches = [line for p in (process, process.parent()) if p is not None for line in p.cmdline()]
        compiles = any("_inductor/compile_worker" in line for line in process.cmdline())
        serves = is_server or compiles or "tba-mps-watch" in watches
        return process.status() != psutil.STATUS_ZOMBIE and not serves
    except (psutil.NoSuchProcess, FileNotFoundError):  # it has ended meanwhile
        return False


def wait_for(condition, seconds: float = 120.0) -> bool:
    """Poll with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def command(folder: Path, name: str, *overrides: str, reward: str = "sevens") -> list[str]:
    """`tba train` on the problem, for a process of its own."""
    options = ["--model", f"{folder}/model", "--data", f"{folder}/data.jsonl"]
    options += ["--reward", f"{folder}/rewards.py:{reward}"]
    settings = with_settings(f"output={folder}/runs", f"name={name}", *overrides)
    return [sys.executable, "-m", "tba", "train", *options, *settings]


def records_so_far(config: Config) -> list[dict[str, Any]]:
    """Lines of the metrics of a run that may be writing one: of that a reader may see the beginning."""
    path = RunFolder(config.run_folder).metrics
    written = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in written.splitlines()]


def steps_of(config: Config) -> list[int]:
    """Optimizer steps that are recorded, in the order of their lines."""
    return [record["step"] for record in records_so_far(config) if "loss" in record]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("problem")
    write_problem(path)
    return path


@pytest.fixture(autouse=True)
def _nothing_is_left_running():
    yield
    assert not children()
