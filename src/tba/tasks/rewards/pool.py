"""Rewards of finished groups: at once in this process, or in worker processes that can be killed.

Workers score groups while the searcher goes on generating, several at a time where that is allowed (search.reward_workers).
A call beyond its time is killed with its worker. Its group is lost as a whole, because rewards may compare the samples of a
group. Only where they say that they do not (per_sample), samples are then scored one by one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from transformers import PreTrainedTokenizerBase

from tba.config import Config, RewardConfig
from tba.runtime.channels import POLL_SECONDS
from tba.runtime.links import Failed
from tba.tasks.outcomes import Outcome, RewardBroken, RewardFailed
from tba.tasks.rewards.functions import episode_ends, named_rewards
from tba.tasks.rewards.worker import Ready, RewardService, Scored, WorkerProcess
from tba.tasks.task import FinishedGroup, Rewards, Task, TaskFailed, checked_outcomes, user_code
from tba.types import Completion, Prompt

START_SECONDS = 120.0
"""Deadline for a worker to import the reward's file; the call's own time-out counts from then."""
FIRST_ANSWER_SECONDS = 40.0
"""Time in calls that hang after which a reward that has never answered stops the run, unless one call may take longer."""
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


def finished_group(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, completions: Sequence[Completion], rollout: int = -1
) -> FinishedGroup:
    """The group of a rollout's complete responses; of episodes with the prompt as the policy saw it."""
    episodes = [completion.episode for completion in completions if completion.episode is not None]
    return FinishedGroup(
        # One that was lost may have ended before the policy saw its prompt.
        prompt=next((own.prompt for own in episodes if not own.failure), prompt),
        completions=completions,
        texts=texts_of(tokenizer, completions),
        rollout=rollout,
    )


def score_all(
    rewards: Rewards, groups: Sequence[FinishedGroup], *, between_polls: Callable[[], None] | None = None
) -> list[list[Outcome]]:
    """Outcomes of all groups, in their order. Every call has its time-out, so this ends."""
    # All are submitted before the first answer is waited for, so that several workers can share them.
    for group in groups:
        rewards.submit(group)
    return outcomes_of(rewards, groups, between_polls=between_polls)


def outcomes_of(
    rewards: Rewards, groups: Sequence[FinishedGroup], *, between_polls: Callable[[], None] | None = None
) -> list[list[Outcome]]:
    """Outcomes of the groups, which are all that was submitted, in their order."""
    # By identity: answers come in any order, and a prompt may occur in several groups.
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
        # Scored here and handed out by `ready`: callers see the same two calls as with workers.
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


class WorkerRewards:
    """Worker processes, each with one call at a time; groups wait for a free one in order. A thread waits for each worker:
    the searcher goes on generating."""

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        *,
        timeout_seconds: float,
        log: Path,
        num_workers: int | None = None,
        passed_on: Collection[str] = (),
    ) -> None:
        """`num_workers` None = 1, or ASYNC_WORKERS where all rewards are async."""
        # Names only: the functions' files are imported in the workers, see RewardService.
        self._rewards = named_rewards(configs)
        self._timeout_seconds = timeout_seconds
        self._passed_on = passed_on
        self._log = log
        self._num_workers = num_workers
        self._processes: list[WorkerProcess | None] = []
        """The process of each place in the pool, started anew when it was killed or has died; None = there is none now."""
        self._waiting: SimpleQueue[FinishedGroup | None] = SimpleQueue()
        """Groups without a worker; None ends a thread."""
        self._answers: SimpleQueue[tuple[FinishedGroup, list[Outcome]] | Exception] = SimpleQueue()
        """Groups that are scored, or why no more can be."""
        self._first: Ready | None = None
        """Greeting of the first worker that has loaded the rewards; None = none has."""
        self._unanswered_seconds: float | None = max(timeout_seconds, FIRST_ANSWER_SECONDS)
        """Time in hanging calls that is left until the first answer; None = there was one."""
        self._lock, self._closed = threading.Lock(), False
        self.outstanding = 0

    def submit(self, group: FinishedGroup) -> None:
        # Only the thread of the owner counts `outstanding`; the pool's threads use the two queues.
        self.outstanding += 1
        self._waiting.put(group)
        # Called at both ends: the first answer, seen in `ready`, allows more workers than one.
        self._add_places()

    def ready(self, wait_seconds: float = 0.0) -> list[tuple[FinishedGroup, list[Outcome]]]:
        # The first get may wait; those that follow take what is there already.
        scored = []
        with suppress(Empty):
            while True:
                answer = self._answers.get(block=wait_seconds > 0, timeout=wait_seconds or None)
                # An exception crosses from a pool's thread to the owner's here, where it stops the run.
                if isinstance(answer, Exception):
                    self.close()
                    raise answer
                scored.append(answer)
                wait_seconds = 0.0
        self.outstanding -= len(scored)
        self._add_places()
        return scored

    def close(self) -> None:
        # `_started` takes the same lock: a worker has its place by now or is never made.
        with self._lock:  # no worker is started after this
            self._closed = True
        for place in range(len(self._processes)):
            # One None for each thread: a thread that waits for a group wakes, takes its own and ends.
            self._waiting.put(None)
            self._end(place)

    def _end(self, place: int) -> None:
        # Taken away at once, because the place's thread and the searcher may both end it. A worker must not be killed
        # twice: by then its process id may belong to another process.
        process, self._processes[place] = self._processes[place], None
        if process is not None:
            process.kill()

    def _add_places(self) -> None:
        """Add workers where groups wait for one, as many as may be."""
        most = 1
        # One until the first answer: a reward that cannot be loaded or always hangs is found out by one worker.
        if self._first is not None and self._unanswered_seconds is None:
            most = self._num_workers or (ASYNC_WORKERS if self._first.is_async else 1)
        # Workers are never taken away again: a place lasts until `close`, and its process may be renewed.
        while len(self._processes) < min(most, self.outstanding):
            self._processes.append(None)
            # A worker ends with the thread that has started it: a thread lasts until the workers are closed.
            place = len(self._processes) - 1
            threading.Thread(target=self._serve, args=(place,), daemon=True, name="rewards").start()

    def _serve(self, place: int) -> None:
        """Have groups scored by one worker, one after another. Runs in the thread of its place in the pool."""
        while (group := self._waiting.get()) is not None and not self._closed:
            try:
                self._answers.put((group, self._scored(place, group)))
            except Exception as error:  # raised by `ready`, which would wait for this group for ever
                self._answers.put(error)
                return

    def _scored(self, place: int, group: FinishedGroup) -> list[Outcome]:
        """The outcomes of a group's samples: of one call for all or, where that hangs, of one for each if they do not depend
        on one another."""
        # Runs in the place's thread, which blocks for up to the time-out of each call.
        count = len(group.texts)
        try:
            return self._called(place, group, slice(count))
        except RewardFailed as error:
            reason = str(error)
        # To call again would lose the same time: one sample is all there is, or no worker has ever loaded.
        if count == 1 or self._first is None:
            return [RewardFailed(reason)] * count
        if not self._first.per_sample:
            message = f"(all {count} samples of the call are lost: the reward does not say that it is per_sample)"
            return [RewardFailed(f"{reason} {message}")] * count
        outcomes: list[Outcome] = []
        # Each call has the full time-out, so a group of K hanging samples takes K of them.
        for index in range(count):
            try:
                outcomes += self._called(place, group, slice(index, index + 1))
            except RewardFailed as error:
                outcomes.append(RewardFailed(str(error)))
        return outcomes

    def _called(self, place: int, group: FinishedGroup, samples: slice) -> list[Outcome]:
        """Outcomes of some samples of a group; RewardFailed where the reward hangs or its worker dies."""
        process = self._processes[place] or self._started(place)
        # Plain values only: a prompt or completion object would make the worker import numpy and torch to unpickle it.
        ids = [completion.token_ids.tolist() for completion in group.completions[samples]]
        prompt, step = group.prompt, max(completion.version for completion in group.completions)
        episodes = episode_ends(group.completions[samples])
        # The other half is RewardService.__call__ in worker.py: the tuple is RewardSet.score's arguments.
        process.link.send((prompt.text, dict(prompt.columns), list(group.texts[samples]), ids, step, episodes))
        # Until the first answer the deadline is also what is left of the time for it.
        left, started = self._unanswered_seconds, time.monotonic()
        answer = process.link.receive(self._timeout_seconds if left is None else min(self._timeout_seconds, left))
        if not isinstance(answer, Scored):
            reason = self._why_silent(process, answer)
            self._end(place)  # it still computes, or is dead: its next answer would be taken for another call's
            if reason is not None:
                raise RewardFailed(reason)
            names = ", ".join(map(repr, self._rewards))
            if left is not None:
                # Several threads cannot race here: until the first answer there is one worker.
                self._unanswered_seconds = left = left - (time.monotonic() - started)
                if left <= 0:
                    raise RewardUnusable(
                        f"the reward {names} has not answered once: every call hung until it was killed "
                        f"(search.reward_timeout_seconds={self._timeout_seconds:g}). {self._log} has the line at which it "
                        "hung. Call it by hand with the texts of one prompt; if it only is slow, raise "
                        "search.reward_timeout_seconds."
                    )
            limit = f"search.reward_timeout_seconds={self._timeout_seconds:g} s"
            raise RewardFailed(f"the reward {names} took longer than {limit}")
        # A function that returns the wrong number of values does so for every group: the run stops at once.
        if (broken := next((own for own in answer.outcomes if isinstance(own, RewardBroken)), None)) is not None:
            raise RewardUnusable(str(broken))
        # A failure is an answer too: only silence counts against the first-answer deadline.
        self._unanswered_seconds = None
        if answer.spent:
            self._end(place)
        return list(answer.outcomes)

    def _started(self, place: int) -> WorkerProcess:
        """A new worker that has loaded the rewards. One that could never load them would not the next time either."""
        # Under the lock that `close` takes: a worker that starts after it would be left behind.
        with self._lock:
            if self._closed:
                raise RewardUnusable("the workers are closed")
            make = partial(RewardService, self._rewards)
            process = self._processes[place] = WorkerProcess(make, log=self._log, passed_on=self._passed_on)
        # The first word is the service's greeting; the time-out of calls does not run during the import.
        answer = process.link.receive(START_SECONDS)
        if isinstance(answer, Ready):
            self._first = self._first or answer
            return process
        reason = self._why_silent(process, answer) or (
            f"importing the reward's file took longer than {START_SECONDS:g} s; see {self._log}. Load what takes long "
            "at the first call, and raise search.reward_timeout_seconds for it."
        )
        self._end(place)
        # Once a worker has loaded the rewards, a failed start is the machine's trouble and costs its group.
        raise RewardUnusable(reason) if self._first is None else RewardFailed(reason)

    def _why_silent(self, process: WorkerProcess, answer: Any) -> str | None:
        """Why a worker gave no answer; None = it only takes too long, and the log has the line at which it is."""
        if isinstance(answer, Failed):
            return answer.error
        if process.link.closed:
            return f"the reward worker died ({process.end}); see {self._log}"
        process.log_line()
        return None
