"""Real samples, readable: what the policy was asked, what it said, what it got."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tba.types import Trajectory, TrajectoryGroup


class SampleLog:
    """Appends a group's best and worst response to samples.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, step: int, group: TrajectoryGroup, texts: list[str]) -> None:
        rewards = [_total(trajectory) for trajectory in group.trajectories]
        chosen = sorted({rewards.index(max(rewards)), rewards.index(min(rewards))})
        record = {
            "step": step,
            "prompt_id": group.prompt.id,
            "version": group.version,
            "prompt": group.prompt.text,
            "responses": [
                {
                    "text": texts[i],
                    "rewards": {name: _json(value) for name, value in group.trajectories[i].rewards.items()},
                    "tokens": len(group.trajectories[i].completion.token_ids),
                    "finish": group.trajectories[i].completion.finish,
                }
                for i in chosen
            ],
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _total(trajectory: Trajectory) -> float:
    return sum(value for value in trajectory.rewards.values() if not math.isnan(value))


def _json(value: float) -> float | None:
    return None if math.isnan(value) else value
