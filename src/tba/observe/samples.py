"""The file samples.jsonl of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tba.observe.files import append_line
from tba.types import Trajectory, TrajectoryGroup, total_reward


@dataclass(frozen=True, kw_only=True)
class SampleLog:
    """The file samples.jsonl: what the policy was asked, what it answered and what it got, of a group's best and its worst
    response by the reward that is trained on."""

    path: Path
    reward_weights: Mapping[str, float]
    """Factors of the reward components in the sum."""
    cut_off_reward: float | None = None
    """Reward that training gives a response that was cut off; None = the one that it got."""

    def write(self, step: int, group: TrajectoryGroup, texts: list[str]) -> None:
        rewards = [self.reward(trajectory) for trajectory in group.trajectories]
        chosen = sorted({rewards.index(max(rewards)), rewards.index(min(rewards))})
        record = {
            "step": step,
            "prompt_id": group.prompt.id,
            "version": group.version,
            "prompt": group.prompt.text,
            "responses": [
                {
                    "text": texts[i],
                    "reward": _null_for_nan(rewards[i]),
                    "rewards": {name: _null_for_nan(value) for name, value in group.trajectories[i].rewards.items()},
                    "tokens": len(group.trajectories[i].completion.token_ids),
                    "finish": group.trajectories[i].completion.finish,
                }
                for i in chosen
            ],
        }
        append_line(self.path, json.dumps(record, ensure_ascii=False))

    def reward(self, trajectory: Trajectory) -> float:
        """The reward that is trained on."""
        if self.cut_off_reward is not None and trajectory.completion.finish == "length":
            return self.cut_off_reward
        names, values = list(trajectory.rewards), list(trajectory.rewards.values())
        return float(total_reward(values, [self.reward_weights[name] for name in names]))


def _null_for_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
