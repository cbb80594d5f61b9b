"""The README of a trained model."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from tba.config import Config


def model_card(config: Config, summary: Mapping[str, Any]) -> str:
    """What it was trained from, on what, how, and how well it did: from the run's own config and summary."""
    rows = "".join(
        f"| {name} | {_with_error(summary, 'start', name)} | {_with_error(summary, 'final', name)} |\n"
        for name in summary.get("final", {})
    )
    rewards = ", ".join(reward.label for reward in config.task.rewards)
    table = f"\n| metric | start | end |\n|---|---|---|\n{rows}" if rows else ""
    return f"""---
base_model: {config.model.path}
library_name: {"peft" if config.model.lora is not None else "transformers"}
tags: [tba, reinforcement-learning, trajectory-balance]
---

# {config.run_name}

Trained from `{config.model.path}` with [tba](https://pypi.org/project/tba-rl/) {version("tba-rl")}: objective
`{config.objective.name}`, {summary["steps"]} optimizer steps of {config.train.responses_per_step} responses,
rewards {rewards or "of the task"}, seed {config.seed}, {summary["seconds"]:.0f} s.
{table}
Evaluated on {summary.get("evaluated", {}).get("num_prompts", 0)} held-out prompts.
"""


def _with_error(summary: Mapping[str, Any], when: str, name: str) -> str:
    value, error = summary.get(when, {}).get(name), summary.get(f"{when}_standard_error", {}).get(name)
    if value is None:
        return ""
    return f"{value:.3g}" if error is None else f"{value:.3g} +- {error:.2g}"
