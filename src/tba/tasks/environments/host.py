"""The process that hosts environments: it imports the user's files once, and forks a child for each episode that runs.

    searcher -- guard -- host: one loop over the searcher's jobs and the children's answers
                          |-- child: a Playground; one job at a time, one episode after another
                          |-- child ...

A child that takes too long is killed and costs its episode alone. The guard (rewards/worker.py) ends all of them. The host
has a single thread, so that a fork takes no locks of other threads with it.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from tba.tasks.environments.playground import NO_TOOLS, Kind, Playground
from tba.tasks.environments.schemas import tool_schema
from tba.tasks.rewards.load_function import describe, load_named
from tba.tasks.rewards.worker import PR_SET_PDEATHSIG

EpisodeKey = tuple[str, int]
"""Id of the prompt and index of the sample."""
JobKey = tuple[int, EpisodeKey]
"""An episode, among all that had its name."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec:
    """The user's environments and tools: EnvironmentSpec(classes={"game": "game.py:Countdown"}, rewards={"game":
    "Countdown"})"""

    classes: Mapping[str, str | Callable[..., Any]]
    """By the name in the data's column `environment`."""
    rewards: Mapping[str, str]
    """Names of the rewards that they give."""
    tools: tuple[str | Callable[..., Any], ...] = ()
    agent: str | Callable[..., Any] | None = None
    """Function that plays whole episodes, in the place of environments."""
    timeout_seconds: float = 30.0
    """Longest that one answer may take."""
    copies: bool = False
    """Whether there are rewards besides the environments' own: they get copies of the environments."""


@dataclass(frozen=True, kw_only=True)
class HostReady:
    """First word of a host: HostReady(tools={"Countdown": ({"type": "function", ...},)}, steps=frozenset())"""

    tools: Mapping[str, tuple[Mapping[str, Any], ...]]
    """Schemas of the tools that an episode with each environment has."""
    steps: frozenset[str]
    """Names of the environments that take whole turns."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer to a job: Answer(value="7"), or why there is none: Answer(error="...")"""

    value: Any = None
    error: str = ""


@dataclass(eq=False)
class Child:
    """A child and its episode."""

    pid: int
    connection: Connection
    episode: JobKey
    deadline: float | None = None
    """When its answer is due; None = it has nothing to do."""
    ends: bool = False
    """Whether the job is the last of its episode."""


class EnvironmentHost:
    """Service of the host's process."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        # Once, before any fork: the children share what is loaded.
        self._kinds = {
            name: Kind.of(spec.rewards[name], _loaded(make, "environment")) for name, make in spec.classes.items()
        }
        for kind in self._kinds.values():
            if not kind.rewards and not spec.copies:
                raise ValueError(
                    f"environment {kind.name} has no get_reward, and there is no other reward: add the method, or name a "
                    "function as task.rewards (--reward, reward_funcs)."
                )
        self._agent = None if spec.agent is None else _loaded(spec.agent, "agent")
        # The served policy is on this machine: no proxy stands before it.
        os.environ.setdefault("NO_PROXY", "127.0.0.1")
        if not self._kinds:
            self._kinds = {NO_TOOLS: Kind(name=NO_TOOLS, make=None, tools={}, steps=False)}
        functions = [_loaded(own, "tool") for own in spec.tools]
        self._functions = {own.__name__: own for own in functions}
        own_tools = tuple(map(tool_schema, functions))
        for kind in self._kinds.values():
            names = [*kind.tools, *(own.__name__ for own in functions)]
            if twice := {name for name in names if names.count(name) > 1}:
                raise ValueError(f"two tools have the name {', '.join(sorted(twice))}: rename one of them.")
        self._greeting = HostReady(
            tools={name: (*kind.tools.values(), *own_tools) for name, kind in self._kinds.items()},
            steps=frozenset(name for name, kind in self._kinds.items() if kind.steps),
        )
        self._busy: dict[JobKey, Child] = {}
        """Children by the episode that they run, between its jobs too."""
        self._idle: list[Child] = []

    def serve(self, connection: Connection) -> None:
        connection.send(self._greeting)
        while True:
            working = [child for child in self._busy.values() if child.deadline is not None]
            due = min((child.deadline for child in working if child.deadline is not None), default=None)
            timeout = None if due in (None, math.inf) else max(0.0, due - time.monotonic())
            ready = wait([connection, *(child.connection for child in working)], timeout)
            for child in working:
                answer = self._answer(child, ready)
                if answer is not None:
                    connection.send((child.episode, answer))
            if connection in ready:
                try:
                    episode, job = connection.recv()
                except (EOFError, OSError):
                    return
                if episode is None:  # all episodes are given up
                    for child in list(self._busy.values()):
                        self._end(child)
                elif job[0] == "end":
                    if episode in self._busy:
                        self._end(self._busy[episode])
                elif job[0] in ("start", "run") or episode in self._busy:
                    self._begin(episode, job)
                else:
                    connection.send((episode, Answer(error="the environment was lost with its process")))

    def _begin(self, episode: JobKey, job: tuple[Any, ...]) -> None:
        """Give a job to the episode's child."""
        child = self._busy.get(episode) or self._take(episode)
        child.ends = job[0] in ("finish", "run")
        child.deadline = time.monotonic() + self._spec.timeout_seconds
        with suppress(OSError):  # it has died: its connection reads as ended
            child.connection.send(job)

    def _answer(self, child: Child, ready: list[Any]) -> Answer | None:
        """A child's answer; None = it goes on."""
        if child.connection in ready:
            try:
                answer: Answer = child.connection.recv()
            except (EOFError, OSError):
                return self._failed(child, "died (see the log of the rewards)")
            except Exception as error:  # what it sends is a user's: it may fail to be unpickled
                return self._failed(child, f"gave an answer that cannot be read: {describe(error)}")
            child.deadline = None
            if answer.error:  # the environment may be in any state
                self._end(child)
            elif child.ends:
                self._idle.append(self._busy.pop(child.episode))
            return answer
        if child.deadline is not None and time.monotonic() >= child.deadline:
            return self._failed(child, f"took longer than {self._spec.timeout_seconds:g} s and was ended")
        return None

    def _failed(self, child: Child, why: str) -> Answer:
        self._end(child)
        return Answer(error=f"the {'environment' if self._agent is None else 'agent'} {why}")

    def _end(self, child: Child) -> None:
        self._busy.pop(child.episode, None)
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        child.connection.close()

    def _take(self, episode: JobKey) -> Child:
        """An idle child, or a new one."""
        child = self._idle.pop() if self._idle else self._fork()
        child.episode = episode
        self._busy[episode] = child
        return child

    def _fork(self) -> Child:
        ours, theirs = Pipe()
        # What is buffered would be written twice.
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            theirs.close()
            return Child(pid=pid, connection=ours, episode=(0, ("", 0)))
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        ours.close()
        try:
            play(Playground(self._kinds, self._functions, copies=self._spec.copies, agent=self._agent), theirs)
        finally:
            os._exit(0)


def play(playground: Playground, connection: Connection) -> None:
    """Do one job after another until the host is gone: `start`, then `call` or `step` for each turn, then `finish`; an agent
    has only `run`."""
    while True:
        try:
            kind, *arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = Answer(value=getattr(playground, kind)(*arguments))
        # BaseException: an environment that calls sys.exit must not end the child.
        except BaseException as error:
            traceback.print_exc()
            who = "the agent failed" if kind == "run" else f"the environment failed in `{kind}`"
            answer = Answer(error=f"{who}: {describe(error)}")
        try:
            connection.send(answer)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            connection.send(Answer(error=f"the environment's answer cannot be sent: {describe(error)}"))


def _loaded(own: str | Callable[..., Any], kind: str) -> Callable[..., Any]:
    if not isinstance(own, str):
        return own
    return load_named(own, what=f"{kind} {own!r}", kind="class" if kind == "environment" else "function", fits=callable)
