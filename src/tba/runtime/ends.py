"""A searcher's ends of everything that leads to the trainer, in the local runtime: the group channel, visits, weights,
requests for evaluations, signs of life. A searcher lives no longer than its trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tba.config import RuntimeConfig
from tba.runtime.board import Board, SharedMemory
from tba.runtime.channels import Stopped, wait_until
from tba.runtime.deadlines import Waiting
from tba.runtime.leases import VisitStock
from tba.runtime.links import EndsHandle, Link
from tba.runtime.weight_slots import WeightSlots
from tba.types import TrajectoryGroup

WINDOW = 64
"""Groups that a searcher may have sent and the trainer not yet stored before the searcher waits."""


class SearcherEnds:
    """The ends of searcher `index`, over its link to the trainer and shared memory."""

    def __init__(
        self,
        link: Link,
        handle: EndsHandle,
        config: RuntimeConfig,
        *,
        index: int,
        stock: int,
        note: Callable[[TrajectoryGroup], None] | None = None,
    ) -> None:
        """`stock` visits are kept at hand; `note` is told of each group whose acknowledgement arrives, None = nobody is."""
        self._link = link
        self._note = note
        self._board = Board(SharedMemory.attach(handle.board))
        self.row = self._board.searcher(index)
        self.weights = WeightSlots.attach(handle.weights)
        # None = references are never reset.
        self.references = None if handle.references is None else WeightSlots.attach(handle.references)
        self.visits = VisitStock(lambda count: link.send(("ask", count)), size=stock)
        self._config = config
        self._unacknowledged: dict[str, TrajectoryGroup] = {}
        self._asked: list[int] = []
        """Versions whose evaluation was asked for and has not begun."""

    def send(self, group: TrajectoryGroup) -> None:
        """Waits when too many groups are not stored yet."""
        wait_until(
            self._has_room,
            name="channel_full",
            row=self.row,
            deadline_seconds=self._config.wait_seconds,
            waiting=Waiting(
                waiter="a searcher",
                awaited="the trainer",
                setting="runtime.wait_seconds",
                heartbeats=lambda: {"the trainer": self.trainer_progress()},
            ),
            explain=lambda: (
                f"the trainer has not stored {len(self._unacknowledged)} groups on the way: it does not take in groups. "
                "Look at what it writes, or raise runtime.wait_seconds if its steps take this long"
            ),
            progress=self.trainer_progress,
        )
        self._unacknowledged[group.id] = group
        self._link.send(group)

    def _has_room(self) -> bool:
        if len(self._unacknowledged) >= WINDOW:
            self.handle_messages()
        return len(self._unacknowledged) < WINDOW

    def handle_messages(self) -> None:
        """Take in what has arrived; never waits. Raises Stopped when this searcher is to end. Also a sign of life, so that a
        searcher that only waits is seen to live."""
        self.row["heartbeat"] += 1
        for message in self._link.drain():
            match message:
                case ("stop", _):
                    raise Stopped
                case ("stored", group_ids):
                    for group_id in group_ids:
                        group = self._unacknowledged.pop(group_id)
                        if self._note is not None:
                            self._note(group)
                case ("visits", visits):
                    self.visits.add(visits)
                case ("evaluate", version):
                    self._asked.append(version)

    def take_asked(self, version: int) -> bool:
        """Whether an evaluation of `version` or an earlier one was asked for; all such requests count as answered."""
        reached = any(asked <= version for asked in self._asked)
        self._asked = [asked for asked in self._asked if asked > version]
        return reached

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        self._link.send(("evaluated", (version, metrics)))

    def trainer_progress(self) -> float:
        """A number that changes while the trainer works, or starts."""
        return self._board.trainer_progress()

    def trainer_waits(self) -> bool:
        """Whether the trainer waits for responses."""
        return self._board.trainer.wait in ("first_fill", "replay_ratio")

    def most_lag(self) -> float:
        """Number of versions that responses may be behind, by the length of an update."""
        return self._board.trainer["most_lag"]

    def lost_visits(self) -> int:
        """Number of visits of the run so far that brought nothing to train on."""
        return int(self._board.trainer["lost"])
