"""Rewards of finished groups: at once in this process, or in worker processes that can be killed.

A user's reward may be slow or hang. Workers score groups while the searcher goes on generating; a call beyond its time is
killed with its worker. Its group is lost as a whole, because rewards may compare the samples of a group; only where they say
that they do not (per_sample) its samples are scored one by one, so that a hanging one costs only itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.config import Config, RewardConfig
from tba.runtime.channels import POLL_SECONDS
from tba.runtime.links import Failed
from tba.tasks.base import Outcome, RewardBroken, RewardFailed, Task
from tba.tasks.rewards.worker import Ready, RewardProcess, Scored
from tba.types import Completion, Prompt

START_SECONDS = 120.0
"""Deadline for a worker to import the reward's file; the call's own time-out counts from then."""
FIRST_ANSWER_SECONDS = 40.0
"""Time in calls that hang after which a reward that has never answered stops the run, unless one call may take longer."""


class RewardUnusable(RuntimeError):
    """The reward cannot be loaded, or has hung in every call: trying again would only lose more time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedGroup:
    """A visit whose responses are complete: FinishedGroup(prompt=..., completions=[...], texts=[...])"""

    prompt: Prompt
    completions: Sequence[Completion]
    texts: Sequence[str]
    visit: int = -1
    """Number of the visit among all visits of the run; -1 = it is not one of them."""
    step_values: Sequence[np.ndarray] | None = None
    """Monte-Carlo values of each response's steps, see Trajectory; None = not estimated."""

    def values_of_samples(self) -> Sequence[np.ndarray | None]:
        return [None] * len(self.completions) if self.step_values is None else self.step_values


class Rewards(Protocol):
    """Takes groups to score, hands them back with one outcome per sample, in any order."""

    @property
    def outstanding(self) -> int:
        """Number of groups submitted and not handed back yet."""
        ...

    def submit(self, group: FinishedGroup) -> None: ...

    def ready(self) -> list[tuple[FinishedGroup, list[Outcome]]]:
        """Groups that are scored; never waits."""
        ...

    def close(self) -> None: ...


def make_rewards(task: Task, config: Config, *, log: Path) -> Rewards:
    """Rewards of a task: in workers where they are a user's code, in this process where the task computes them."""
    if not task.isolated_rewards:
        return DirectRewards(task)
    search = config.search
    return WorkerRewards(
        task.isolated_rewards,
        timeout_seconds=search.reward_timeout_seconds,
        memory_gb=search.reward_memory_gb,
        log=log,
    )


def texts_of(tokenizer: PreTrainedTokenizerBase, completions: Sequence[Completion]) -> list[str]:
    """Texts of completions as rewards see them, without special tokens."""
    return tokenizer.batch_decode([c.token_ids.tolist() for c in completions], skip_special_tokens=True)


def score_all(
    rewards: Rewards, groups: Sequence[FinishedGroup], *, between_polls: Callable[[], None] | None = None
) -> list[list[Outcome]]:
    """Outcomes of all groups, in their order. Every call has its time-out, so this ends."""
    for group in groups:
        rewards.submit(group)
    found: dict[int, list[Outcome]] = {}
    while len(found) < len(groups):
        found.update((id(group), outcomes) for group, outcomes in rewards.ready())
        if rewards.outstanding:
            time.sleep(POLL_SECONDS)
        if between_polls is not None:
            between_polls()
    return [found[id(group)] for group in groups]


class DirectRewards:
    """Scores in this process: for a task's own, trusted rewards."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._ready: list[tuple[FinishedGroup, list[Outcome]]] = []

    @property
    def outstanding(self) -> int:
        return len(self._ready)

    def submit(self, group: FinishedGroup) -> None:
        self._ready.append((group, self._task.score(group.prompt, group.texts, group.completions)))

    def ready(self) -> list[tuple[FinishedGroup, list[Outcome]]]:
        scored, self._ready = self._ready, []
        return scored

    def close(self) -> None:
        """Close: there is no process to end."""


@dataclass(eq=False)
class _Job:
    """A group that waits for its rewards; after a time-out the samples of a per_sample reward are scored one by one."""

    group: FinishedGroup
    outcomes: list[Outcome]
    one_by_one: bool = False

    def next_samples(self) -> slice:
        first = len(self.outcomes)
        return slice(first, first + 1 if self.one_by_one else len(self.group.texts))

    @property
    def done(self) -> bool:
        return len(self.outcomes) == len(self.group.texts)


class WorkerRewards:
    """One worker process, restarted when it is killed or dies; groups wait for it in order."""

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        *,
        timeout_seconds: float,
        log: Path,
        memory_gb: float | None = None,
        first_answer_seconds: float = FIRST_ANSWER_SECONDS,
    ) -> None:
        """`first_answer_seconds` is the time in hanging calls after which a reward that never answered is given up."""
        self._configs = tuple(configs)
        self._timeout_seconds = timeout_seconds
        self._memory_gb = memory_gb
        self._log = log
        self._worker: RewardProcess | None = None
        self._waiting: deque[_Job] = deque()
        self._running: tuple[_Job, float, float] | None = None
        """The job that the worker has, when it was given it, and its deadline."""
        self._ready: list[tuple[FinishedGroup, list[Outcome]]] = []
        self._was_loaded, self._per_sample = False, False
        self._unanswered_seconds: float | None = max(timeout_seconds, first_answer_seconds)
        """Time in hanging calls that is left until the first answer; None = there was one."""

    @property
    def outstanding(self) -> int:
        return len(self._waiting) + len(self._ready) + (self._running is not None)

    def submit(self, group: FinishedGroup) -> None:
        self._waiting.append(_Job(group, []))
        self._advance()

    def ready(self) -> list[tuple[FinishedGroup, list[Outcome]]]:
        self._advance()
        scored, self._ready = self._ready, []
        return scored

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _advance(self) -> None:
        """Take an answer, or give up on a late one; then give the worker its next job."""
        if self._running is not None:
            self._take_answer(*self._running)
        if self._running is None and self._waiting:
            self._start(self._waiting.popleft())

    def _take_answer(self, job: _Job, started: float, deadline: float) -> None:
        assert self._worker is not None
        alive = (
            self._worker.alive
        )  # before the message is looked for: the last words of a worker that ends are not missed
        answer = self._worker.link.receive()
        if isinstance(answer, Ready):
            # Importing the reward's file may take long (START_SECONDS); the call's own time-out counts from here.
            # Of a worker that replaces another the time counts in which nothing was answered, not of the first one.
            self._running = self._timed(job, since=started if self._was_loaded else None)
            self._was_loaded, self._per_sample = True, answer.per_sample
            return
        if isinstance(answer, Scored):
            broken = next((outcome for outcome in answer.outcomes if isinstance(outcome, RewardBroken)), None)
            if broken is not None:
                self.close()
                raise RewardUnusable(str(broken))
            job.outcomes += answer.outcomes
            self._unanswered_seconds = None
            if answer.spent:
                self.close()
        elif isinstance(answer, Failed):
            self._failed(job, answer.error)
        elif not alive:
            self._failed(job, f"the reward worker died ({self._worker.end}); see {self._log}")
        elif time.monotonic() > deadline:
            self._hung(job, time.monotonic() - started)
        else:
            return
        self._running = None
        if job.done:
            self._ready.append((job.group, job.outcomes))
        else:
            # First in line again: groups are handed back in the order of their submission.
            self._waiting.appendleft(job)

    def _timed(self, job: _Job, *, since: float | None = None) -> tuple[_Job, float, float]:
        """The job with the time from which it waits (None = from now) and its deadline."""
        seconds, left = self._timeout_seconds, self._unanswered_seconds
        now = time.monotonic()
        return job, now if since is None else since, now + (seconds if left is None else min(seconds, left))

    def _failed(self, job: _Job, reason: str) -> None:
        """The worker ended. One that could never load the reward would not load it the next time."""
        if not self._was_loaded:
            self.close()
            raise RewardUnusable(reason)
        self._give_up(job, reason)

    def _hung(self, job: _Job, seconds: float) -> None:
        if not self._was_loaded:
            self.close()
            raise RewardUnusable(
                f"importing the reward's file took longer than {START_SECONDS:g} s; see {self._log}. Load what takes long "
                "at the first call, and raise search.reward_timeout_seconds for it."
            )
        if self._unanswered_seconds is not None:
            self._unanswered_seconds -= seconds
            if self._unanswered_seconds <= 0:
                self.close()
                raise RewardUnusable(
                    f"the reward {self._names()} has not answered once: every call hung until it was killed "
                    f"(search.reward_timeout_seconds={self._timeout_seconds:g}). Call it by hand with the texts of one "
                    "prompt; if it only is slow, raise search.reward_timeout_seconds."
                )
        self._give_up(
            job,
            f"the reward {self._names()} took longer than search.reward_timeout_seconds={self._timeout_seconds:g} s",
        )

    def _names(self) -> str:
        return ", ".join(repr(config.label) for config in self._configs)

    def _give_up(self, job: _Job, reason: str) -> None:
        self.close()  # the worker still computes, or is dead: its next answer would be taken for another job's
        if job.one_by_one or len(job.group.texts) == 1:
            job.outcomes.append(RewardFailed(reason))
        elif self._per_sample:
            # Nothing is lost yet: the group's samples are tried one by one.
            job.one_by_one = True
        else:
            count = len(job.group.texts)
            words = (
                f"{reason} (all {count} samples of the call are lost: the reward does not say that it is per_sample)"
            )
            job.outcomes += [RewardFailed(words)] * count

    def _start(self, job: _Job) -> None:
        loaded = self._worker is not None
        if self._worker is None:
            self._worker = RewardProcess(self._configs, memory_gb=self._memory_gb, log=self._log)
        # Plain values only: a prompt or completion object would make the worker import numpy and torch to unpickle it.
        samples = job.next_samples()
        ids = [completion.token_ids.tolist() for completion in job.group.completions[samples]]
        prompt, step = job.group.prompt, max(completion.version for completion in job.group.completions)
        self._worker.link.send((prompt.text, dict(prompt.columns), list(job.group.texts[samples]), ids, step))
        now = time.monotonic()
        self._running = self._timed(job) if loaded else (job, now, now + START_SECONDS)
