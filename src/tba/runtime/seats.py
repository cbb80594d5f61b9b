"""What a supervisor starts, and where: seats for searchers, those who start roles on this machine (LocalRoles; on a cluster
cluster/roles.py), and how a trainer finds the supervisor that it runs under (Host)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from tba.config import Config
from tba.observe.claim import Holder
from tba.runtime.board import Board, MemoryHandle, Place, SharedMemory
from tba.runtime.deadlines import Idleness
from tba.runtime.links import Failed, Link, RelayedLink, StartSearchers
from tba.runtime.processes import Role, RoleProcess, may_fork
from tba.runtime.threads import threads_of, workers_of

MakeLink = Callable[[Connection], RelayedLink]
"""Makes the supervisor's end of a role's link."""
StartTrainer = Callable[[MakeLink], Role[RelayedLink]]
StartSearcher = Callable[["Seat", StartSearchers, MakeLink], Role[RelayedLink]]


class RoleStarter(Protocol):
    """Starts the roles of a run, wherever that is."""

    def trainer(self, target: str, arguments: Mapping[str, Any], make_link: MakeLink) -> Role[RelayedLink]:
        """Start `target(link, **arguments)`; `arguments["host"]` is the supervisor's HostHandle."""
        ...

    def searcher(self, seat: Seat, orders: StartSearchers, make_link: MakeLink) -> Role[RelayedLink]:
        """Start the role that fills a seat, as the trainer has ordered it."""
        ...


@dataclass(frozen=True, kw_only=True)
class LocalRoles:
    """Starts roles as processes of this machine."""

    config: Config
    logs: Path

    def trainer(self, target: str, arguments: Mapping[str, Any], make_link: MakeLink) -> Role[RelayedLink]:
        return RoleProcess(
            "trainer",
            target,
            arguments,
            log=None,
            threads=max(threads_of(self.config).trainer, workers_of(self.config)),
            forked=may_fork(),
            starts_roles=arguments["config"].train.ranks > 1,
            make_link=make_link,
        )

    def searcher(self, seat: Seat, orders: StartSearchers, make_link: MakeLink) -> Role[RelayedLink]:
        return RoleProcess(
            seat.name,
            orders.recipe,
            {"index": seat.index, "incarnation": seat.incarnation, "ends": orders.ends},
            log=self.logs / f"{seat.name}.log",
            threads=threads_of(self.config, num_searchers=seat.index + 1).searcher,
            forked=orders.forked,
            make_link=make_link,
        )


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where a trainer runs: its link to the supervisor, and the board that all see. Host(link=..., board=..., owner=...)"""

    link: Link
    board: Board
    owner: Holder
    """The supervisor's process, which is there for as long as the run, and has its folder."""


@dataclass(frozen=True, kw_only=True)
class HostHandle:
    """How the trainer's process finds its host. HostHandle(board=MemoryHandle(...), owner=Holder(...))"""

    board: MemoryHandle
    owner: Holder

    def open(self, link: Link) -> Host:
        return Host(link=link, board=Board(SharedMemory.attach(self.board)), owner=self.owner)


@dataclass
class Seat:
    """A searcher's place: the process that fills it now, and how its predecessors fared."""

    index: int
    process: Role[RelayedLink] | None = None
    """None while nobody fills it."""
    incarnation: str = ""
    """Name of the present process among all that ever filled a seat: group ids and leases carry it."""
    idleness: Idleness = field(default_factory=Idleness)
    """How long there has been no sign of life."""
    hung_up: bool = False
    """Whether all that the present process has ever sent was passed on."""
    failure: Failed | None = None
    """Last words of the present process."""
    failed_at: float = 0.0
    early_ends: int = 0
    """Processes in a row that ended before they had sent FEW_GROUPS groups."""
    starts_at: float = 0.0
    """When the next process may start."""
    given_up: bool = False
    """Whether too many in a row ended at once."""
    closed: bool = False
    """Whether the run goes on without it, as was asked."""

    @property
    def name(self) -> str:
        return f"searcher-{self.index}"

    @property
    def holder(self) -> str:
        return f"{self.name}.{self.incarnation}"

    @property
    def place(self) -> Place:
        if self.process is not None:
            return "filled"
        if self.closed:
            return "none"
        return "given_up" if self.given_up else "empty"
