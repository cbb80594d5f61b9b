"""Groups from searchers to the trainer: a window of unacknowledged groups bounds what is on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tba.runtime.board import Row
from tba.runtime.link import Link
from tba.runtime.messages import Acknowledge
from tba.runtime.waiting import wait_until
from tba.types import TrajectoryGroup


class WindowedSender:
    """A searcher's end. Keeps each group until the trainer has stored it; waits when too many are on the way."""

    def __init__(
        self, link: Link, row: Row, *, window: int, deadline_seconds: float, handle_messages: Callable[[], None]
    ) -> None:
        self._link = link
        self._row = row
        self._window = window
        self._deadline_seconds = deadline_seconds
        self._handle_messages = handle_messages
        self._unacknowledged: dict[str, TrajectoryGroup] = {}

    def send(self, group: TrajectoryGroup) -> None:
        wait_until(
            self._has_room,
            name="channel_full",
            row=self._row,
            deadline_seconds=self._deadline_seconds,
            explain=lambda: (
                f"a searcher waited for the trainer to store its {len(self._unacknowledged)} groups on the way; "
                "the trainer does not take in groups. Raise runtime.wait_seconds if its steps take this long."
            ),
        )
        self._unacknowledged[group.id] = group
        self._link.send(group)

    def acknowledge(self, message: Acknowledge) -> None:
        for group_id in message.group_ids:
            self._unacknowledged.pop(group_id, None)

    def unacknowledged(self) -> Iterable[TrajectoryGroup]:
        """What a new trainer would have to be sent again."""
        return self._unacknowledged.values()

    def _has_room(self) -> bool:
        if len(self._unacknowledged) >= self._window:
            self._handle_messages()
        return len(self._unacknowledged) < self._window
