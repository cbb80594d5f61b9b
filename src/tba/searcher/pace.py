"""The next rollout of a searcher: its prompt, the moment it may start, and the sampling of its responses.

Rollouts are leased from the trainer (runtime/prompt_queue.py), so no two searchers make the same one. The pace limit keeps
the lag within replay.max_lag. Off-policy exploration is optional. It samples some rollouts at another temperature, or adds
responses of the reference, which does not narrow as the policy does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from tba.config import ExploreConfig
from tba.engine.contract import Engine
from tba.engine.sampling import response_key, uniforms
from tba.runtime.channels import wait_until
from tba.runtime.counters import RoleCounters
from tba.runtime.deadlines import Idleness, Waiting
from tba.runtime.prompt_queue import RolloutRequest, RolloutSource
from tba.types import Completion, Prompt, Request, Sampling, Weights

STALL_SECONDS = 1.0
"""Time that the trainer waits, and this searcher has nothing to do, after which another one is taken to hold both up."""


class PromptStream:
    """Rollouts as requests to the engine. A rollout's sample indices follow those of the prompt's rollouts before it, so
    randomness is never reused."""

    def __init__(self, prompts: Sequence[Prompt], rollouts: RolloutSource, *, samples_per_prompt: int) -> None:
        self._prompts = prompts
        self._rollouts = rollouts
        self._samples_per_prompt = samples_per_prompt

    def peek(self) -> RolloutRequest | None:
        """The next rollout; None = there is none now."""
        return self._rollouts.peek()

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        """The rollout that peek has shown, as a request."""
        rollout = self._rollouts.take()
        return Request(
            prompt=self._prompts[rollout.prompt],
            first_sample=rollout.epoch * self._samples_per_prompt,
            rollout=rollout.number,
        )

    def take(self, count: int) -> list[Request]:
        return [next(self) for _ in range(count)]


@dataclass
class PacedRollouts:
    """Prompts in order. Each starts as soon as the weights are new enough for it.

    Rollout n of the run is trained at step U (n // P) or later, where U steps train on the same groups, so its
    weights must be of version U (n // P) - limit at least. Rollouts whose responses were all lost to their reward do not
    count: later rollouts fill their batches. Without a limit every rollout may start at once.

    The limit follows the length of a rollout, so that a batch is complete as the step before it begins. A batch that is
    complete earlier would only be older when it is trained. Of a limit of 1.3 a rollout may use 2 if it is in the first .3
    of its batch, otherwise 1. While the trainer waits for responses the limit is a step more, so that the pace never delays
    it. If it goes on waiting and this searcher is idle, the limit is the largest: another searcher may be slow, or dead,
    with the rollouts that the trainer waits for. The largest is max_lag, or most_lag where long updates allow less.
    """

    prompts: PromptStream
    index: int
    prompts_per_step: int
    steps_per_batch: int
    max_lag: int | None
    """Largest number of versions that a rollout's weights may lag behind; None = no pace limit."""
    most_lag: Callable[[], float]
    """The same by the length of the trainer's updates: the longer they are, the sooner a response is too old."""
    spare_lag: int
    """The limit is this plus the versions that passed during recent rollouts, at most max_lag."""
    rollout_lag: Callable[[], float]
    """Number of versions that came while recent rollouts of this searcher were made: written, rewarded and sent."""
    trainer_waits: Callable[[], bool]
    """Whether the trainer waits for responses."""
    max_unscored: int
    """Most rollouts that may wait for their rewards: a slow reward slows the searcher down instead of filling its memory."""
    version: Callable[[], int]
    """Version of the weights in use."""
    generated: Callable[[], int]
    """Number of this searcher's rollouts whose responses are complete."""
    unscored: Callable[[], int]
    """Number of rollouts that wait for their rewards."""
    lost: Callable[[], int]
    """Number of the run's rollouts that brought nothing to train on."""
    tick: Callable[[], None]
    """Handles messages and loads newer weights."""
    row: RoleCounters
    deadline_seconds: float
    progress: Callable[[], float]
    """A number that changes while the trainer works: the deadline counts only while it does not."""
    started: int = 0
    _both_wait: Idleness = field(default_factory=Idleness)
    """How long trainer and searcher have been waiting for the same version."""

    def __iter__(self) -> Iterator[Request | None]:
        return self

    def __next__(self) -> Request | None:
        """None = nothing may start now, but responses are still running."""
        if not self._may_start():
            if self.started > self.generated():
                # The engine goes on with the responses that run and asks again, so nothing waits here.
                return None
            wait_until(
                self._may_start_after_tick,
                name="pace",
                row=self.row,
                deadline_seconds=self.deadline_seconds,
                waiting=Waiting(
                    waiter=f"searcher {self.index}",
                    awaited="the trainer",
                    setting="runtime.wait_seconds",
                    heartbeats=lambda: {"the trainer": self.progress()},
                ),
                explain=self._explain,
                progress=self.progress,
            )
        self.started += 1
        return next(self.prompts)

    def _may_start(self) -> bool:
        rollout = self.prompts.peek()
        return rollout is not None and self.version() >= self._needed(rollout) and self.unscored() < self.max_unscored

    def _needed(self, rollout: RolloutRequest) -> int:
        if self.max_lag is None:
            return 0
        # With P = 64, U = 2 and limit 1.3, rollout 200 is at place 8 of batch 3, which is early: it needs version 6 - 2 = 4.
        batch, place = divmod(max(0, rollout.number - self.lost()), self.prompts_per_step)
        # Between two publications there is no newer version to wait for.
        limit = self._limit(min(self.max_lag, max(self.spare_lag - 1, self.most_lag())))
        is_early = place < (limit % 1.0) * self.prompts_per_step
        return self.steps_per_batch * batch - math.floor(limit) - is_early

    def _limit(self, most: float) -> float:
        waits = self.trainer_waits()
        both = waits and self.started == self.generated()
        # -1 stands for not waiting: the change from it to a version starts the clock at zero.
        if self._both_wait.look(self.version() if both else -1) > STALL_SECONDS and both:
            return most
        # `waits` counts as one version.
        return min(most, self.spare_lag + self.rollout_lag() + waits)

    def _may_start_after_tick(self) -> bool:
        self.tick()
        return self._may_start()

    def _explain(self) -> str:
        rollout, unscored = self.prompts.peek(), self.unscored()
        waited = "a prompt" if rollout is None else f"version {self._needed(rollout)}"
        return (
            f"searcher {self.index} has weights of version {self.version()}, waited for {waited} from the trainer, and has "
            f"{unscored} groups without rewards yet"
        )


def explore(request: Request, sampling: Sampling, config: ExploreConfig, *, seed: int) -> Request:
    """The request, with other sampling if this rollout explores."""
    if config.probability == 0.0:
        return request
    # By the same counter-based numbers as tokens are: which rollouts explore, and how, does not depend on timing.
    key = response_key(seed, f"explore/{request.prompt.id}", request.first_sample)
    chosen, temperature = uniforms(torch.full((2,), key), torch.arange(2)).tolist()
    if chosen >= config.probability:
        return request
    exploring = replace(
        sampling,
        temperature=_between(config.temperature, temperature),
        policy_temperature=sampling.training_temperature,
    )
    return replace(request, sampling=exploring)


def _between(bounds: tuple[float, float], u: float) -> float:
    low, high = bounds
    return low + (high - low) * u


@dataclass(frozen=True)
class ReferenceSamples:
    """`ReferenceSamples(engine, 16, sampling)(prompt, first_sample=112)` -> samples 112 to 127 of a rollout."""

    engine: Engine
    """An engine of its own with the reference's weights, not the one that searches."""
    count: int
    """Number of responses of each rollout."""
    sampling: Sampling
    between_steps: Callable[[], None] | None = None

    def __call__(self, prompt: Prompt, *, first_sample: int) -> list[Completion]:
        found = self.engine.generate(
            [Request(prompt=prompt, first_sample=first_sample)],
            samples_per_prompt=self.count,
            sampling=self.sampling,
            between_steps=self.between_steps,
        )
        return [_of_unknown_policy(completion) for completion in found]

    def load(self, weights: Weights) -> None:
        """Another reference."""
        self.engine.load(weights)


def _of_unknown_policy(completion: Completion) -> Completion:
    """The engine's policy is the reference here, so the log-probs of the trained policy are not known."""
    return replace(completion, policy_log_probs=np.full_like(completion.policy_log_probs, np.nan))
