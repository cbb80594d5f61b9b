"""Rewards of finished groups: at once in this process, or in worker processes that can be killed.

A user's reward may be slow or hang. Workers score groups while the searcher goes on generating, several at a time where that
is allowed (search.reward_workers); a call beyond its time is killed with its worker. Its group is lost as a whole, because
rewards may compare the samples of a group; only where they say that they do not (per_sample) its samples are scored one by
one, so that a hanging one costs only itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tba.config import Config, RewardConfig
from tba.runtime.channels import POLL_SECONDS
from tba.runtime.links import Failed
from tba.tasks.base import FinishedGroup, Rewards, Task
from tba.tasks.outcomes import Outcome, RewardBroken, RewardFailed
from tba.tasks.rewards.functions import named_rewards
from tba.tasks.rewards.worker import Ready, RewardService, Scored, WorkerProcess
from tba.tasks.user_task import TaskFailed, checked_outcomes, user_code
from tba.types import Completion

START_SECONDS = 120.0
"""Deadline for a worker to import the reward's file; the call's own time-out counts from then."""
FIRST_ANSWER_SECONDS = 40.0
"""Time in calls that hang after which a reward that has never answered stops the run, unless one call may take longer."""
LAST_WORDS_SECONDS = 1.0
"""Time for what a worker sent before it ended to arrive; the end of its link comes at once."""
ASYNC_WORKERS = 8
"""Workers of rewards that are all `async def`, where search.reward_workers is not given: they wait instead of computing."""


class RewardUnusable(RuntimeError):
    """The reward cannot be loaded, or has hung in every call: trying again would only lose more time."""


def make_rewards(task: Task, config: Config, *, log: Path) -> Rewards:
    """Rewards of a task: in workers where they are a user's code, in this process where the task computes them."""
    if not task.isolated_rewards:
        return DirectRewards(task)
    search = config.search
    return WorkerRewards(
        task.isolated_rewards,
        timeout_seconds=search.reward_timeout_seconds,
        num_workers=search.reward_workers,
        passed_on=search.reward_environment,
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
    return outcomes_of(rewards, groups, between_polls=between_polls)


def outcomes_of(
    rewards: Rewards, groups: Sequence[FinishedGroup], *, between_polls: Callable[[], None] | None = None
) -> list[list[Outcome]]:
    """Outcomes of the groups, which are all that was submitted, in their order."""
    found: dict[int, list[Outcome]] = {}
    while len(found) < len(groups):
        found.update((id(group), outcomes) for group, outcomes in rewards.ready(POLL_SECONDS))
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
        weights, what = self._task.reward_weights, type(self._task).__name__
        try:
            with user_code(type(self._task), ".score"):
                found = self._task.score(group.prompt, group.texts, group.completions)
            outcomes = checked_outcomes(found, count=len(group.texts), weights=weights, what=what)
        except TaskFailed as error:  # as a reward function that raises: the group is lost and counted
            outcomes = [RewardFailed(str(error)) for _ in group.texts]
        self._ready.append((group, outcomes))

    def ready(self, wait_seconds: float = 0.0) -> list[tuple[FinishedGroup, list[Outcome]]]:
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


@dataclass(eq=False)
class _Seat:
    """The place of one worker: its process, started anew when it was killed or has died, and the job that it has."""

    process: WorkerProcess | None = None
    job: _Job | None = None
    started: float = 0.0
    """Time at which the job was given to the worker."""
    deadline: float = 0.0

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process = None


class WorkerRewards:
    """Worker processes, each with one call at a time; groups wait for a free one in order."""

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        *,
        timeout_seconds: float,
        log: Path,
        num_workers: int | None = None,
        passed_on: Collection[str] = (),
        first_answer_seconds: float = FIRST_ANSWER_SECONDS,
    ) -> None:
        """`first_answer_seconds` is the time in hanging calls after which a reward that never answered is given up;
        `num_workers` None = 1, or ASYNC_WORKERS where all rewards are async."""
        self._rewards = named_rewards(configs)
        self._timeout_seconds = timeout_seconds
        self._passed_on = passed_on
        self._log = log
        self._num_workers = num_workers
        self._seats: list[_Seat] = [_Seat()]
        self._waiting: deque[_Job] = deque()
        self._ready: list[tuple[FinishedGroup, list[Outcome]]] = []
        self._first: Ready | None = None
        """What the first worker said of the rewards when it had loaded them; None = none has."""
        self._unanswered_seconds: float | None = max(timeout_seconds, first_answer_seconds)
        """Time in hanging calls that is left until the first answer; None = there was one."""

    @property
    def outstanding(self) -> int:
        return len(self._waiting) + len(self._ready) + sum(seat.job is not None for seat in self._seats)

    def submit(self, group: FinishedGroup) -> None:
        self._waiting.append(_Job(group, []))
        self._advance()

    def ready(self, wait_seconds: float = 0.0) -> list[tuple[FinishedGroup, list[Outcome]]]:
        self._advance(wait_seconds)
        scored, self._ready = self._ready, []
        return scored

    def close(self) -> None:
        for seat in self._seats:
            seat.close()

    def _advance(self, wait_seconds: float = 0.0) -> None:
        """Take answers, or give up on late ones; then give free workers their next jobs. Waits for the first worker that has
        a job: where that is the only one, its next job is given to it as soon as it has answered."""
        for seat in self._seats:
            if seat.job is not None:
                self._take_answer(seat, seat.job, wait_seconds)
                wait_seconds = 0.0
        while self._waiting and (free := self._free_seat()) is not None:
            self._start(free, self._waiting.popleft())

    def _free_seat(self) -> _Seat | None:
        """A worker that has no job, preferably one that runs; another one is added only where all are busy."""
        free = [seat for seat in self._seats if seat.job is None]
        if not free and len(self._seats) < self._most_seats():
            free = [_Seat()]
            self._seats += free
        return min(free, key=lambda seat: seat.process is None, default=None)

    def _most_seats(self) -> int:
        # One until the first answer: a reward that cannot be loaded or always hangs is found out by one worker.
        if self._first is None or self._unanswered_seconds is not None:
            return 1
        return self._num_workers or (ASYNC_WORKERS if self._first.is_async else 1)

    def _take_answer(self, seat: _Seat, job: _Job, wait_seconds: float) -> None:
        assert seat.process is not None
        # Before the message is looked for: the last words of a worker that ends are not missed. They may just be read.
        alive = seat.process.alive
        answer = seat.process.link.receive(wait_seconds if alive else LAST_WORDS_SECONDS)
        if isinstance(answer, Ready):
            # Importing the reward's file may take long (START_SECONDS); the call's own time-out counts from here.
            # Of a worker that replaces another the time counts in which nothing was answered, not of the first one.
            self._time(seat, since=None if self._first is None else seat.started)
            self._first = self._first or answer
            return
        if isinstance(answer, Scored):
            broken = next((outcome for outcome in answer.outcomes if isinstance(outcome, RewardBroken)), None)
            if broken is not None:
                self.close()
                raise RewardUnusable(str(broken))
            job.outcomes += answer.outcomes
            self._unanswered_seconds = None
            if answer.spent:
                seat.close()
        elif isinstance(answer, Failed):
            self._failed(seat, job, answer.error)
        elif not alive:
            self._failed(seat, job, f"the reward worker died ({seat.process.end}); see {self._log}")
        elif time.monotonic() > seat.deadline:
            self._hung(seat, job, time.monotonic() - seat.started)
        else:
            return
        seat.job = None
        if job.done:
            self._ready.append((job.group, job.outcomes))
        else:
            self._waiting.appendleft(job)  # first in line again: it has waited longest

    def _time(self, seat: _Seat, *, since: float | None = None) -> None:
        """Set the time from which a seat's job waits (None = from now) and its deadline."""
        seconds, left = self._timeout_seconds, self._unanswered_seconds
        now = time.monotonic()
        seat.started = now if since is None else since
        seat.deadline = now + (seconds if left is None else min(seconds, left))

    def _failed(self, seat: _Seat, job: _Job, reason: str) -> None:
        """The worker ended. One that could never load the reward would not load it the next time."""
        if self._first is None:
            self.close()
            raise RewardUnusable(reason)
        self._give_up(seat, job, reason)

    def _hung(self, seat: _Seat, job: _Job, seconds: float) -> None:
        assert seat.process is not None
        seat.process.log_line()
        if self._first is None:
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
                    f"(search.reward_timeout_seconds={self._timeout_seconds:g}). {self._log} has the line at which it hung. "
                    "Call it by hand with the texts of one prompt; if it only is slow, raise search.reward_timeout_seconds."
                )
        words = f"the reward {self._names()} took longer than search.reward_timeout_seconds={self._timeout_seconds:g} s"
        self._give_up(seat, job, words)

    def _names(self) -> str:
        return ", ".join(map(repr, self._rewards))

    def _give_up(self, seat: _Seat, job: _Job, reason: str) -> None:
        seat.close()  # the worker still computes, or is dead: its next answer would be taken for another job's
        if job.one_by_one or len(job.group.texts) == 1:
            job.outcomes.append(RewardFailed(reason))
        elif self._first is not None and self._first.per_sample:
            # Nothing is lost yet: the group's samples are tried one by one.
            job.one_by_one = True
        else:
            count = len(job.group.texts)
            words = (
                f"{reason} (all {count} samples of the call are lost: the reward does not say that it is per_sample)"
            )
            job.outcomes += [RewardFailed(words)] * count

    def _start(self, seat: _Seat, job: _Job) -> None:
        loaded = seat.process is not None
        if seat.process is None:
            make = partial(RewardService, self._rewards)
            seat.process = WorkerProcess(make, log=self._log, passed_on=self._passed_on)
        # Plain values only: a prompt or completion object would make the worker import numpy and torch to unpickle it.
        samples = job.next_samples()
        ids = [completion.token_ids.tolist() for completion in job.group.completions[samples]]
        prompt, step = job.group.prompt, max(completion.version for completion in job.group.completions)
        seat.process.link.send((prompt.text, dict(prompt.columns), list(job.group.texts[samples]), ids, step))
        seat.job = job
        self._time(seat)
        if not loaded:
            seat.deadline = seat.started + START_SECONDS
