"""What a problem of the bench is, and the folder that a user of `tba train --model --data --reward` would have of it.

NAME/model/           a transformers folder with its tokenizer
NAME/train.jsonl      `prompt` (text or chat messages) and the columns that the rewards read
NAME/held_out.jsonl   the same, other prompts (one_prompt: the same prompt under another id)
NAME/rewards.py       plain functions f(completions, **columns) -> list[float]
NAME/problem.json     the settings that belong to the problem, the model's size and checksum, the start scores

start_models/NAME.safetensors holds the weights of a start model in fp16. Two kinds of CPU train two different models from
one recipe (word_sums starts at .283 on ARM and at .321 on x86), and runs compare only where they begin alike.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from recipes.start_models import (
    SPECIAL,
    Shape,
    Training,
    as_transformers,
    make_model,
    one_deterministic_thread,
    train_start_model,
)
from tba.config import ModelConfig
from tba.models.load import load_model
from tba.run import evaluate_model

Part = Literal["tuning", "reported", "real_tuning", "real_reported"]
"""Settings may be chosen by looking at tuning problems; the others are only ever reported. `real_`: pretrained models."""

REWARD_FILES = Path(__file__).parent / "rewards"
START_MODELS = Path(__file__).parent / "start_models"
DATA_SEED = 1
"""Of prompts; demonstrations are drawn by the seed of the training, another one."""
NUM_TRAIN, NUM_HELD_OUT = 3_000, 250
DEMONSTRATIONS_COMPARED = 500
"""Demonstrations that a fingerprint looks at."""
SAMPLES = 4
"""Sampled responses per held-out prompt in evaluations."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt with what its rewards and its demonstrations need.

    Row(prompt="what is two plus two ?", columns={"answer": "four"})
    """

    prompt: str | list[dict[str, str]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Written to the data files, for the rewards."""
    hidden: Any = None
    """Only for `Problem.demonstrate`."""


class CannotFetch(Exception):
    """A start model that is fetched is not to be had here."""


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """A start model made on the spot: a small Llama trained from scratch on flawed answers."""

    demonstrate: Callable[[Row, random.Random], str]
    """A flawed answer: what the model is trained to say. The right one must be in it now and then, or RL cannot find it."""
    tokenizer: Callable[[], PreTrainedTokenizerBase]
    shape: Shape
    training: Training


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A pretrained start model."""

    fetch: Callable[[Path], None]
    """Writes the model's folder, or raises CannotFetch with the reason."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem and how its start model is made.

    Everything about learning is left out on purpose: that is what the bench is there to choose.
    """

    name: str
    part: Part
    kind: str
    """A few words for the table."""
    rows: Callable[[random.Random], Iterator[Row]]
    """Prompts without end, drawn with the given generator; repetitions are left out by `splits`."""
    start: Supervised | Fetched
    rewards: Mapping[str, float] = field(default_factory=lambda: {"correct": 1.0})
    """Functions of rewards/NAME.py and their weights; those of weight 0 are measured, never trained on."""
    max_new_tokens: int
    metric: str = f"avg@{SAMPLES}"
    """The score of the problem, a key of what `tba evaluate` prints."""
    true_metric: str | None = None
    """What the user would have wanted, where the reward is noisy or can be played; None = `metric` says it."""
    steps: int = 200
    num_train: int = NUM_TRAIN
    num_held_out: int = NUM_HELD_OUT
    samples: int = SAMPLES
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings without which this problem does not start."""

    def run_settings(self, folder: Path) -> dict[str, Any]:
        """Settings of `tba train` and `tba evaluate` besides the model and those of learning."""
        own = folder / self.name
        rewards = [
            {"function": f"{own / 'rewards.py'}:{function}", "weight": weight}
            for function, weight in self.rewards.items()
        ]
        return {
            "task.name": "custom",
            "task.data": str(own / "train.jsonl"),
            "task.eval_data": str(own / "held_out.jsonl"),
            "task.rewards": rewards,
            "generate.max_new_tokens": self.max_new_tokens,
            "evaluate.num_prompts": self.num_held_out,
            "evaluate.samples_per_prompt": self.samples,
            **self.settings,
        }

    def overrides(self, folder: Path) -> list[str]:
        """The same as arguments of the command line, with paths that hold from everywhere."""
        settings = self.run_settings(folder.resolve())
        return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]


def splits(problem: Problem) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows: always the same, no prompt in both. A single prompt is on both sides."""
    drawn: dict[str, Row] = {}
    for row in problem.rows(random.Random(DATA_SEED)):
        drawn.setdefault(json.dumps(row.prompt), row)
        if len(drawn) == problem.num_train + problem.num_held_out or problem.num_train == 1:
            break
    rows = list(drawn.values())
    if problem.num_train == 1:
        return rows, rows
    return rows[problem.num_held_out :], rows[: problem.num_held_out]


def demonstrations(
    problem: Problem, start: Supervised, tokenizer: PreTrainedTokenizerBase, rng: random.Random
) -> Iterator[tuple[str, str]]:
    """Prompts with flawed answers, without end; held-out prompts never occur."""
    _, held_out = splits(problem)
    unseen = set() if problem.num_train == 1 else {json.dumps(row.prompt) for row in held_out}
    for row in problem.rows(rng):
        if json.dumps(row.prompt) not in unseen:
            yield prompt_text(row.prompt, tokenizer), start.demonstrate(row, rng)


def prompt_text(prompt: str | list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a prompt without its <bos>, which the tokenizer puts before it."""
    if isinstance(prompt, str):
        return prompt
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return text.removeprefix(tokenizer.bos_token)


def make_problem(problem: Problem, folder: Path) -> dict[str, Any]:
    """Write the problem's folder unless it is there, made as it would be now; returns what problem.json holds."""
    own = folder / problem.name
    if (own / "problem.json").is_file():
        found = json.loads((own / "problem.json").read_text())
        if found.get("fingerprint") == fingerprint(problem):
            return found
    own.mkdir(parents=True, exist_ok=True)
    write_data(problem, own)
    started = time.process_time()
    if isinstance(problem.start, Supervised):
        parameters = train_model(problem, problem.start, own / "model")
    else:
        parameters = fetch_model(problem.start, own / "model")
    return write_description(
        problem, folder, parameters=parameters, cpu_seconds=round(time.process_time() - started, 1)
    )


def fingerprint(problem: Problem) -> str:
    """Changes with the recipe and with the shipped start model: results of two editions are not to be mixed."""
    shipped = shipped_model(problem)
    return recipe(problem) if shipped is None else _digest(recipe(problem).encode() + shipped.read_bytes())


def recipe(problem: Problem) -> str:
    """Changes with the data, the rewards and the training of the start model."""
    train, held_out = splits(problem)
    parts = [f"{row.prompt} {row.columns}" for row in (*train, *held_out)]
    parts += [(REWARD_FILES / f"{problem.name}.py").read_text(), str(problem.run_settings(Path()))]
    if isinstance(problem.start, Supervised):
        start = problem.start
        shown = demonstrations(problem, start, start.tokenizer(), random.Random(start.training.seed))
        parts += [str(start.shape), str(start.training), *map(str, islice(shown, DEMONSTRATIONS_COMPARED))]
    return _digest("\n".join(parts).encode())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def shipped_model(problem: Problem) -> Path | None:
    """The weights that come with the bench; None = there are none of this recipe, and the model is trained on the spot."""
    path = START_MODELS / f"{problem.name}.safetensors"
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        return path if file.metadata()["recipe"] == recipe(problem) else None


def ship_model(problem: Problem, folder: Path) -> Path:
    """Keep the start model of a made problem as the one that every machine begins with, rounded to fp16."""
    weights = load_file(folder / problem.name / "model" / "model.safetensors")
    path = START_MODELS / f"{problem.name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file({name: value.half() for name, value in weights.items()}, path, metadata={"recipe": recipe(problem)})
    return path


def train_model(problem: Problem, start: Supervised, folder: Path) -> int:
    """Write the folder of a start model, shipped or made on the spot; returns its number of parameters."""
    tokenizer = start.tokenizer()
    shipped = shipped_model(problem)
    with one_deterministic_thread():
        if shipped is None:
            model = train_start_model(
                lambda rng: demonstrations(problem, start, tokenizer, rng), tokenizer, start.shape, start.training
            )
        else:
            model = with_weights(make_model(tokenizer, start.shape, seed=start.training.seed), shipped)
    disable_progress_bar()  # of writing a file that is there in a moment
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def with_weights(model: LlamaForCausalLM, path: Path) -> LlamaForCausalLM:
    """The model with shipped weights; every one of its own must be among them (the head is the embedding's)."""
    weights = {name: value.float() for name, value in load_file(path).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{path} does not fit: missing {missing}, unexpected {unexpected}.")
    return model


def fetch_model(start: Fetched, folder: Path) -> int:
    """Fetch the folder of a pretrained start model unless it is there; returns its number of parameters."""
    if not (folder / "config.json").is_file():
        start.fetch(folder)
    return load_model(ModelConfig(path=str(folder), device="cpu")).num_parameters


def write_data(problem: Problem, own: Path) -> None:
    """The two data files and the rewards."""
    for name, rows in zip(("train", "held_out"), splits(problem)):
        with (own / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({"prompt": row.prompt, **row.columns}, ensure_ascii=False) + "\n")
    shutil.copyfile(REWARD_FILES / f"{problem.name}.py", own / "rewards.py")


def write_description(problem: Problem, folder: Path, *, parameters: int, cpu_seconds: float) -> dict[str, Any]:
    """Measure the start model and write problem.json, the last file: a folder that has it is complete."""
    start = evaluate_model(str(folder / problem.name / "model"), problem.overrides(folder))
    description = {
        "name": problem.name,
        "part": problem.part,
        "kind": problem.kind,
        "fingerprint": fingerprint(problem),
        "model": _digest((folder / problem.name / "model" / "model.safetensors").read_bytes()),
        "parameters": parameters,
        "cpu_seconds_to_make": cpu_seconds,
        "metric": problem.metric,
        "true_metric": problem.true_metric,
        "steps": problem.steps,
        "rewards": dict(problem.rewards),
        "settings": [*problem.overrides(folder), f"train.max_steps={problem.steps}"],
        "start": start,
    }
    (folder / problem.name / "problem.json").write_text(json.dumps(description, indent=2) + "\n")
    return description


def words_of(text: str) -> list[str]:
    """The words of a vocabulary that is written in one line."""
    return text.split()


def make_character_tokenizer(characters: str) -> PreTrainedTokenizerBase:
    """One token per character: decode(encode(text)) == text for every text of these characters."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return as_transformers(tokenizer)
