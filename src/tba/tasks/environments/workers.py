"""Environments as their episodes see them: jobs go to the host's process, answers come back in any order.

A host that dies or falls silent costs the episodes that run, and another takes its place. One that never came to life stops
the run: its files cannot be loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from tba.runtime.links import Failed
from tba.tasks.environments.host import Answer, EnvironmentHost, EnvironmentSpec, EpisodeKey, HostReady
from tba.tasks.rewards.pool import START_SECONDS, RewardUnusable
from tba.tasks.rewards.worker import WorkerProcess

logger = logging.getLogger("tba.tasks")

SILENCE_SECONDS = 15.0
"""Time beyond an answer's own deadline after which the host itself counts as hanging."""
MOST_DEATHS = 3
"""Hosts in a row that end without one answer before the run stops."""


class Environments:
    """A host of environments. It starts when it is first asked."""

    def __init__(self, spec: EnvironmentSpec, *, log: Path, passed_on: Collection[str] = ()) -> None:
        self._spec, self._log, self._passed_on = spec, log, passed_on
        self._process: WorkerProcess | None = None
        self._asked: dict[EpisodeKey, float] = {}
        """Episodes that wait for an answer, by the time when they asked."""
        self._lost: list[tuple[EpisodeKey, Answer]] = []
        self._round = 0
        """Number of times that all episodes were given up."""
        self._ready: HostReady | None = None
        self._deaths = 0

    @property
    def ready(self) -> HostReady:
        """What the user's files hold."""
        self._started()
        assert self._ready is not None
        return self._ready

    @property
    def waiting(self) -> int:
        """Number of jobs without an answer."""
        return len(self._asked) + len(self._lost)

    def ask(self, episode: EpisodeKey, *job: Any) -> None:
        """Give an episode's environment a job; `start` comes first."""
        self._asked[episode] = time.monotonic()
        self._started().link.send(((self._round, episode), job))

    def answers(self, wait_seconds: float = 0.0) -> list[tuple[EpisodeKey, Answer]]:
        """Answers that have come; waits for the first, but not longer than the time."""
        found, self._lost = self._lost, []
        if self._process is None or not self._asked:
            return found
        message = self._process.link.receive(0.0 if found else wait_seconds)
        while message is not None:
            if isinstance(message, Failed):
                return found + self._lose(message.error)
            (asked_in, episode), answer = message
            # An answer to an episode that was given up is nobody's, also where another of the same name runs now.
            if asked_in == self._round and self._asked.pop(episode, None) is not None:
                found.append((episode, answer))
            self._deaths = 0
            message = self._process.link.receive(0.0)
        if self._process.link.closed:
            return found + self._lose(f"the environments' process died ({self._process.end}); see {self._log}")
        longest = self._spec.timeout_seconds + SILENCE_SECONDS
        if self._asked and time.monotonic() - max(self._asked.values()) > longest:
            return found + self._lose(f"the environments' process was silent for {longest:g} s; see {self._log}")
        return found

    def end(self, episode: EpisodeKey) -> None:
        """Kill what plays an episode; it has no answer any more."""
        if self._asked.pop(episode, None) is not None and self._process is not None:
            self._process.link.send(((self._round, episode), ("end",)))

    def give_up(self) -> None:
        """Forget all episodes that run."""
        self._round += 1
        self._asked.clear()
        self._lost.clear()
        if self._process is not None:
            self._process.link.send((None, ()))

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _started(self) -> WorkerProcess:
        if self._process is not None and not self._process.link.closed:
            return self._process
        if self._process is not None and self._asked:
            self._lost += self._lose(f"the environments' process died ({self._process.end}); see {self._log}")
        process = self._process = WorkerProcess(
            partial(EnvironmentHost, self._spec), log=self._log, passed_on=self._passed_on
        )
        word = process.link.receive(START_SECONDS)
        if not isinstance(word, HostReady):
            end = f"loading the environments took longer than {START_SECONDS:g} s; see {self._log}"
            if isinstance(word, Failed):
                end = word.error
            elif process.link.closed:
                end = f"the environments' process died while it loaded them ({process.end}); see {self._log}"
            self.close()
            raise RewardUnusable(end)
        self._ready = word
        return process

    def _lose(self, why: str) -> list[tuple[EpisodeKey, Answer]]:
        """The host is gone: what waits for it has failed."""
        self.close()
        self._deaths += 1
        if self._deaths >= MOST_DEATHS:
            raise RewardUnusable(f"{why}. It has happened {self._deaths} times without an answer in between.")
        logger.warning("%s: %d episodes are lost, and the environments start anew.", why, len(self._asked))
        lost, self._asked = [*self._asked], {}
        return [(episode, Answer(error=why)) for episode in lost]
