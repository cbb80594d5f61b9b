"""Monte-Carlo values of step prefixes (VinePPO): continue each prefix several times and average the rewards.

A step ends with a token whose text holds a line break. The continuations are the searcher's work: it has the engine and
the rewards. They are combined by the reward weights and the rule for cut-off responses as they are now, so a later change
of either does not reach them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.generate.contract import Engine
from tba.tasks.base import FinishedGroup, Rewards
from tba.tasks.outcomes import Outcome, RewardFailed, components_of
from tba.tasks.rewards.pool import score_all, texts_of
from tba.types import Completion, Prompt, Request, Sampling, combined_reward

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
    """What stands for the reward of a continuation that was cut off, as of a response (train.truncated=penalise); None =
    its own reward does."""
    between_steps: Callable[[], None] | None = None
    _breaks: dict[int, bool] = field(default_factory=dict)
    """Token id -> whether a step ends with it."""

    def __call__(self, engine: Engine, groups: Sequence[FinishedGroup]) -> list[list[np.ndarray]]:
        """For each group and response. NaN at the first token too where no continuation could be scored. All prefixes of all
        groups are continued side by side: those of one group alone would leave most slots of the engine empty."""
        starts = [[self.step_starts(completion.token_ids) for completion in group.completions] for group in groups]
        prefixes = {
            (index, completion.token_ids[:start].tobytes()): completion.token_ids[:start]
            for index, (group, of_group) in enumerate(zip(groups, starts))
            for completion, own in zip(group.completions, of_group)
            for start in own
        }
        value_of = self._values(engine, groups, prefixes)
        found: list[list[np.ndarray]] = []
        for index, (group, of_group) in enumerate(zip(groups, starts)):
            found.append([])
            for completion, own in zip(group.completions, of_group):
                values = np.full(len(completion.token_ids), np.nan, np.float32)
                for start in own:
                    values[start] = value_of[index, completion.token_ids[:start].tobytes()]
                found[-1].append(values)
        return found

    def step_starts(self, token_ids: np.ndarray) -> list[int]:
        """First token of every step: 0, and what follows a line break."""
        ends = [place for place, token in enumerate(token_ids[:-1].tolist()) if self._ends_step(token)]
        return [0, *(place + 1 for place in ends)]

    def _ends_step(self, token: int) -> bool:
        if token not in self._breaks:
            self._breaks[token] = "\n" in self.tokenizer.decode([token])
        return self._breaks[token]

    def _values(
        self, engine: Engine, groups: Sequence[FinishedGroup], prefixes: Mapping[Prefix, np.ndarray]
    ) -> dict[Prefix, float]:
        """Mean reward of each prefix's continuations."""
        requests = [self._request(groups[index], prefix) for (index, _), prefix in prefixes.items()]
        members: dict[tuple[str, int], list[Completion]] = {
            (request.prompt.id, request.first_sample): [] for request in requests
        }
        for completion in engine.sibling().generate(
            requests,
            samples_per_prompt=self.continuations,
            sampling=self.sampling,
            between_steps=self.between_steps,
        ):
            first_sample = completion.sample_index // self.continuations * self.continuations
            members[completion.prompt_id, first_sample].append(completion)
        continued = [
            self._as_group(groups[index].prompt, own)
            for (index, _), own in zip(prefixes, members.values(), strict=True)
        ]
        outcomes = score_all(self.rewards, continued, between_polls=self.between_steps)
        means = [self._mean(own.completions, found) for own, found in zip(continued, outcomes)]
        return dict(zip(prefixes, means))

    def _request(self, group: FinishedGroup, prefix: np.ndarray) -> Request:
        """Another visit to the prompt continues with other random numbers."""
        visit = group.completions[0].sample_index // max(1, len(group.completions))
        prompt = _named_after(group.prompt, prefix)
        return Request(prompt=prompt, first_sample=visit * self.continuations, prefix_ids=prefix)

    def _as_group(self, prompt: Prompt, completions: list[Completion]) -> FinishedGroup:
        texts = texts_of(self.tokenizer, completions)
        return FinishedGroup(prompt=prompt, completions=completions, texts=texts)

    def _mean(self, completions: Sequence[Completion], outcomes: Sequence[Outcome]) -> float:
        rewards = [
            self._reward(completion, components)
            for completion, components in zip(completions, map(components_of, outcomes))
            if components is not None
        ]
        return float(np.mean(rewards)) if rewards else float("nan")

    def _reward(self, completion: Completion, components: Mapping[str, float | None]) -> float:
        """As `tba.train.batch.combine` rewards a response: what is compared must be of one kind."""
        if self.cut_off_reward is not None and completion.finish == "length":
            return self.cut_off_reward
        return combined_reward(components, self.reward_weights)


def _named_after(prompt: Prompt, prefix: np.ndarray) -> Prompt:
    """The prompt under a name of its own for this prefix: the name is part of the key of every random number."""
    return replace(prompt, id=f"{prompt.id}#{blake2b(prefix.tobytes(), digest_size=8).hexdigest()}")


def lost_without_values(outcomes: Sequence[Outcome], values: Sequence[np.ndarray]) -> list[Outcome]:
    """Outcomes, with those responses failed whose prompt has no value. (A later step without one joins the step before.)"""
    return [
        outcome if np.isfinite(own[0]) else RewardFailed("no continuation of one of its steps could be scored")
        for outcome, own in zip(outcomes, values)
    ]
