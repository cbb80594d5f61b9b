"""Roles on a Ray cluster, as their supervisor sees them: each is an actor (host.py) with stated resources, and its link is
carried by calls of the actor. The supervisor cannot tell them from processes of its own machine.

One call at a time takes the board to a role's node and brings back the role's frames and its row of the board; another one
takes frames to it. Signs of life are numbers that rise, never times: clocks of two nodes are not compared.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.exceptions

from tba.runtime.board import Board
from tba.runtime.cluster.copies import RunCopy
from tba.runtime.cluster.host import CONCURRENCY_GROUPS, RoleHost
from tba.runtime.cluster.weights import WeightRelay, unpickled_ends
from tba.runtime.links import RelayedLink, StartSearchers, hang_up
from tba.runtime.supervisor import MakeLink, Seat
from tba.runtime.threads import RoleThreads

logger = logging.getLogger("tba")

EXCHANGE_SECONDS = 0.1
"""Longest time between two exchanges with a role's node."""
NODE_SECONDS = 30.0
"""Time after which it is said that a trainer waits for a node."""
DELIVER_BYTES = 32 * 2**20
"""Bytes from which on no more frames are gathered for one call: a replica may hold many of them."""
KILLED, FAILED = -9, 1
"""Exit status of a role whose actor was killed or is gone with its node, and of one that could not be started."""


class ClusterRole:
    """A role in an actor, with the methods of a RoleProcess."""

    def __init__(
        self,
        name: str,
        actor: Any,
        board: Board,
        *,
        searcher: int | None,
        log: Path | None,
        make_link: MakeLink,
        started: Any = None,
        copy: RunCopy | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`started` is a call of the actor: an error of it is the role's end. `copy`
        follows the run folder on the role's node; None = it is not copied. `ended` is called once, when the role is gone."""
        self.name = name
        self.log = log
        self.pid = 0
        self.status: int | None = None
        self._actor = actor
        self._calls: list[Any] = [started]
        """Calls whose end has not been seen yet."""
        self._board = board
        self._own = board.own_part(searcher)
        self._copy = copy
        self._when_ended = ended
        self._ended = threading.Event()
        self._end_lock = threading.Lock()
        ours, self._far_end = Pipe()
        self.link: RelayedLink = make_link(ours)
        for work in (self._exchange, self._deliver):
            threading.Thread(target=work, daemon=True, name=f"{name}-{work.__name__.strip('_')}").start()

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
            self.watch(self._actor.signal.remote(number))

    def show_stacks(self) -> None:
        self.watch(self._actor.show_stacks.remote())

    def watch(self, call: Any) -> None:
        """An error of this call of the actor is the role's end."""
        self._calls.append(call)

    def _exchange(self) -> None:
        """Bring frames and signs of life until the role has ended."""
        try:
            while self.alive:
                found = ray.get(self._actor.exchange.remote(self._board.values.tobytes(), EXCHANGE_SECONDS))
                self.pid = found.pid
                if self.alive:  # what comes after its end would be taken for its successor's
                    self._board.take_own(np.frombuffer(found.row, np.float64), self._own)
                for each in found.frames:
                    self._far_end.send_bytes(each)
                if self._copy is not None and found.files is not None and self.alive:
                    # One that came to its end may have just saved; one that was killed has not, and the next one is due.
                    self._copy.follow(self._actor, found.files, wait=found.status is not None and found.status >= 0)
                if found.hung_up and found.status is not None:
                    self._end(found.status)
                self._see_calls()
        except ray.exceptions.RayTaskError as error:
            logger.error("%s: a call of its actor failed: %s", self.name, error)
            self._end(FAILED)
        except ray.exceptions.RayError as error:
            if self.alive:
                logger.warning("%s: its actor is gone: %s", self.name, str(error).strip().splitlines()[0])
            self._end(KILLED)
        except OSError:  # the supervisor has hung up: the role is being replaced
            self._end(KILLED)

    def _see_calls(self) -> None:
        """Raise the error of a call that has failed."""
        done = [call for call in list(self._calls) if call is not None and ray.wait([call], timeout=0.0)[0]]
        for call in done:
            self._calls.remove(call)
            ray.get(call)

    def _deliver(self) -> None:
        """Take frames to the role, one call after the other, each with all that has gathered."""
        with suppress(EOFError, OSError, ray.exceptions.RayError):  # seen by the exchange
            while True:
                frames = [self._far_end.recv_bytes()]
                while self._far_end.poll() and sum(map(len, frames)) < DELIVER_BYTES:
                    frames.append(self._far_end.recv_bytes())
                ray.get(self._actor.deliver.remote(frames))

    def _end(self, status: int) -> None:
        """The role is gone, and its actor with it; the supervisor sees the end of its link."""
        with self._end_lock:
            if self._ended.is_set():
                return
            self.status = status
            self._ended.set()
        ray.kill(self._actor)
        hang_up(self._far_end)
        self._when_ended()


def share_of_gpus(available: float, num_roles: int) -> float:
    """GPUs of each role: one, or 1/n where n of them have to share each; 0 where there are none. Eight roles on three GPUs
    are three on one at most, so each takes 1/3."""
    if available < 1:
        return 0.0
    return min(1.0, 1 / math.ceil(num_roles / int(available)))


class ClusterRoles:
    """Starts the roles of a run as actors, and has the weights of the trainer there is go to the searchers there are."""

    def __init__(
        self,
        board: Board,
        *,
        logs: Path,
        threads: RoleThreads,
        gpus_each: float,
        ranks: int = 1,
        copy: RunCopy | None = None,
    ) -> None:
        """`gpus_each` is what a searcher and each of the trainer's `ranks` take up. `copy` is the run's on this node, with
        replay.durability=node."""
        self._ranks = ranks
        self._threads = threads
        self._gpus_each = gpus_each
        self._board = board
        self._logs = logs
        self._copy = copy
        self._role: ClusterRole | None = None
        """The trainer that was started last."""
        self._trainer: Any = None
        """The trainer's actor; None = the trainer is in this process."""
        self._orders: StartSearchers | None = None
        """How the trainer has searchers started; None = it has not asked for any yet."""
        self._relay: WeightRelay | None = None
        """Where the trainer is in this process."""
        self._searchers: dict[str, Any] = {}
        """Actors of the searchers there are, by their holders."""
        self._lock = threading.Lock()

    def trainer(self, target: str, arguments: Mapping[str, Any], make_link: MakeLink) -> ClusterRole:
        """`arguments["host"]` is a HostHandle, of which the role gets its own node's form."""
        copied = None if self._copy is None else arguments["config"].run_folder
        actor = self._actor("trainer", None, copied=copied)
        self._trainer = actor
        started = None
        if self._copy is None:
            started = actor.start.remote(target, dict(arguments), log=None, threads=self._threads.trainer)
        role = ClusterRole(
            "trainer",
            actor,
            self._board,
            searcher=None,
            log=None,
            make_link=make_link,
            started=started,
            copy=self._copy,
        )
        self._role = role
        if self._copy is not None:
            # In the background: it takes as long as a checkpoint takes to travel, and a node may have to be waited for.
            begin = partial(self._begin_copied, self._copy, role, actor, target, dict(arguments))
            threading.Thread(target=begin, daemon=True, name="trainer-begin").start()
        return role

    def _begin_copied(
        self,
        copy: RunCopy,
        role: ClusterRole,
        actor: Any,
        target: str,
        arguments: dict[str, Any],
    ) -> None:
        """Start a trainer, with the run folder of the one before where that is not on its node."""
        try:
            owner, resume = arguments["host"].owner, arguments["resume"]
            call = actor.begun_at.remote(owner, resume)
            if not ray.wait([call], timeout=NODE_SECONDS)[0]:
                logger.warning(
                    "the trainer waits for a node with room for it (%d CPUs, %g GPUs): none of the cluster has any.",
                    *self._resources(None).values(),
                )
            begun = ray.get(call)
            handed_over = copy.hand_over(actor, begun, owner, resume)
            if handed_over:
                logger.warning("the trainer's node has no such run folder: it gets the copy in %s.", copy.folder.path)
            if ray.get(actor.node.remote()) == ray.get_runtime_context().get_node_id():
                logger.warning(
                    "replay.durability=node: the trainer runs on this node, where the second copy of its groups is too. "
                    "Join the cluster from a node that has no room for the trainer."
                )
            arguments["resume"] = resume or handed_over or begun is not None
            ray.get(actor.start.remote(target, arguments, log=None, threads=self._threads.trainer))
        except ray.exceptions.RayActorError:  # told by the exchange
            role.kill()
        except (ray.exceptions.RayError, OSError) as error:
            logger.error("the trainer could not be started: %s", str(error).strip().splitlines()[-1])
            role.kill()

    def searcher(self, seat: Seat, orders: StartSearchers, make_link: MakeLink) -> ClusterRole:
        if orders is not self._orders:  # the first searcher of this trainer
            self._orders = orders
            if self._role is None:
                self._relay = WeightRelay(unpickled_ends(orders.ends))
            else:
                self._role.watch(self._trainer.serve_weights.remote(orders.ends))
        actor, log = self._actor(seat.name, seat.index), self._logs / f"{seat.name}.log"
        started = actor.start.remote(
            orders.recipe,
            {"index": seat.index, "incarnation": seat.incarnation, "ends": orders.ends},
            log=str(log),
            threads=self._threads.searcher,
        )
        holder = seat.holder
        with self._lock:
            self._searchers[holder] = actor
        self._tell_receivers()
        return ClusterRole(
            seat.name,
            actor,
            self._board,
            searcher=seat.index,
            log=log,
            make_link=make_link,
            started=started,
            ended=partial(self._forget, holder),
        )

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()

    def _actor(self, name: str, searcher: int | None, *, copied: Path | None = None) -> Any:
        make: Any = ray.remote  # its types do not know of concurrency groups
        return make(concurrency_groups=CONCURRENCY_GROUPS, **self._resources(searcher))(RoleHost).remote(
            name=name, searcher=searcher, search_path=sys.path, copied=copied
        )

    def _resources(self, searcher: int | None) -> dict[str, float]:
        """A CPU for each thread of a role, and its share of the GPUs; the trainer has them for each of its ranks."""
        if searcher is not None:
            return {"num_cpus": self._threads.searcher, "num_gpus": self._gpus_each}
        # Ray knows parts of one GPU only.
        gpus = self._gpus_each if self._ranks == 1 else self._ranks * math.ceil(self._gpus_each)
        return {"num_cpus": self._ranks * self._threads.trainer, "num_gpus": gpus}

    def _forget(self, holder: str) -> None:
        with self._lock:
            del self._searchers[holder]
        self._tell_receivers()

    def _tell_receivers(self) -> None:
        with self._lock:
            searchers = dict(self._searchers)
        if self._relay is not None:
            self._relay.set_receivers({name: actor.take_weights.remote for name, actor in searchers.items()})
        elif self._trainer is not None:
            self._trainer.set_receivers.remote(searchers)
