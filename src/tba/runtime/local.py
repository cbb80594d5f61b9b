"""The local runtime: searchers in processes of this machine, the trainer in the caller's."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.config import RuntimeConfig
from tba.observe.display import RoleStatus
from tba.runtime.board import Board
from tba.runtime.channels import (
    EVALUATES,
    Acknowledge,
    Evaluate,
    Evaluated,
    Failed,
    LocalWeights,
    Stop,
    Wait,
    WeightPublisher,
)
from tba.runtime.processes import RoleDied, RoleProcess, last_lines, stop_all
from tba.runtime.weight_slots import WeightSlots
from tba.types import TrajectoryGroup, Weights


class LocalRuntime:
    """Starts searchers, receives their groups, publishes weights, asks for evaluations, stops everything."""

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        num_searchers: int,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        canary: Callable[[Weights], np.ndarray],
        reference_resets: bool = False,
    ) -> None:
        self.config = config
        self.board = Board.create(num_searchers)
        device = next(iter(tensors.values())).device
        self.slots = WeightSlots.create(tensors, dtype, device=device)
        self.references = WeightSlots.create(tensors, dtype, device=device) if reference_resets else None
        """Where a new reference is published."""
        self.evaluations: list[Evaluated] = []
        """Results that have arrived and were not taken yet."""
        self.searchers: list[RoleProcess] = []
        self._canary = canary
        self._senders: dict[str, RoleProcess] = {}
        self._started_at = time.monotonic()

    def start_searchers(self, target: Callable[..., None], arguments: dict[str, Any], *, logs: Path) -> None:
        """Run `target(link, index=i, **arguments)` in a process per searcher."""
        memory = {
            "board_memory": (self.board.memory.fd, self.board.memory.num_bytes),
            "weights": self.slots.handle(),
            "references": None if self.references is None else self.references.handle(),
        }
        shared = [self.board.memory.fd, self.slots.memory.fd]
        if self.references is not None:
            shared.append(self.references.memory.fd)
        for index in range(self.board.num_searchers):
            process = RoleProcess(
                f"searcher-{index}",
                target,
                {**arguments, **memory, "index": index},
                log=logs / f"searcher-{index}.log",
                fds=tuple(shared),
                threads=self.config.threads,
                forked=True,
            )
            self.searchers.append(process)

    def drain(self) -> list[TrajectoryGroup]:
        """All groups that have arrived; raises when a searcher has died or gives no sign of life."""
        groups = []
        for process in self.searchers:
            for message in process.link.drain():
                if isinstance(message, TrajectoryGroup):
                    groups.append(message)
                    self._senders[message.id] = process
                elif isinstance(message, Evaluated):
                    self.evaluations.append(message)
                elif isinstance(message, Failed):
                    self._searcher_failed(process, message)
        self.check()
        return groups

    def acknowledge(self, group_ids: Sequence[str]) -> None:
        by_sender: dict[str, list[str]] = defaultdict(list)
        processes = {process.name: process for process in self.searchers}
        for group_id in group_ids:
            sender = self._senders.pop(group_id, None)  # none for imports, and for what was sent twice
            if sender is not None:
                by_sender[sender.name].append(group_id)
        for name, ids in by_sender.items():
            processes[name].link.send(Acknowledge(group_ids=tuple(ids)))

    def publish(self, weights: Weights) -> None:
        """Let searchers see the weights, then evaluate the canary on what lies in the slot: they check it when it comes."""
        self._publish(self.slots, weights)

    @property
    def reference_publisher(self) -> WeightPublisher | None:
        """Publishes references the same way; None where they are never reset."""
        references = self.references
        return None if references is None else LocalWeights(lambda weights: self._publish(references, weights))

    def _publish(self, slots: WeightSlots, weights: Weights) -> None:
        slots.add_canary(self._canary(slots.publish(weights.tensors, version=weights.version)))

    def evaluate(self, version: int) -> None:
        """Ask one searcher for an evaluation; the trainer does not wait for it."""
        self.searchers[EVALUATES].link.send(Evaluate(version=version))

    def take_evaluations(self) -> list[Evaluated]:
        taken, self.evaluations = self.evaluations, []
        return taken

    def check(self) -> None:
        """Raise when a searcher has ended, or has shown no sign of life for too long."""
        for index, process in enumerate(self.searchers):
            process.check()
            beat = self.board.searcher(index)["heartbeat"]
            if beat and time.monotonic() - beat > self.config.wait_seconds:
                raise RoleDied(
                    f"{process.name} (process {process.pid}) has shown no sign of life for "
                    f"{time.monotonic() - beat:.0f} s. Last lines of {process.log}:\n{last_lines(process.log)}"
                )

    def statuses(self) -> list[RoleStatus]:
        """Who does what, for the display."""
        seconds = max(1e-9, time.monotonic() - self._started_at)
        trainer = self.board.trainer
        found = [_status("trainer", trainer.wait, trainer["wait_seconds"] / seconds, 0.0)]
        for index, process in enumerate(self.searchers):
            row = self.board.searcher(index)
            found.append(_status(process.name, row.wait, row["wait_seconds"] / seconds, row["responses"] / seconds))
        return found

    def metrics(self) -> dict[str, float]:
        """What the searchers have on the board, by searcher."""
        return {
            f"searcher/{index}/{name}": self.board.searcher(index)[name]
            for index in range(self.board.num_searchers)
            for name in ("version", "groups", "responses", "tokens", "wait_seconds", "failures", "skipped")
        }

    def cursors(self) -> list[int]:
        """How far each searcher has come in its prompts."""
        return [int(self.board.searcher(index)["cursor"]) for index in range(self.board.num_searchers)]

    def stop(self) -> None:
        """End all searchers; nothing is left running. May be called more than once."""
        stop_all(self.searchers, Stop(), timeout_seconds=self.config.stop_seconds)
        self.board.memory.close()
        self.slots.memory.close()
        if self.references is not None:
            self.references.memory.close()

    def _searcher_failed(self, process: RoleProcess, message: Failed) -> None:
        process.wait(self.config.stop_seconds)
        raise RoleDied(
            f"{process.name} failed: {message.error}\nLast lines of {process.log}:\n{last_lines(process.log)}"
        )


WAITS_FOR = {
    "none": "works",
    "first_fill": "waits for the searchers' first groups",
    "replay_ratio": "waits for new responses from the searchers",
    "pace": "is ahead: waits for newer weights from the trainer, or for rewards",
    "channel_full": "waits for the trainer to take in groups",
    "durable_replay": "waits for groups to be written to the durable replay",
}


def _status(name: str, wait: Wait, waited_share: float, rate: float) -> RoleStatus:
    return RoleStatus(name=name, doing=WAITS_FOR[wait], waited_share=waited_share, responses_per_second=rate)
