"""Which fault comes when: a plan that depends on the seed and the length alone.

Faults come in two streams. Those of the searchers, and a trainer that is held up, come every few seconds; those that end
the trainer or the run, or take its disk, come rarely enough for the run to get somewhere in between. Each stream has a
window for every fault, in random order, and a random moment within each window.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "kill_searcher", "stop_searcher", "stop_trainer", "kill_trainer", "kill_supervisor", "corrupt_checkpoint", "fill_disk"
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)

FREQUENT: dict[Kind, int] = {"kill_searcher": 30, "stop_searcher": 54, "stop_trainer": 18}
RARE: dict[Kind, int] = {"kill_trainer": 8, "kill_supervisor": 3, "corrupt_checkpoint": 3, "fill_disk": 4}
"""Faults in ten minutes."""
SECONDS: dict[Kind, tuple[float, float]] = {
    "stop_searcher": (1.0, 8.0),
    "stop_trainer": (0.5, 5.0),
    "fill_disk": (1.0, 4.0),
}
"""Least and greatest duration of a fault; faults that are not here are moments."""

LEAST_FAULTS = 100
LEAST_BY_KIND: dict[Kind, int] = {"kill_searcher": 15, "kill_trainer": 5}
"""What ten minutes must have."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Fault(at=12.5, kind="stop_searcher", seconds=3.2, draw=0.71)"""

    at: float
    """Seconds after the first moment of the plan."""
    kind: Kind
    seconds: float
    """How long it lasts; 0 = a moment."""
    draw: float
    """A number in [0, 1) that decides what else is open: which searcher, which byte."""


def make_plan(*, seed: int, minutes: float) -> tuple[Fault, ...]:
    """The faults of a run in the order of their times."""
    rng = random.Random(seed)
    faults = [fault for stream in (FREQUENT, RARE) for fault in _stream(stream, rng, minutes)]
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _stream(per_ten_minutes: dict[Kind, int], rng: random.Random, minutes: float) -> list[Fault]:
    kinds = [kind for kind, count in per_ten_minutes.items() for _ in range(max(1, round(count * minutes / 10.0)))]
    rng.shuffle(kinds)
    window = 60.0 * minutes / len(kinds)
    # The first half of a window: two faults of a stream are never closer than half a window.
    return [
        Fault(
            at=(index + rng.uniform(0.0, 0.5)) * window,
            kind=kind,
            seconds=rng.uniform(*SECONDS[kind]) if kind in SECONDS else 0.0,
            draw=rng.random(),
        )
        for index, kind in enumerate(kinds)
    ]


def shortfalls(kinds: Iterable[Kind], *, minutes: float) -> list[str]:
    """What the faults that were injected lack of what ten minutes must have, in proportion for another length."""
    counts, share = Counter(kinds), minutes / 10.0
    wanted = {"faults": (counts.total(), LEAST_FAULTS)}
    wanted |= {kind: (counts[kind], least) for kind, least in LEAST_BY_KIND.items()}
    return [
        f"{found} {name} instead of {int(least * share)}"
        for name, (found, least) in wanted.items()
        if found < int(least * share)
    ]


def mix(kinds: Iterable[Kind]) -> str:
    """How many of each kind, for people: "kill_searcher 30, stop_searcher 28" """
    counts = Counter(kinds)
    return ", ".join(f"{kind} {counts[kind]}" for kind in KINDS if counts[kind])
