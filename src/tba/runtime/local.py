"""The local runtime: searchers in processes of this machine, the trainer in the caller's."""

from __future__ import annotations

import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.config import RuntimeConfig
from tba.observe.display import RoleStatus
from tba.runtime.board import MAX_SEARCHERS, Board
from tba.runtime.channels import (
    Acknowledge,
    AskVisits,
    Evaluate,
    Evaluated,
    Failed,
    Idleness,
    LeaseVisits,
    LocalWeights,
    Stop,
    WeightPublisher,
)
from tba.runtime.leases import VisitLedger
from tba.runtime.processes import RoleDied, RoleProcess, last_lines, stop_all
from tba.runtime.weight_slots import WeightSlots
from tba.types import TrajectoryGroup, Weights

logger = logging.getLogger("tba")

MAX_EARLY_ENDS, FEW_GROUPS = 4, 16
"""Processes in a row that may end before they have sent so many groups; a seat is given up then. A prompt that kills every
searcher is handed to the next one first, so that it does not last much longer."""
LOOK_SECONDS = 1.0
"""Time between two looks at how many searchers are asked for."""
FIRST_BACK_OFF_SECONDS = 1.0
"""Before a seat is filled again after the second such process; doubled with each."""


@dataclass
class Seat:
    """A searcher's place: the process that fills it now, and how its predecessors fared."""

    index: int
    process: RoleProcess | None = None
    """None while nobody fills it."""
    incarnation: str = ""
    """Name of the present process among all that ever filled a seat: group ids and leases carry it."""
    idleness: Idleness = field(default_factory=Idleness)
    """How long there has been no sign of life."""
    groups: int = 0
    """Groups that came from the present process."""
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


class LocalRuntime:
    """Starts searchers and replaces those that die or hang, receives their groups, hands out visits, publishes weights, asks
    for evaluations, stops everything."""

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        num_searchers: int,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        canary: Callable[[Weights], np.ndarray],
        ledger: VisitLedger,
        reference_resets: bool = False,
        asked_searchers: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`asked_searchers` tells how many searchers somebody wants the run to go on with, None = nobody has said."""
        self.config = config
        self.ledger = ledger
        self.board = Board.create(MAX_SEARCHERS)
        device = next(iter(tensors.values())).device
        self.slots = WeightSlots.create(tensors, dtype, device=device)
        self.references = WeightSlots.create(tensors, dtype, device=device) if reference_resets else None
        """Where a new reference is published."""
        self.evaluations: list[Evaluated] = []
        """Results that have arrived and were not taken yet."""
        self.seats = [Seat(index) for index in range(num_searchers)]
        self.replaced = 0
        """Searchers that were replaced so far."""
        self._groups = 0
        """Groups that came from all searchers."""
        self._forks = device.type == "cpu"
        """A GPU's driver must not have been touched before a fork, which has not been tried with all that roles import."""
        self._canary = canary
        self._senders: dict[str, RoleProcess] = {}
        self._wanted_evaluations: list[int] = []
        """Versions whose evaluation was asked for and has not come."""
        self._recipe: tuple[Callable[..., None], dict[str, Any], Path] | None = None
        self._started_at = self._looked_at = time.monotonic()
        self._asked_searchers = asked_searchers
        self._asked: int | None = None
        """Number of searchers that was asked for last."""

    def start_searchers(self, target: Callable[..., None], arguments: dict[str, Any], *, logs: Path) -> None:
        """Run `target(link, index=i, incarnation=..., **arguments)` in a process for each seat."""
        self._recipe = (target, arguments, logs)
        for seat in self.seats:
            self._fill(seat)

    def _fill(self, seat: Seat) -> None:
        assert self._recipe is not None
        target, arguments, logs = self._recipe
        logs.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
        self.board.searcher(seat.index).clear()
        seat.incarnation, seat.groups, seat.idleness = secrets.token_hex(4), 0, Idleness()
        shared = [self.board.memory.fd, self.slots.memory.fd]
        if self.references is not None:
            shared.append(self.references.memory.fd)
        seat.process = RoleProcess(
            seat.name,
            target,
            {
                **arguments,
                "index": seat.index,
                "incarnation": seat.incarnation,
                "board_memory": (self.board.memory.fd, self.board.memory.num_bytes),
                "weights": self.slots.handle(),
                "references": None if self.references is None else self.references.handle(),
            },
            log=logs / f"{seat.name}.log",
            fds=tuple(shared),
            threads=self.config.threads,
            forked=self._forks,
        )
        if self._wanted_evaluations and seat is self._evaluating_seat():
            seat.process.link.send(Evaluate(version=self._wanted_evaluations[-1]))

    def drain(self) -> list[TrajectoryGroup]:
        """All groups that have arrived. Searchers that died or hang are replaced; raises when that is of no use."""
        self.board.trainer["beats"] += 1
        ended = [seat for seat in self.seats if seat.process is not None and seat.process.ended]
        groups = [group for seat in self.seats for group in self._messages_of(seat)]
        for seat in ended:  # after their last messages were taken
            if seat.process is not None:
                self._lost(seat, f"ended (exit status {seat.process.status})")
        self._replace_silent()
        self._heed_asked()
        self._fill_empty()
        return groups

    def _heed_asked(self) -> None:
        """Look now and then whether another number of searchers is asked for."""
        if time.monotonic() - self._looked_at > LOOK_SECONDS:
            self._looked_at, asked = time.monotonic(), self._asked_searchers()
            if asked is not None and asked != self._asked:
                self._asked = asked
                self.set_searchers(asked)

    def set_searchers(self, count: int) -> None:
        """Go on with so many searchers: new ones start, those with the highest numbers end and their visits go to others."""
        for seat in self.seats[count:]:
            if seat.process is not None:
                seat.process.link.send(Stop())
            seat.closed = True
        for seat in self.seats[:count]:
            seat.closed = seat.given_up = False
        self.seats += [Seat(index) for index in range(len(self.seats), min(count, MAX_SEARCHERS))]
        self._fill_empty()
        self._hand_to_others()

    def _messages_of(self, seat: Seat) -> list[TrajectoryGroup]:
        """Groups that a searcher has sent; its other messages are dealt with."""
        groups: list[TrajectoryGroup] = []
        if seat.process is None:
            return groups
        for message in seat.process.link.drain():
            if isinstance(message, TrajectoryGroup):
                groups.append(message)
                seat.groups, self._groups = seat.groups + 1, self._groups + 1
                self._senders[message.id] = seat.process
                # Here and not later: if this searcher is lost in the same moment, its other visits are handed out again.
                self.ledger.complete(message.visit, solved=message.solved)
            elif isinstance(message, AskVisits):
                visits = tuple(self.ledger.lease(seat.holder, message.count))
                seat.process.link.send(LeaseVisits(visits=visits))
            elif isinstance(message, Evaluated):
                self.evaluations.append(message)
                self._wanted_evaluations = [asked for asked in self._wanted_evaluations if asked > message.version]
            elif isinstance(message, Failed):
                seat.process.wait(self.config.stop_seconds)
                self._lost(seat, f"failed: {message.error}", final=message.final)
                break
        return groups

    def acknowledge(self, group_ids: Sequence[str]) -> None:
        by_sender: dict[RoleProcess, list[str]] = defaultdict(list)
        for group_id in group_ids:
            sender = self._senders.pop(group_id, None)  # none for imports, and for what was sent twice
            if sender is not None:
                by_sender[sender].append(group_id)
        for process, ids in by_sender.items():
            process.link.send(Acknowledge(group_ids=tuple(ids)))  # to one that is gone it is lost, which does no harm

    def publish(self, weights: Weights) -> None:
        """Let searchers see the weights, then evaluate the canary on what lies in the slot: they check it when it comes."""
        self.board.trainer["beats"] += 1
        self._publish(self.slots, weights)

    @property
    def reference_publisher(self) -> WeightPublisher | None:
        """Publishes references the same way; None where they are never reset."""
        references = self.references
        return None if references is None else LocalWeights(lambda weights: self._publish(references, weights))

    def _publish(self, slots: WeightSlots, weights: Weights) -> None:
        slots.add_canary(self._canary(slots.publish(weights.tensors, version=weights.version)))

    def evaluate(self, version: int) -> None:
        """Ask one searcher for an evaluation; the trainer does not wait for it. If the searcher dies, another is asked."""
        self._wanted_evaluations.append(version)
        seat = self._evaluating_seat()
        if seat is not None and seat.process is not None:
            seat.process.link.send(Evaluate(version=version))

    def _evaluating_seat(self) -> Seat | None:
        return next((seat for seat in self.seats if not seat.given_up and not seat.closed), None)

    def take_evaluations(self) -> list[Evaluated]:
        taken, self.evaluations = self.evaluations, []
        return taken

    def _replace_silent(self) -> None:
        """Replace searchers that have shown no sign of life for too long."""
        for seat in self.seats:
            if seat.process is not None:
                beats = self.board.searcher(seat.index)["heartbeat"]
                setting = "wait_seconds" if beats else "start_seconds"
                limit = getattr(self.config, setting)
                if seat.idleness.look(beats) > limit:
                    what = f"(process {seat.process.pid}) has shown no sign of life for runtime.{setting}={limit:g} s"
                    # Where none has ever come up, the next would be as slow.
                    self._lost(seat, what, final=not beats and self._groups == 0)

    def _fill_empty(self) -> None:
        for seat in self.seats:
            if seat.process is None and not seat.given_up and not seat.closed and time.monotonic() >= seat.starts_at:
                self._fill(seat)

    def _lost(self, seat: Seat, what: str, *, final: bool = False) -> None:
        """A searcher is gone, or as good as: others take its visits, and another process its seat."""
        assert seat.process is not None
        process, seat.process = seat.process, None
        process.kill()
        handed_back = self.ledger.hand_back(seat.holder)
        if seat.closed:
            logger.info("%s has ended, as was asked.", seat.name)
            self._hand_to_others()
            return
        if final:
            raise RoleDied(f"{seat.name} {what} (log: {process.log})")
        words = f"{seat.name} {what}. Last lines of {process.log}:\n{last_lines(process.log)}"
        early = seat.groups < FEW_GROUPS
        seat.early_ends = seat.early_ends + 1 if early else 0
        seat.given_up = seat.early_ends > MAX_EARLY_ENDS
        if all(other.given_up or other.closed for other in self.seats):
            raise RoleDied(
                f"{words}\n{MAX_EARLY_ENDS + 1} searchers in a row ended before they had sent {FEW_GROUPS} groups."
            )
        if seat.given_up:
            logger.error("%s\nIts place stays empty: %d in a row ended early.", words, seat.early_ends)
            self._hand_to_others()
            if self._wanted_evaluations:
                self.evaluate(self._wanted_evaluations.pop())
            return
        wait = FIRST_BACK_OFF_SECONDS * 2.0 ** (seat.early_ends - 2) if seat.early_ends > 1 else 0.0
        logger.warning("%s\nIt is replaced; %d visits to prompts are handed to others.", words, handed_back)
        seat.starts_at, self.replaced = time.monotonic() + wait, self.replaced + 1

    def _hand_to_others(self) -> None:
        """Visits that were handed back go to the searchers there are, now: they may have enough of their own, all of which
        wait for steps that need just these."""
        count = self.ledger.num_handed_back
        others = [other for other in self.seats if other.process is not None and not other.closed]
        for place, other in enumerate(others):
            share = count // len(others) + (place < count % len(others))
            if share and other.process is not None:
                other.process.link.send(LeaseVisits(visits=tuple(self.ledger.lease(other.holder, share))))

    def progress(self) -> float:
        """A number that changes while any searcher works, and when one is replaced."""
        rows = [self.board.searcher(seat.index) for seat in self.seats if seat.process is not None]
        # A process that loads its model shows nothing yet; runtime.start_seconds bounds that, not the deadlines of others.
        loading = time.monotonic() if any(row["heartbeat"] == 0 for row in rows) else 0.0
        return 1e9 * self.replaced + loading + sum(row["work"] for row in rows)

    def heartbeats(self) -> dict[str, float]:
        """Signs of life so far of each searcher that runs."""
        return {
            seat.name: self.board.searcher(seat.index)["heartbeat"] for seat in self.seats if seat.process is not None
        }

    def statuses(self) -> list[RoleStatus]:
        """Who does what, for the display."""
        seconds = max(1e-9, time.monotonic() - self._started_at)
        trainer = self.board.trainer
        found = [_status("trainer", WAITS_FOR[trainer.wait], trainer["wait_seconds"] / seconds, 0.0)]
        for seat in [seat for seat in self.seats if seat.process is not None or not seat.closed]:
            row = self.board.searcher(seat.index)
            doing = WAITS_FOR[row.wait] if seat.process is not None else _why_empty(seat)
            found.append(_status(seat.name, doing, row["wait_seconds"] / seconds, row["responses"] / seconds))
        return found

    def metrics(self) -> dict[str, float]:
        """What the searchers have on the board, by searcher."""
        return {
            "searchers/alive": float(sum(seat.process is not None for seat in self.seats)),
            "searchers/replaced": float(self.replaced),
            **{
                f"searcher/{seat.index}/{name}": self.board.searcher(seat.index)[name]
                for seat in self.seats
                for name in ("version", "groups", "responses", "tokens", "wait_seconds", "failures", "mismatch_kl")
            },
        }

    def stop(self) -> None:
        """End all searchers; nothing is left running. May be called more than once."""
        processes = [seat.process for seat in self.seats if seat.process is not None]
        stop_all(processes, Stop(), timeout_seconds=self.config.stop_seconds)
        self.board.memory.close()
        self.slots.memory.close()
        if self.references is not None:
            self.references.memory.close()


WAITS_FOR = {
    "none": "works",
    "first_fill": "waits for the searchers' first groups",
    "replay_ratio": "waits for new responses from the searchers",
    "pace": "is ahead: waits for newer weights from the trainer, or for rewards",
    "channel_full": "waits for the trainer to take in groups",
    "durable_replay": "waits for groups to be written to the durable replay",
}


def _status(name: str, doing: str, waited_share: float, rate: float) -> RoleStatus:
    return RoleStatus(name=name, doing=doing, waited_share=waited_share, responses_per_second=rate)


def _why_empty(seat: Seat) -> str:
    return "has been given up" if seat.given_up else "starts again"
