"""Which prompt is visited next, when, and how its responses are sampled.

Prompts are sharded and come in a seeded order with a cursor that can be saved; prompts that teach nothing are skipped; the
pace limit keeps the lag within replay.max_lag. Off-policy exploration is optional: visits that sample at another temperature
or top-p, and responses of the reference beside those of the policy, which do not narrow as the policy does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tba.config import ExploreConfig
from tba.generate.engine import Engine
from tba.generate.sampling import response_key, uniforms
from tba.runtime.board import Row
from tba.runtime.channels import wait_until
from tba.types import Completion, Prompt, Request, Sampling, Weights


class PromptStream:
    """An endless stream of visits to the prompts of one shard.

    Shard i of N owns prompts i, i + N, i + 2N, ... Each epoch visits all of them once, in an order drawn from
    (seed, epoch). A visit's sample indices follow those of the last visit, so randomness is never reused. Where there are
    fewer prompts than shards, shards share a prompt and take turns in its sample indices.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        samples_per_prompt: int,
        seed: int,
        shuffle: bool = True,
        shard: int = 0,
        num_shards: int = 1,
        cursor: int = 0,
        skips: Callable[[str], bool] = lambda prompt_id: False,
    ) -> None:
        """`skips` says which prompts to pass over; at most a whole epoch in a row."""
        self._prompts = prompts
        if not prompts:
            raise ValueError("there are no prompts to visit.")
        own = min(num_shards, len(prompts))
        self._indices = range(shard % own, len(prompts), own)
        self._turn, self._sharers = shard // own, len(range(shard % own, num_shards, own))
        self._samples_per_prompt = samples_per_prompt
        self._seed = seed
        self._shuffle = shuffle
        self._skips = skips
        self._order: tuple[int, list[int]] | None = None
        self.cursor = cursor
        """Visits so far: all the state there is."""

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        for _ in range(len(self._indices)):
            request = self._next()
            if not self._skips(request.prompt.id):
                return request
        return self._next()

    def _next(self) -> Request:
        epoch, place = divmod(self.cursor, len(self._indices))
        self.cursor += 1
        prompt = self._prompts[self._indices[self._epoch_order(epoch)[place]]]
        visit = epoch * self._sharers + self._turn
        return Request(prompt=prompt, first_sample=visit * self._samples_per_prompt)

    def take(self, count: int) -> list[Request]:
        return [next(self) for _ in range(count)]

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._draw_order(epoch))
        return self._order[1]

    def _draw_order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._indices)))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return torch.randperm(len(self._indices), generator=generator).tolist()


class Difficulty:
    """Counts, per prompt, visits in a row on which all samples were solved, or none was.

    A prompt beyond its limit is skipped every other epoch: it is visited again, in case the policy has changed.
    """

    def __init__(self, *, skip_solved_after: int | None = None, skip_unsolved_after: int | None = None) -> None:
        self._limits = {True: skip_solved_after, False: skip_unsolved_after}
        self._streaks: dict[str, tuple[bool, int]] = {}
        self._rested: set[str] = set()
        self.skipped: dict[str, int] = defaultdict(int)
        """Number of visits passed over, by reason: `solved`, `unsolved`."""

    def record(self, prompt_id: str, solved: list[bool]) -> None:
        if not solved or any(solved) != all(solved):
            self._streaks.pop(prompt_id, None)
            return
        kind, count = self._streaks.get(prompt_id, (solved[0], 0))
        self._streaks[prompt_id] = (solved[0], count + 1 if kind == solved[0] else 1)

    def skips(self, prompt_id: str) -> bool:
        """Whether to pass over this visit; the one after it is made."""
        kind, count = self._streaks.get(prompt_id, (False, 0))
        limit = self._limits[kind]
        if limit is None or count < limit or prompt_id in self._rested:
            self._rested.discard(prompt_id)
            return False
        self._rested.add(prompt_id)
        self.skipped["solved" if kind else "unsolved"] += 1
        return True


@dataclass
class PacedVisits:
    """Prompts in order, each as soon as the weights are new enough for it.

    Visit n of all searchers together is trained at step U (n // P) or later, where U steps train on the same groups, so its
    weights must be of version U (n // P) - max_lag at least. Without a limit every visit may start at once.
    """

    prompts: PromptStream
    index: int
    num_searchers: int
    prompts_per_step: int
    steps_per_batch: int
    max_lag: int | None
    """Largest number of versions that a visit's weights may lag behind; None = no pace limit."""
    max_unscored: int
    """Visits that may wait for their rewards: a slow reward slows the searcher down instead of filling its memory."""
    version: Callable[[], int]
    """Version of the weights in use."""
    generated: Callable[[], int]
    """Visits of this searcher whose responses are complete."""
    unscored: Callable[[], int]
    """Visits that wait for their rewards."""
    tick: Callable[[], None]
    """Handles messages and loads newer weights."""
    row: Row
    deadline_seconds: float
    started: int = 0
    first: int = 0
    """Visits of this searcher that count as made before the first: those of a run that is resumed."""

    def __iter__(self) -> Iterator[Request | None]:
        return self

    def __next__(self) -> Request | None:
        """None = nothing may start now, but responses are still running."""
        if not self._may_start():
            if self.started > self.generated():
                return None
            wait_until(
                self._may_start_after_tick,
                name="pace",
                row=self.row,
                deadline_seconds=self.deadline_seconds,
                explain=lambda: (
                    f"searcher {self.index} has weights of version {self.version()}, waited for version "
                    f"{self._needed()} from the trainer, and has {self.unscored()} groups without rewards yet"
                ),
            )
        self.started += 1
        return next(self.prompts)

    def _needed(self) -> int:
        visit = (self.first + self.started) * self.num_searchers + self.index
        return 0 if self.max_lag is None else self.steps_per_batch * (visit // self.prompts_per_step) - self.max_lag

    def _may_start(self) -> bool:
        return self.version() >= self._needed() and self.unscored() < self.max_unscored

    def _may_start_after_tick(self) -> bool:
        self.tick()
        return self._may_start()


def explore(request: Request, sampling: Sampling, config: ExploreConfig, *, seed: int) -> Request:
    """The request, with other sampling if this visit explores."""
    if config.probability == 0.0:
        return request
    # By the same counter-based numbers as tokens are: which visits explore, and how, does not depend on timing.
    key = response_key(seed, f"explore/{request.prompt.id}", request.first_sample)
    chosen, temperature, top_p = uniforms(torch.full((3,), key), torch.arange(3)).tolist()
    if chosen >= config.probability:
        return request
    exploring = replace(
        sampling,
        temperature=_between(config.temperature, temperature),
        policy_temperature=sampling.training_temperature,
        top_p=_between(config.top_p, top_p),
    )
    return replace(request, sampling=exploring)


def _between(bounds: tuple[float, float], u: float) -> float:
    low, high = bounds
    return low + (high - low) * u


@dataclass(frozen=True)
class ReferenceSamples:
    """`ReferenceSamples(engine, 16, sampling)(prompt, first_sample=112)` -> samples 112 to 127 of a visit."""

    engine: Engine
    """An engine of its own with the reference's weights, not the one that searches."""
    count: int
    """Number of responses of each visit."""
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
    """What the engine calls its policy is the reference; what the trained policy would have said is not known."""
    return replace(completion, policy_log_probs=np.full_like(completion.policy_log_probs, np.nan))
