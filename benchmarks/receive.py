"""What taking in groups costs the trainer, by part (metric time/receive).

    OMP_NUM_THREADS=1 python benchmarks/receive.py            # about two minutes
    OMP_NUM_THREADS=1 python benchmarks/receive.py --quick    # a tenth of the size

Groups go through a real link to a real trainer without a model (Trainer.receive), whose buffer and durable replay are full:
every group evicts as many responses as it brings. "one prompt" is red-teaming as in configs/studies/red_team_searchers.yaml:
groups of 128 responses of 8 tokens. "many prompts" are groups of 8 responses of 60 tokens of 10,000 prompts.

Times are CPU time per group and per response: of the trainer's thread (drain, replay.add, durable.append, the rest: counts,
ledger, recorder, acknowledgements) and of the two threads beside it, which read the link and write the durable replay. What
they compute in Python keeps the trainer from computing. `wall` is the time that `receive` took, `searcher` the CPU time in
which a searcher packs the group.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from tba.config import Config, load_config
from tba.observe.claim import Holder
from tba.observe.files import RunFolder
from tba.observe.recorder import Recorder
from tba.replay import ReplayBuffer
from tba.replay.columns import pack_responses
from tba.replay.durable import make_store
from tba.runtime.board import Board
from tba.runtime.leases import VisitLedger
from tba.runtime.links import PARENT, Link, RelayedLink, SearcherStarted, pickled
from tba.runtime.local import LocalRuntime
from tba.runtime.seats import Host
from tba.train.loop import Trainer
from tba.types import Completion, Prompt, ResponseCounts, Trajectory, TrajectoryGroup

HOLDER = "searcher-0.0"
WEIGHTS = {"toxicity": 1.0}
GROUPS_AT_ONCE, ROUNDS = 46, 20
PARTS = ("read the link", "drain", "replay.add", "durable.append", "counts", "write durable")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Scenario(name="one prompt", num_prompts=1, responses=128, tokens=8, capacity=200_000)"""

    name: str
    num_prompts: int
    responses: int
    tokens: int
    """Mean length of a response; they are half to one and a half times as long."""
    capacity: int


def groups(scenario: Scenario) -> Iterator[TrajectoryGroup]:
    """Visits to the prompts in turns."""
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(id=f"train-{i}", token_ids=rng.integers(0, 32_000, 30, dtype=np.int32), text="What is 2 + 2?")
        for i in range(scenario.num_prompts)
    ]
    number = 0
    while True:
        prompt, first = prompts[number % len(prompts)], scenario.responses * (number // len(prompts))
        trajectories = [response(prompt, first + i, scenario.tokens, rng) for i in range(scenario.responses)]
        yield TrajectoryGroup(
            id=f"{HOLDER}/{number}",
            prompt=prompt,
            trajectories=tuple(trajectories),
            visit=number,
            solved=(False,) * scenario.responses,
        )
        number += 1


def response(prompt: Prompt, sample: int, tokens: int, rng: np.random.Generator) -> Trajectory:
    length = int(rng.integers(tokens // 2, tokens + tokens // 2 + 1))
    log_probs = -rng.random((3, length), dtype=np.float32)
    completion = Completion(
        prompt_id=prompt.id,
        sample_index=sample,
        token_ids=rng.integers(0, 32_000, length, dtype=np.int32),
        behaviour_log_probs=log_probs[0].copy(),
        policy_log_probs=log_probs[1].copy(),
        version_spans=((0, 0),),
        finish="stop",
    )
    return Trajectory(
        completion=completion,
        rewards={"toxicity": float(rng.random())},
        log_ref=log_probs[2].copy(),
        reference_version=0,
        loss_mask=np.ones(length, np.bool_),
    )


class Bench:
    """A trainer that takes in what one searcher sends."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.seconds: dict[str, float] = defaultdict(float)
        """CPU seconds by part."""
        self.source = groups(scenario)
        config = make_config(scenario, folder)
        ours, theirs = Pipe()
        self.supervisor = RelayedLink(ours, deliver=lambda link, address, body: None)
        self.link = Link(theirs)
        ledger = VisitLedger(scenario.num_prompts, seed=0)
        runtime = LocalRuntime(
            config.runtime,
            Host(link=self.link, board=Board.create(), owner=Holder.of_this_process()),
            num_searchers=1,
            tensors={"w": torch.zeros(4)},
            dtype=torch.float32,
            canary=lambda weights: np.zeros(64),
            ledger=ledger,
        )
        run, counts = RunFolder.create(config.run_folder, overwrite=True), ResponseCounts()
        self.trainer = Trainer(
            config=config,
            train_step=cast(Any, None),
            replay=ReplayBuffer(
                config.replay, fresh_steps=4, seed=0, reward_names=list(WEIGHTS), reward_weights=list(WEIGHTS.values())
            ),
            receiver=runtime,
            publisher=runtime,
            recorder=Recorder(
                config, run, decode=lambda group: [""] * len(group.trajectories), reward_weights=WEIGHTS, counts=counts
            ),
            reward_weights=WEIGHTS,
            checkpoints=cast(Any, None),
            rate=cast(Any, None),
            ledger=ledger,
            counts=counts,
            durable=make_store(config, run, reward_weights=WEIGHTS),
        )
        self.supervisor.send_frame(PARENT, pickled(SearcherStarted(holder=HOLDER, survived=False)))
        self.clock(runtime, "drain", "drain")
        self.clock(self.trainer.replay, "add", "replay.add")
        self.clock(self.trainer.durable, "append", "durable.append")

    def clock(self, part: Any, method: str, name: str) -> None:
        """Count the CPU time of a method."""
        call: Callable[..., Any] = getattr(part, method)

        def clocked(*arguments: Any, **settings: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*arguments, **settings)
            finally:
                self.seconds[name] += time.thread_time() - started

        setattr(part, method, clocked)

    def receive(self, count: int) -> None:
        """Have groups sent and, when all of them have arrived, taken in."""
        made = [next(self.source) for _ in range(count)]
        started = time.thread_time()
        bodies = [pickled(as_sent(group)) for group in made]
        self.seconds["searcher"] += time.thread_time() - started
        for body in bodies:
            self.supervisor.send_frame(HOLDER, body)
        while self.link._inbox.qsize() < count:
            time.sleep(0.001)
        wall, started = time.perf_counter(), time.thread_time()
        self.trainer.receive()
        self.seconds["receive"] += time.thread_time() - started
        self.seconds["wall"] += time.perf_counter() - wall

    def fill(self) -> None:
        while len(self.trainer.replay) + self.scenario.responses <= self.scenario.capacity:
            self.receive(GROUPS_AT_ONCE)

    def measure(self) -> dict[str, float]:
        """Milliseconds of a group by part."""
        assert self.trainer.durable is not None
        self.trainer.durable.flush()
        self.seconds.clear()
        threads = {"read the link": self.link._reader, "write durable": self.trainer.durable._writer}
        before = {name: cpu_seconds(thread) for name, thread in threads.items()}
        for _ in range(ROUNDS):
            self.receive(GROUPS_AT_ONCE)
        self.trainer.durable.flush()
        found = dict(self.seconds) | {name: cpu_seconds(thread) - before[name] for name, thread in threads.items()}
        found["counts"] = found["receive"] - sum(found[name] for name in ("drain", "replay.add", "durable.append"))
        found["in all"] = sum(found[name] for name in PARTS)
        return {name: 1e3 * seconds / (ROUNDS * GROUPS_AT_ONCE) for name, seconds in found.items()}

    def close(self) -> None:
        self.trainer.close()
        self.trainer.recorder.close()
        self.supervisor.close()


def as_sent(group: TrajectoryGroup) -> TrajectoryGroup:
    """As SearchLoop makes a group."""
    return replace(group, trajectories=pack_responses(group.trajectories, group.id))


def cpu_seconds(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def make_config(scenario: Scenario, folder: Path) -> Config:
    capacity = scenario.capacity
    settings = [
        *("replay.mix=responses", "replay.on_policy_probability=0.5", "replay.inverse_temperature=20.0"),
        *("replay.importance_weighted=true", "replay.uniform_share=0.5", "replay.deduplicate=true"),
        *(f"replay.capacity={capacity}", f"replay.capacity_per_prompt={capacity}"),
        *("observe.progress=false", f"output={folder}", "name=receive"),
    ]
    return load_config(None, settings)


def scenarios(scale: float) -> list[Scenario]:
    prompts = int(10_000 * scale)
    return [
        Scenario(name="one prompt", num_prompts=1, responses=128, tokens=8, capacity=int(200_000 * scale)),
        Scenario(name="many prompts", num_prompts=prompts, responses=8, tokens=60, capacity=8 * prompts),
    ]


def report(scenario: Scenario, found: dict[str, float]) -> None:
    print(f"\n{scenario.name}: groups of {scenario.responses} responses of {scenario.tokens} tokens")
    for name in (*PARTS, "in all", "wall", "searcher"):
        print(
            f"    {name:<16}{found[name]:>8.3f} ms a group{1e3 * found[name] / scenario.responses:>9.2f} us a response"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    arguments = parser.parse_args()
    for scenario in scenarios(0.1 if arguments.quick else 1.0):
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(scenario, Path(folder))
            bench.fill()
            report(scenario, bench.measure())
            bench.close()


if __name__ == "__main__":
    main()
