"""How steady a run was, in one line (alarms, drift, what was held back, reuse), and what to change first if it fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MEANS = {"drift_nats": "off_policy/kl", "held_back": "tb/held_back"}
"""Name in the summary -> metric whose mean over the steps it is."""
LASTS = {"trained_per_generated": "buffer/replay_ratio", "learning_rate": "learning_rate"}
"""The same for the last value."""
MUCH_HELD_BACK = 0.4
"""Share of the gradient: more than this means that most responses are too old when they are trained."""
FELL_ERRORS = 2.0
"""Standard errors by which the final score lies below the best one before it counts as lost."""


@dataclass
class Stability:
    """Sums over the steps of a run."""

    _sums: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _lasts: dict[str, float] = field(default_factory=dict)

    def step(self, metrics: Mapping[str, float]) -> None:
        for name, metric in MEANS.items():
            if metric in metrics:
                self._sums[name] = self._sums.get(name, 0.0) + metrics[metric]
                self._counts[name] = self._counts.get(name, 0) + 1
        self._lasts |= {name: metrics[metric] for name, metric in LASTS.items() if metric in metrics}

    def summary(self) -> dict[str, float]:
        """{"drift_nats": 0.02, "held_back": 0.1, "trained_per_generated": 1.0, "learning_rate": 3e-06}"""
        means = {name: self._sums[name] / self._counts[name] for name in self._sums}
        return {name: float(f"{value:.4g}") for name, value in (means | self._lasts).items()}


def stability_words(summary: Mapping[str, Any]) -> str:
    """One line about a run from its summary.json."""
    found, collapse = summary["stability"], summary["collapse"]
    parts = ["no alarm" if collapse is None else f"collapse alarm at step {collapse['step']}"]
    if collapse is not None and collapse.get("recovered"):
        parts[0] += f", recovered by step {collapse['recovered']}"
    if "drift_nats" in found:
        parts.append(f"the policy moved {found['drift_nats']:.2g} nats between generating and training a response")
    if "held_back" in found:
        parts.append(f"{found['held_back']:.0%} of the gradient was held back")
    if "trained_per_generated" in found:
        parts.append(f"each response was trained {found['trained_per_generated']:.2g} times")
    return f"stability: {'; '.join(parts)}"


def went_badly(summary: Mapping[str, Any]) -> bool:
    """A collapse that lasts, or a final score clearly below the best one."""
    collapse, best = summary["collapse"], summary["best"]
    if collapse is not None and not collapse.get("recovered"):
        return True
    name = next(iter(summary["final"]), None)
    if best is None or name is None:
        return False
    return summary["final"][name] < best["score"] - FELL_ERRORS * summary["final_standard_error"].get(name, 0.0)


def advice(summary: Mapping[str, Any], *, auto_rate: bool, movement: float) -> str:
    """What to change first."""
    found = summary["stability"]
    if found.get("held_back", 0.0) > MUCH_HELD_BACK and found.get("trained_per_generated", 1.0) > 1.5:
        return "change first: lower replay.max_trained_per_generated, responses are too old when they are trained."
    if found.get("held_back", 0.0) > MUCH_HELD_BACK:
        return (
            "change first: replay.lag=pace replay.max_lag=1 (or fewer searchers), responses are too old when trained."
        )
    if not auto_rate:
        return "change first: leave train.learning_rate unset (auto), or divide it by 3."
    return f"change first: train.movement={movement / 2:g} (half of what it was), then a higher objective.beta."
