"""A pretrained chat model of 135M parameters on a problem of one-word answers, where it can be fetched.

The model is a third party's repackaging of SmolLM2-135M-Instruct in 4 bits, not the publisher's checkpoint.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from own_bench.problem import CannotFetch, Fetched, Problem, Row, words_of

KINDS = {
    "an animal": words_of("horse tiger rabbit eagle shark spider monkey donkey camel goose wolf sheep"),
    "a fruit": words_of("apple banana cherry lemon mango melon peach pear plum grape fig orange"),
    "a tool": words_of("hammer saw drill wrench shovel rake axe chisel pliers screwdriver file spanner"),
    "a colour": words_of("red blue green yellow purple brown black white pink grey violet turquoise"),
    "a country": words_of("France Spain Italy Japan Brazil Egypt Canada India Peru Kenya Norway Greece"),
    "a musical instrument": words_of("piano violin guitar flute drum trumpet harp cello organ banjo clarinet oboe"),
}
TOOL = Path("shared/tools/real_model.py")
"""Beside the checkout or above it; it needs the package gguf."""


def odd_one_rows(rng: random.Random) -> Iterator[Row]:
    """`Which of these words is a fruit: hammer, plum, wolf, Peru? Answer with one word.`"""
    while True:
        asked, *others = rng.sample(list(KINDS), 4)
        answer = rng.choice(KINDS[asked])
        words = [answer, *(rng.choice(KINDS[kind]) for kind in others)]
        rng.shuffle(words)
        question = f"Which of these words is {asked}: {', '.join(words)}? Answer with one word."
        yield Row(prompt=[{"role": "user", "content": question}], columns={"answer": answer})


def fetch_smollm(folder: Path) -> None:
    tools = [parent / TOOL for parent in Path(__file__).resolve().parents if (parent / TOOL).is_file()]
    if not tools:
        raise CannotFetch(f"no folder above {Path(__file__).resolve().parent} has {TOOL}, which fetches the model.")
    command = [sys.executable, str(tools[0]), "smollm2-135m", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CannotFetch(f"{tools[0]} failed: {reason}")


PROBLEMS = (
    Problem(
        name="smollm",
        part="reported",
        kind="chat, pretrained model, one word",
        rows=odd_one_rows,
        start=Fetched(fetch=fetch_smollm),
        max_new_tokens=8,
        steps=60,
        num_train=1_000,
        num_held_out=100,
    ),
)
