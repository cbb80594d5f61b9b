"""Monte-Carlo values of step prefixes (VinePPO): continue each prefix several times and average the rewards. A step
ends with a token whose text holds a line break. Later changes of the reward weights do not reach the values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.engine.contract import Engine
from tba.tasks.outcomes import Outcome, RewardFailed, components_of
from tba.tasks.rewards.pool import score_all, texts_of
from tba.tasks.task import FinishedGroup, Rewards
from tba.types import Completion, Request, Sampling, combined_reward

Prefix = tuple[int, bytes]
"""Index of a group, and the tokens of one of its responses up to a step's start."""


@dataclass
class StepValues:
    """`StepValues(...)(engine, groups)` -> for each group, per response an array as in Trajectory.step_values."""

    rewards: Rewards
    """Rewards of the continuations, not shared with a running search."""
    reward_weights: Mapping[str, float]
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    continuations: int
    cut_off_reward: float | None = None
    """Reward of a cut-off continuation (train.truncated=penalise); None = its own."""
    between_steps: Callable[[], None] | None = None
    _breaks: dict[int, bool] = field(default_factory=dict)

    def __call__(self, engine: Engine, groups: Sequence[FinishedGroup]) -> list[list[np.ndarray]]:
        """For each group and response. All prefixes of all groups are continued side by side: those of one group alone
        would leave most slots of the engine empty."""
        starts = [
            [(index, completion.token_ids, self.step_starts(completion.token_ids)) for completion in group.completions]
            for index, group in enumerate(groups)
        ]
        # Equal prefixes of a group are continued once, such as the empty one that all its responses begin with.
        prefixes = {
            (index, token_ids[:start].tobytes()): token_ids[:start]
            for of_group in starts
            for index, token_ids, own in of_group
            for start in own
        }
        value_of = self._values(engine, groups, prefixes)
        values: list[list[np.ndarray]] = [[] for _ in groups]
        for index, token_ids, own in (response for of_group in starts for response in of_group):
            # A value stands at the first token of its step, NaN at the others.
            values[index].append(np.full(len(token_ids), np.nan, np.float32))
            values[index][-1][own] = [value_of[index, token_ids[:start].tobytes()] for start in own]
        return values

    def step_starts(self, token_ids: np.ndarray) -> list[int]:
        """First token of every step: 0, and what follows a line break."""
        starts = [0]
        for place, token in enumerate(token_ids[:-1].tolist(), start=1):  # no step begins after the last token
            if token not in self._breaks:
                self._breaks[token] = "\n" in self.tokenizer.decode([token])
            if self._breaks[token]:
                starts.append(place)
        return starts

    def _values(
        self, engine: Engine, groups: Sequence[FinishedGroup], prefixes: Mapping[Prefix, np.ndarray]
    ) -> dict[Prefix, float]:
        requests = []
        for (index, _), prefix in prefixes.items():
            prompt, completions = groups[index].prompt, groups[index].completions
            # A name of its own for each prefix, and other samples at another rollout: both are part of the key of every
            # random number.
            name = f"{prompt.id}#{blake2b(prefix.tobytes(), digest_size=8).hexdigest()}"
            # Samples of a rollout are consecutive, so this is its number among the rollouts of its prompt.
            rollout = completions[0].sample_index // max(1, len(completions))
            requests.append(
                Request(prompt=replace(prompt, id=name), first_sample=rollout * self.continuations, prefix_ids=prefix)
            )
        members: dict[tuple[str, int], list[Completion]] = {(r.prompt.id, r.first_sample): [] for r in requests}
        for completion in engine.clone_for_evaluation().generate(
            requests,
            samples_per_prompt=self.continuations,
            sampling=self.sampling,
            between_steps=self.between_steps,
        ):
            first_sample = completion.sample_index // self.continuations * self.continuations
            members[completion.prompt_id, first_sample].append(completion)
        # `members` keeps the order of the requests, which is that of the prefixes; strict would show two names that collide.
        continued = [
            FinishedGroup(prompt=groups[index].prompt, completions=own, texts=texts_of(self.tokenizer, own))
            for (index, _), own in zip(prefixes, members.values(), strict=True)
        ]
        outcomes = score_all(self.rewards, continued, between_polls=self.between_steps)
        return {prefix: self._mean(own.completions, found) for prefix, own, found in zip(prefixes, continued, outcomes)}

    def _mean(self, completions: Sequence[Completion], outcomes: Sequence[Outcome]) -> float:
        """As `tba.trainer.batch.combine` rewards responses: what is compared must be of one kind."""
        rewards: list[float] = []
        for completion, components in zip(completions, map(components_of, outcomes)):
            if components is None:
                continue
            if self.cut_off_reward is not None and completion.finish == "length":
                rewards.append(self.cut_off_reward)
            else:
                rewards.append(combined_reward(components, self.reward_weights))
        return float(np.mean(rewards)) if rewards else float("nan")


def lost_without_values(outcomes: Sequence[Outcome], values: Sequence[np.ndarray]) -> list[Outcome]:
    """Outcomes, with those responses failed whose prompt has no value. (A later step without one joins the step before.)"""
    return [
        outcome if np.isfinite(own[0]) else RewardFailed("no continuation of one of its steps could be scored")
        for outcome, own in zip(outcomes, values)
    ]
