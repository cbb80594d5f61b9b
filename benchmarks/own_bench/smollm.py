"""A pretrained chat model of 135M parameters on small sums, where it can be fetched.

The model is a third party's repackaging of SmolLM2-135M-Instruct in 4 bits, not the publisher's checkpoint.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from own_bench.problem import CannotFetch, Fetched, Problem, Row

QUESTIONS = ("What is {a} plus {b}?", "How much is {a} + {b}?", "Add {a} and {b}.")
MOST = 20
"""Largest number in a question."""
TOOL = Path("shared/tools/real_model.py")
"""Beside the checkout or above it; it needs the package gguf."""


def small_sum_rows(rng: random.Random) -> Iterator[Row]:
    """`What is 7 plus 4? Reply with only the number.`, as a user's message."""
    while True:
        left, right = rng.randint(1, MOST), rng.randint(1, MOST)
        question = f"{rng.choice(QUESTIONS).format(a=left, b=right)} Reply with only the number."
        yield Row(prompt=[{"role": "user", "content": question}], columns={"answer": str(left + right)})


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
        kind="chat, pretrained model, small sums",
        rows=small_sum_rows,
        start=Fetched(fetch=fetch_smollm),
        max_new_tokens=12,
        steps=60,
        num_train=1_000,
        num_held_out=100,
    ),
)
