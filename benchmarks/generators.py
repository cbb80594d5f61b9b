"""Generators of reasoning-gym, learned from start models that are made on the spot.

    python -m benchmarks.generators [NAMES] --steps 100 --seconds 300 --seed 0 --folder runs/generators

A start model is a small Llama that was trained for a few hundred steps on the generator's own problems with flawed answers.
Then `tba train task.name=reasoning_gym:NAME` runs with defaults for so many steps, or seconds where these end first. The
table has the mean score of four samples for each held-out problem, with standard errors over problems; `gain` is in standard
errors of the difference, taken as if both evaluations had different problems. Held-out questions
are in neither training.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import hypot
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from recipes.start_models import SPECIAL, Shape, Training, as_transformers, one_deterministic_thread, train_start_model
from tba.config import TaskConfig, load_config
from tba.run import train
from tba.tasks.data.make_prompt import question_key
from tba.tasks.reasoning_gym.generators import Generator
from tba.tasks.registry import make_task

DEMONSTRATION_SEED = 3_000_000_000
"""Seed of the problems that start models learn from, far from those of the task's splits."""
TEMPLATE_SHARE = 0.5
"""Share of the questions that a word must be in to be one token; all else is read by the character."""
NUM_HELD_OUT = 500
SAMPLES = 4
METRIC = f"reward@{SAMPLES}"


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start model: Start(steps=400, slips=0.15, options={"max_terms": 2})"""

    steps: int = 400
    slips: float = 0.15
    """Chance of each character of a demonstrated answer to be another one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the generator that are not the package's defaults."""


STARTS = {
    "spell_backward": Start(),
    "letter_counting": Start(),
    "palindrome_generation": Start(),
    "number_sorting": Start(options={"max_numbers": 5, "max_decimals": 0}),
    "chain_sum": Start(options={"min_terms": 3, "max_terms": 3, "max_digits": 1}),
    "gcd": Start(options={"max_value": 40}),
}


def task_settings(name: str) -> dict[str, Any]:
    return {
        "name": f"reasoning_gym:{name}",
        "settings": {"options": dict(STARTS[name].options), "num_held_out": NUM_HELD_OUT},
    }


def make_start_model(name: str, folder: Path) -> None:
    """Write the folder of a start model."""
    start, training = STARTS[name], Training(steps=STARTS[name].steps)
    generator = Generator(
        name, start.options, seed=DEMONSTRATION_SEED, size=training.steps * training.batch_size + 1000
    )
    tokenizer = make_tokenizer(generator)
    task: Any = make_task(TaskConfig(**task_settings(name)), tokenizer, max_prompt_tokens=1000)
    unseen = task.prompts("held_out").keys

    def demonstrations(rng: random.Random) -> Iterator[tuple[str, str]]:
        for place in count():
            problem = generator.problem(place)
            if question_key(problem["question"]) not in unseen:
                yield f"{problem['question']}\n", flawed(problem["answer"], start.slips, rng)

    with one_deterministic_thread():
        model = train_start_model(demonstrations, tokenizer, Shape(hidden_size=128, context=512), training)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def flawed(answer: str, slips: float, rng: random.Random) -> str:
    """The answer with some characters exchanged for others of their kind."""
    return "".join(another(character, rng) if rng.random() < slips else character for character in answer)


def another(character: str, rng: random.Random) -> str:
    kind = "0123456789" if character.isdigit() else "abcdefghijklmnopqrstuvwxyz" if character.isalpha() else character
    return rng.choice(kind)


def make_tokenizer(generator: Generator) -> PreTrainedTokenizerBase:
    """A tokenizer of characters, and of the words that most questions of a generator have."""
    questions = [generator.problem(place)["question"] for place in range(500)]
    shares = Counter(word for question in questions for word in set(re.findall(r" ?[A-Za-z]{2,}", question)))
    words = [word for word, number in shares.most_common() if number >= TEMPLATE_SHARE * len(questions)]
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, "\n", *characters, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    longest_first = "|".join(sorted(words, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(rf"(?<![A-Za-z])(?:{longest_first})(?![A-Za-z])|[\s\S]"), behavior="isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    return as_transformers(tokenizer)


def learn(name: str, arguments: argparse.Namespace) -> str:
    """Train from the start model; returns the table's row."""
    model = arguments.folder / name / "model"
    if not (model / "config.json").is_file():
        make_start_model(name, model)
    limits = [f"train.max_steps={arguments.steps}", f"train.max_seconds={arguments.seconds}"]
    overrides = [*limits, f"seed={arguments.seed}", *arguments.settings]
    config = load_config(
        None,
        overrides,
        model={"path": str(model)},
        task=task_settings(name),
        generate={"max_new_tokens": 48},
        evaluate={"samples_per_prompt": SAMPLES, "num_prompts": NUM_HELD_OUT, "every": 0},
        output=str(arguments.folder / name),
        name=f"seed{arguments.seed}",
        overwrite=True,
    )
    summary = train(config)
    (before, its_error), (after, own_error) = (
        (summary[end][METRIC], summary[f"{end}_standard_error"][METRIC]) for end in ("start", "final")
    )
    gain = (after - before) / hypot(its_error, own_error)
    return (
        f"| {name} | {dict(STARTS[name].options) or 'defaults'} | {before:.3f} ± {its_error:.3f} "
        f"| {after:.3f} ± {own_error:.3f} | {gain:.1f} | {summary['steps']} | {summary['seconds']:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(STARTS), metavar="NAME", help=", ".join(STARTS))
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps for each generator, at most")
    parser.add_argument("--seconds", type=float, default=300.0, help="seconds of training for each generator, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/generators"))
    parser.add_argument("--settings", nargs="*", default=[], metavar="key=value")
    arguments = parser.parse_args()
    rows = [learn(name, arguments) for name in arguments.names]
    head = f"| generator | options | start {METRIC} | final {METRIC} | gain | steps | seconds |"
    print("\n".join([head, "|---" * 7 + "|", *rows]))


if __name__ == "__main__":
    main()
