"""Share of the time in which the engine stands still because all episodes wait for a tool.

    python benchmarks/environments.py --sleep 0.2 [--model RUN/checkpoints/step-150] [--rollouts 128] [--slots 128]

The calculator's tool sleeps in each call. The start model calls it in almost half of its episodes, a trained one in nearly
all. Prints the idle share, episodes per second, and calls per episode.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tba.config import load_config
from tba.engine.make_engine import stop_ids_of
from tba.engine.native.engine import NativeEngine
from tba.models.load import load_model, use_cpu
from tba.tasks.data.make_prompt import make_prompt
from tba.tasks.environments.episodes import EpisodeEngine, EpisodeKey
from tba.tasks.environments.host import Answer, EnvironmentSpec
from tba.tasks.environments.workers import Environments
from tba.types import Request, Sampling

SAMPLES = 8


def slow_tool(seconds: float) -> Callable[..., int]:
    def multiply(a: int, b: int) -> int:
        """Multiply two whole numbers.

        Args:
            a: One number.
            b: The other number.
        """
        time.sleep(seconds)
        return a * b

    return multiply


class Timed(Environments):
    """Counts the time in which nothing is generated: only then the engine waits for answers."""

    idle_seconds = 0.0

    def answers(self, wait_seconds: float = 0.0) -> list[tuple[EpisodeKey, Answer]]:
        started = time.monotonic()
        found = super().answers(wait_seconds)
        self.idle_seconds += time.monotonic() - started if wait_seconds else 0.0
        return found


def measure(model: str, *, sleep: float, rollouts: int, slots: int) -> dict[str, Any]:
    """Generate all rollouts once, after some that start the environments' processes."""
    loaded = load_model(load_config(None, [f"model.path={model}", "model.device=cpu"]).model)
    stop = stop_ids_of(loaded.model, loaded.tokenizer)
    engine = NativeEngine(loaded.model, stop_ids=stop, seed=0, slots=slots, max_length=128, dtype=torch.float32)
    spec = EnvironmentSpec(classes={}, rewards={}, tools=(slow_tool(sleep),))
    with tempfile.TemporaryDirectory() as folder:
        environments = Timed(spec, log=Path(folder) / "environments.log")
        episodes = EpisodeEngine(engine, lambda: environments, loaded.tokenizer, seed=0)
        requests = [
            Request(prompt=prompt_of(number, loaded.tokenizer)) for number in range(rollouts + slots // SAMPLES)
        ]
        generate = {"samples_per_prompt": SAMPLES, "sampling": Sampling(max_new_tokens=48)}
        list(episodes.generate(requests[rollouts:], **generate))
        started, environments.idle_seconds = time.monotonic(), 0.0
        found = list(episodes.generate(requests[:rollouts], **generate))
        seconds = time.monotonic() - started
        environments.close()
    calls = sum(message["role"] == "tool" for own in found for message in own.episode.messages)
    return {
        "sleep_seconds": sleep,
        "idle_share": round(environments.idle_seconds / seconds, 3),
        "episodes_per_second": round(len(found) / seconds, 1),
        "calls_per_episode": round(calls / len(found), 2),
        "seconds": round(seconds, 2),
    }


def prompt_of(number: int, tokenizer: Any) -> Any:
    text = f"What is {100 + number} * {999 - number}?"
    return make_prompt(id=str(number), text=text, columns={}, tokenizer=tokenizer, max_tokens=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tba:tools")
    parser.add_argument("--sleep", type=float, default=0.2)
    parser.add_argument("--rollouts", type=int, default=128)
    parser.add_argument("--slots", type=int, default=128)
    given = parser.parse_args()
    use_cpu(threads=1)
    for sleep in (0.0, given.sleep):
        print(json.dumps(measure(given.model, sleep=sleep, rollouts=given.rollouts, slots=given.slots)), flush=True)


if __name__ == "__main__":
    main()
