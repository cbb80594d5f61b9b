"""Responses that other threads wait for: one call of `Engine.generate` serves all clients, who share decode steps.

Other threads hand over jobs, cancellations and weights through one queue of commands. The engine takes jobs as slots fall
free. Between two decode steps commands are carried out, and the tokens so far of responses that are watched are delivered.
A `Driver` generates in a thread of its own. While nothing runs it blocks on the queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from tba.engine.contract import Engine, RunningTokens
from tba.types import Completion, Request, Sampling, Weights

logger = logging.getLogger("tba.serve")

LOOK_SECONDS = 0.05
"""Time between two looks at the tokens of responses that are watched: more looks would cost more than the decode steps of a
small model."""
STOP_SECONDS = 30.0
"""Longest wait for the thread when it is closed."""

Update = RunningTokens | Completion | Exception
"""Tokens so far, the whole response, or the error that ended it."""


class QueueFull(RuntimeError):
    """So many responses wait that no more are taken."""


class DriverClosed(RuntimeError):
    """The server is shutting down."""


class EngineFailed(RuntimeError):
    """The engine raised an error, which ended all responses that ran."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A response that a client waits for. Its request asks for one sample, with its own sampling."""

    request: Request
    deliver: Callable[[Update], object]
    """Called in the driver's thread: it must neither block nor raise. The last call brings a completion or an error."""
    is_watched: bool = False
    """Whether tokens so far are delivered too."""

    @property
    def key(self) -> tuple[str, int]:
        """As a completion names it."""
        return self.request.prompt.id, self.request.first_sample


class JobQueue:
    """Jobs of many threads, as one thread generates them with one engine."""

    def __init__(self, engine: Engine, *, max_waiting: int) -> None:
        """`max_waiting` is the largest number of responses that wait for slots."""
        self.engine = engine
        self.most_open = engine.slots + max_waiting
        """Largest number of responses that run or wait."""
        self._lock = threading.Lock()
        self._num_open = 0
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closed = False
        # The rest belongs to the thread that generates.
        self._waiting: deque[Job] = deque()
        self._running: dict[tuple[str, int], Job] = {}
        self._watched: dict[Request, Job] = {}
        self._ending: set[Request] = set()
        self._next_look = 0.0

    # --- for other threads ------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self.engine.version

    @property
    def num_open(self) -> int:
        """Number of responses that run or wait."""
        return self._num_open

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take all of these jobs, or none: QueueFull."""
        with self._lock:
            if self._closed:
                raise DriverClosed("the server is shutting down.")
            if self._num_open + len(jobs) > self.most_open:
                raise QueueFull(f"{self._num_open} responses run or wait, of at most {self.most_open}.")
            self._num_open += len(jobs)
            self._commands.put(lambda: self._waiting.extend(jobs))

    def end(self, jobs: Sequence[Job]) -> None:
        """End responses early. A running one is delivered as far as it came, one that waits is not."""
        self._commands.put(lambda: self._end(jobs))

    def close(self) -> None:
        """Take no more jobs."""
        with self._lock:
            self._closed = True

    # --- for the thread that generates ------------------------------------------------------------------------------

    def take_commands(self, wait_seconds: float = 0.0) -> None:
        """Carry out the commands that have come; waits for the first, but not longer than the time."""
        if wait_seconds:
            with suppress(Empty):
                self._commands.get(timeout=wait_seconds)()
        while not self._commands.empty():
            self._commands.get()()

    def start_next(self) -> Job | None:
        """The job that has waited longest, which runs from now on. Of two with the same key, prompt and random numbers are
        the same: the second waits until the first is done, as completions are told apart by their keys."""
        if self._closed:
            return None
        for place, job in enumerate(self._waiting):
            if job.key not in self._running:
                del self._waiting[place]
                self._running[job.key] = job
                if job.is_watched:
                    self._watched[job.request] = job
                return job
        return None

    def open_jobs(self) -> list[Job]:
        """Jobs that run or wait."""
        return [*self._running.values(), *self._waiting]

    def between_steps(self) -> None:
        self.take_commands()
        if self._closed:
            self._ending.update(job.request for job in self._running.values())
        if self._ending:
            self.engine.end_early(self._ending)
        if self._watched and time.monotonic() >= self._next_look:
            for found in self.engine.running_tokens(self._watched):
                self._watched[found.request].deliver(found)
            self._next_look = time.monotonic() + LOOK_SECONDS

    def finish(self, completion: Completion) -> None:
        """Deliver a response of the engine."""
        self._finish(self._running[completion.prompt_id, completion.sample_index], completion)

    def give_up(self, error: Exception) -> None:
        """Deliver an error to all jobs, those that wait included."""
        self.take_commands()
        waiting, self._waiting = self._waiting, deque()
        for job in [*self._running.values(), *waiting]:
            self._finish(job, error)

    def _end(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if self._running.get(job.key) is job:
                self._ending.add(job.request)
                self._watched.pop(job.request, None)
            elif job in self._waiting:
                self._waiting.remove(job)
                self._leave()

    def _finish(self, job: Job, result: Completion | Exception) -> None:
        self._running.pop(job.key, None)
        self._watched.pop(job.request, None)
        self._ending.discard(job.request)
        self._leave()
        job.deliver(result)

    def _leave(self) -> None:
        with self._lock:
            self._num_open -= 1


class Driver(JobQueue):
    """Generates for many clients in a thread of its own."""

    def __init__(self, engine: Engine, *, max_waiting: int) -> None:
        super().__init__(engine, max_waiting=max_waiting)
        # Each thread has a current GPU of its own, and kernels go to that one.
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def load(self, weights: Weights) -> None:
        """Load other weights between two decode steps; running responses go on with them."""
        self._commands.put(lambda: self._load(weights))

    def close(self) -> None:
        """End everything, and the thread."""
        super().close()
        self._commands.put(lambda: None)  # wakes the thread
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        while not self._closed:
            try:
                # Every request has a sampling of its own, so the call's is never used.
                own = Sampling(max_new_tokens=1)
                generated = self.engine.generate(
                    self, samples_per_prompt=1, sampling=own, between_steps=self.between_steps
                )
                for completion in generated:
                    self.finish(completion)
            except Exception as error:  # of a model, a device or memory: those that wait may fare better
                logger.exception("the engine failed, and with it %d responses", len(self._running))
                for job in list(self._running.values()):
                    self._finish(job, EngineFailed(f"{type(error).__name__}: {error}"))
        self.give_up(DriverClosed("the server is shutting down."))

    def __iter__(self) -> Iterator[Request | None]:
        return self

    def __next__(self) -> Request | None:
        """The next request for the engine; None = none now, and others run."""
        self.take_commands()
        while (job := self.start_next()) is None:
            if self._running:
                return None
            if self._closed:
                raise StopIteration
            self._commands.get()()
        return job.request

    def _load(self, weights: Weights) -> None:
        try:
            self.engine.load(weights)
        except Exception:  # weights of another model: nothing was changed
            logger.exception("weights of version %d do not fit, and version %d stays", weights.version, self.version)
