"""The training clock: the seconds that train.max_seconds counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class TrainingClock:
    """Seconds of training. It starts when the first response may be generated, stands still while a run in one process
    evaluates, and never goes back."""

    now: Callable[[], float] = time.perf_counter
    """The time of this process; a test gives its own."""
    _before: float = field(default=0.0, init=False)
    """Seconds before it was started last."""
    _since: float | None = field(default=None, init=False)
    """Time at which it was started; None = it stands still."""

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else self.now() - self._since)

    def start(self) -> None:
        """Run from now on; one that runs goes on."""
        if self._since is None:
            self._since = self.now()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still while this lasts; one that was not started stays as it is."""
        ran, self._before, self._since = self._since is not None, self.seconds, None
        try:
            yield
        finally:
            if ran:
                self.start()

    def go_on_from(self, seconds: float) -> None:
        """Add the seconds of the processes before. A run that goes back to a checkpoint has used more than that holds."""
        self._before += max(0.0, seconds - self.seconds)
