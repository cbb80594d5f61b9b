"""Roles on a Ray cluster. Each runs under an actor (RoleHost), which holds the role's resources on a node and starts
the role as a process there; the process finds counters, weight buffers and a link as on one machine. Its starter sees
the actor as a process of its own machine (ClusterRole).

The supervisor starts the trainer. The trainer's process joins the cluster itself and starts its searchers: Ray ends their
actors when that process is gone. One call at a time takes the shared counters to a role's node and brings back what the role
has sent and its part of the counters; another one takes messages to it. Heartbeats are numbers that rise: clocks of two
nodes are not compared. Nothing here imports torch: an actor is there in a moment.
"""

from __future__ import annotations

import logging
import math
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import ray
import ray.exceptions

from tba.config import Config
from tba.observe.run_folder import Holder, RunFolder
from tba.runtime.cluster.copies import RunCopy, begun_at, replica_actor, what_is_there
from tba.runtime.cluster.weight_relay import Offer, WeightMirror, WeightRelay
from tba.runtime.counters import SharedCounters
from tba.runtime.links import ConnectionHandle, Link
from tba.runtime.placement import threads_of
from tba.runtime.processes import RoleProcess

logger = logging.getLogger("tba")

COLLECT_SECONDS = 0.02
"""Time for which frames are collected after the first: a call for each would keep a core busy."""
CHECK_SECONDS = 1.0
CONCURRENCY_GROUPS = {"exchange": 1, "deliver": 1, "weights": 1, "files": 1}
"""Each has a thread of its own, which takes calls in the order they were made; so have all other calls together."""
EXCHANGE_SECONDS = 0.1
NODE_SECONDS = 30.0
"""Time after which it is said that a trainer waits for a node."""
KILLED, FAILED = -9, 1
"""Exit status of a role whose actor was killed or is gone with its node, and of one that could not be started."""


# On the role's node


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """News of a role since the last exchange."""

    frames: list[bytes]
    row: bytes
    pid: int
    status: int | None
    hung_up: bool
    files: Mapping[str, str] | None = None
    """Contents of the run folder (copies.what_is_there); None = it was not looked at."""


class RoleHost:
    """Runs one role on this node. `searcher` is the number of the searcher that it hosts, and `connection` that of its
    trainer; None = it hosts a trainer. `copied` is the run folder of a trainer whose run is copied to another node."""

    def __init__(
        self,
        *,
        name: str,
        searcher: int | None,
        search_path: Sequence[str],
        connection: ConnectionHandle | None = None,
        copied: Path | None = None,
    ) -> None:
        # The starter's folders come first, so that a module is the one that its starter imports, not another of this node.
        sys.path[:] = [*search_path, *(path for path in sys.path if path not in search_path)]
        self._name, self._counters = name, SharedCounters.create()
        self._own = self._counters.own_part(searcher)
        self._role: RoleProcess | None = None
        self._started = threading.Event()
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """Messages that the role has sent; None at its end."""
        self._hung_up = False
        self._mirror = None if connection is None else WeightMirror(connection)
        self._has_weights = threading.Event()
        self._copied = None if copied is None else RunFolder(copied)
        self._looked = 0.0

    def start(self, target: str | bytes, arguments: Mapping[str, Any], *, log: Path | None, threads: int) -> None:
        """A searcher starts when the first weights of its trainer are there; a trainer finds its host in `arguments`."""
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        counters = self._counters.memory.handle
        if self._mirror is None:
            own = {"host": replace(arguments["host"], counters=counters)}
        else:
            own = {"connection": self._mirror.connection(counters)}
            # In this thread, which stays: Linux ends a process with the thread that has started it (die_with_parent).
            self._has_weights.wait()
        self._role = RoleProcess(
            self._name, target, {**arguments, **own}, log=log, threads=threads, unread=self._frames.put
        )
        self._started.set()

    @ray.method(concurrency_group="weights")
    def take_weights(self, offer: Offer, data: list[Any]) -> None:
        # Ray would fetch a bare argument before the call begins; in a list it is fetched here (weight_relay.Give).
        assert self._mirror is not None
        self._mirror.take(offer, ray.get(data[0]))
        if offer.kind == "weights":
            self._has_weights.set()

    @ray.method(concurrency_group="exchange")
    def exchange(self, counters: bytes, timeout_seconds: float) -> Exchanged:
        """Take in the shared counters and hand out what the role has sent; waits for that, but not longer than the time."""
        # The role's own part is left out: the role writes it in this memory, and the starter's copy of it is older.
        values, found, own = self._counters.values, np.frombuffer(counters, np.float64), self._own
        values[: own.start], values[own.stop :] = found[: own.start], found[own.stop :]
        frames: list[bytes | None] = []
        with suppress(queue.Empty):
            frames.append(self._frames.get(timeout=timeout_seconds))
            time.sleep(COLLECT_SECONDS)
            while True:
                frames.append(self._frames.get_nowait())
        self._hung_up = self._hung_up or None in frames
        # The field is read once: `start` may set it meanwhile, in another thread.
        role, files = self._role, None
        status = None if role is None else role.status
        # Once a second, and once more when the role has ended. Not before it has begun: the folder may be incomplete.
        is_due = status is not None or time.monotonic() >= self._looked + CHECK_SECONDS
        if self._copied is not None and role is not None and is_due:
            self._looked = time.monotonic()
            with suppress(OSError):  # something was removed while it was looked at
                files = what_is_there(self._copied)
        return Exchanged(
            frames=[frame for frame in frames if frame is not None],
            row=self._counters.values[self._own].tobytes(),
            pid=0 if role is None else role.pid,
            status=status,
            hung_up=self._hung_up,
            files=files,
        )

    @ray.method(concurrency_group="deliver")
    def deliver(self, frame: bytes) -> None:
        """A frame for the role. It waits for its process, which a searcher has when its first weights come."""
        self._started.wait()
        assert self._role is not None
        self._role.link.send_bytes(frame)

    @ray.method(concurrency_group="files")
    def with_folder(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Result of a function of copies.py for the run folder on this node."""
        return call(self._copied, *arguments)

    def signal(self, number: int) -> None:
        if self._role is not None and self._role.alive:
            self._role.signal(number)

    def show_stacks(self) -> None:
        if self._role is not None:
            self._role.show_stacks()

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


# Where the role was started


class ActorLink(Link):
    """The link of a role in an actor, whose connection is the ClusterRole."""

    def _hang_up(self) -> None:
        self._connection.kill()


class ClusterRole:
    """A role in an actor, as a RoleProcess, and as the Connection of its link, whose threads call the actor."""

    def __init__(
        self,
        name: str,
        counters: SharedCounters,
        *,
        searcher: int | None,
        log: Path | None,
        num_cpus: float,
        num_gpus: float,
        queued: bool = False,
        copy: RunCopy | None = None,
        ended: Callable[[], None] = lambda: None,
        **given: Any,
    ) -> None:
        """The actor, which is given the rest, waits for a node with room for it: a CPU for each thread, and the role's
        GPUs. `ended` is called once, when the role is gone."""
        self.name, self.log, self.pid = name, log, 0
        self.status: int | None = None
        make: Any = ray.remote  # its types do not know of concurrency groups
        host = make(concurrency_groups=CONCURRENCY_GROUPS, num_cpus=num_cpus, num_gpus=num_gpus)(RoleHost)
        self.actor = host.remote(name=name, searcher=searcher, search_path=sys.path, **given)
        self._calls: list[Any] = []
        self._counters = counters
        self._own = counters.own_part(searcher)
        self._copy = copy
        self._when_ended = ended
        self._ended = threading.Event()
        self._end_lock = threading.Lock()
        self._frames: deque[bytes] = deque()
        # Last: its reader begins to make calls of the actor at once.
        self.link = ActorLink(self, queued=queued)

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    def wait(self, timeout_seconds: float) -> bool:
        return self._ended.wait(timeout_seconds)

    def kill(self) -> None:
        self._end(KILLED)

    def signal(self, number: int) -> None:
        if self.pid == 0 and number in (signal.SIGINT, signal.SIGKILL):
            self._end(-number)  # it has not begun: there is nothing to save, and a node may never come
        else:
            self.watch(self.actor.signal.remote(number))

    def show_stacks(self) -> None:
        self.watch(self.actor.show_stacks.remote())

    def watch(self, call: Any) -> None:
        """An error of this call of the actor is the role's end."""
        self._calls.append(call)

    def recv_bytes(self) -> bytes:
        """The next frame that the role sends; an EOFError when it is gone and all that it sent was read."""
        while not self._frames:
            if not self.alive:
                raise EOFError
            self._exchange()
        return self._frames.popleft()

    def send_bytes(self, body: bytes) -> None:
        try:
            # The answer is waited for, because a node that is gone shows in it as an error.
            ray.get(self.actor.deliver.remote(body))
        except ray.exceptions.RayError as error:  # seen by the exchange
            raise BrokenPipeError from error

    def _exchange(self) -> None:
        try:
            # The call returns after EXCHANGE_SECONDS where the role has sent nothing, because it carries heartbeats too.
            found = ray.get(self.actor.exchange.remote(self._counters.values.tobytes(), EXCHANGE_SECONDS))
            self.pid = found.pid
            if self.alive:  # what comes after its end would be taken for its successor's
                self._counters.values[self._own] = np.frombuffer(found.row, np.float64)
            self._frames += found.frames
            if self._copy is not None and found.files is not None and self.alive:
                # One that came to its end may have just saved; one that was killed has not, and the next one is due.
                self._copy.follow(self.actor, found.files, wait=found.status is not None and found.status >= 0)
            # An exit status alone is not the end: frames may still be on their way from the process to its host.
            if found.hung_up and found.status is not None:
                self._end(found.status)
            # The list is copied first: `watch` appends to it from other threads.
            for call in list(self._calls):
                if ray.wait([call], timeout=0.0)[0]:
                    self._calls.remove(call)
                    ray.get(call)  # raises its error
        except ray.exceptions.RayTaskError as error:
            logger.error("%s: a call of its actor failed: %s", self.name, error)
            self._end(FAILED)
        except ray.exceptions.RayError as error:
            if self.alive:
                logger.warning("%s: its actor is gone: %s", self.name, str(error).strip().splitlines()[0])
            self._end(KILLED)

    def _end(self, status: int) -> None:
        """The role has ended, and its actor with it. Its starter sees the end of the link."""
        # The pool's thread may kill the role while the link's reader sees its end: only the first of them counts.
        with self._end_lock:
            if self._ended.is_set():
                return
            self.status = status
            self._ended.set()
        # These run outside of the lock: the relay has a lock of its own, which it may hold while it puts weights.
        ray.kill(self.actor)
        self._when_ended()


def share_of_gpus(available: float, num_roles: int) -> float:
    """GPUs of each role: one, or 1/n where n have to share each. Eight roles on three GPUs take 1/3 each."""
    if available < 1:
        return 0.0
    return min(1.0, 1 / math.ceil(num_roles / int(available)))


def gpus_each(config: Config) -> float:
    """GPUs of a searcher, and of each rank of the trainer."""
    available = 0.0 if config.model.device == "cpu" else ray.cluster_resources().get("GPU", 0.0)
    return share_of_gpus(available, config.train.ranks + config.search.count)


class ClusterTrainers:
    """Places the trainer of a run on a node."""

    def __init__(self, config: Config, counters: SharedCounters, replica: RunFolder | None, owner: Holder) -> None:
        self._config = config
        self._counters = counters
        self._copy = None if replica is None else RunCopy(replica)
        self._replica = None if replica is None else replica_actor(config, replica, owner)
        """Held: the actor ends with the last one who knows it."""

    def start(self, target: str, arguments: Mapping[str, Any]) -> ClusterRole:
        """`arguments["host"]` is a Host, of which the role gets its own node's form."""
        config, copy = self._config, self._copy
        each, ranks = gpus_each(config), config.train.ranks
        cpus = ranks * threads_of(config).trainer
        # Ray knows parts of one GPU only.
        gpus = each if ranks == 1 else ranks * math.ceil(each)
        role = ClusterRole(
            "trainer",
            self._counters,
            searcher=None,
            log=None,
            num_cpus=cpus,
            num_gpus=gpus,
            copy=copy,
            copied=None if copy is None else config.run_folder,
        )
        begin = partial(role.actor.start.remote, target, log=None, threads=threads_of(config).trainer)
        if copy is None:
            role.watch(begin(arguments=dict(arguments)))
        else:
            # In the background: it takes as long as a checkpoint takes to travel, and a node may have to be waited for.
            values = (copy, role, begin, dict(arguments), f"{cpus:d} CPUs, {gpus:g} GPUs")
            threading.Thread(target=self._begin_copied, args=values, daemon=True, name="trainer-begin").start()
        return role

    def _begin_copied(
        self, copy: RunCopy, role: ClusterRole, begin: Callable[..., Any], arguments: dict[str, Any], room: str
    ) -> None:
        """Start a trainer, with the run folder of the one before where that is not on its node."""
        actor = role.actor
        try:
            owner, resume = arguments["host"].owner, arguments["resume"]
            call = actor.with_folder.remote(begun_at, owner, resume)
            if not ray.wait([call], timeout=NODE_SECONDS)[0]:
                logger.warning("the trainer waits for a node with room for it (%s): none of the cluster has any.", room)
            begun = ray.get(call)
            handed_over = copy.hand_over(actor, begun, owner, resume)
            if handed_over:
                logger.warning("the trainer's node has no such run folder: it gets the copy in %s.", copy.folder.path)
            if ray.get(actor.node.remote()) == ray.get_runtime_context().get_node_id():
                logger.warning(
                    "replay.durability=node: the trainer runs on this node, where the second copy of its groups is too. "
                    "Join the cluster from a node that has no room for the trainer."
                )
            # The trainer goes on where its node has the run already or was given it; otherwise it begins.
            arguments["resume"] = resume or handed_over or begun is not None
            ray.get(begin(arguments=arguments))
        except ray.exceptions.RayActorError:  # the exchange reports it
            role.kill()
        except (ray.exceptions.RayError, OSError) as error:
            logger.error("the trainer could not be started: %s", str(error).strip().splitlines()[-1])
            role.kill()


class ClusterSearchers:
    """Starts the searchers of the trainer in this process, and has its weights go to those there are."""

    def __init__(self, config: Config, counters: SharedCounters, logs: Path) -> None:
        self._gpus_each = gpus_each(config)
        self._threads = threads_of(config).searcher
        self._counters = counters
        self._logs = logs
        self._relay: WeightRelay | None = None

    def start(
        self,
        target: Callable[..., None],
        arguments: Mapping[str, Any],
        connection: ConnectionHandle,
        index: int,
        incarnation: str,
    ) -> ClusterRole:
        name, log = f"searcher-{index}", self._logs / f"searcher-{index}.log"
        self._relay = self._relay or WeightRelay(connection)
        role = ClusterRole(
            name,
            self._counters,
            searcher=index,
            log=log,
            num_cpus=self._threads,
            num_gpus=self._gpus_each,
            queued=True,
            ended=partial(self._relay.remove, incarnation),
            connection=connection,
        )
        # The weights are offered at once: the actor starts the searcher's process when the first have arrived.
        self._relay.add(incarnation, role.actor.take_weights.remote)
        program = cloudpickle.dumps((target, dict(arguments)))  # the actor need not import what it needs
        own = {"index": index, "incarnation": incarnation}
        role.watch(role.actor.start.remote(program, own, log=log, threads=self._threads))
        return role

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()
