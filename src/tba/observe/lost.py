"""Responses without a reward: how many a run has lost, and why, for the screen and summary.json."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("tba")

LONGEST_WORDS = 500
"""Characters of a reason that are kept."""


@dataclass
class LostResponses:
    """Counts the responses that rewards failed on. The first is told at once, then at every tenfold number: a reward that
    fails now and then must not fill the screen, and one that fails often must not go unseen."""

    generated: int = 0
    lost: int = 0
    last: str = ""
    """Why the last of them was lost."""
    _told_at: int = 1

    def count(self, *, generated: int, lost: int, why: str) -> None:
        self.generated += generated
        if not lost:
            return
        self.lost += lost
        self.last = why[:LONGEST_WORDS] or self.last
        if self.lost >= self._told_at:
            while self._told_at <= self.lost:
                self._told_at *= 10
            words = "%d of %d responses have no reward and are not trained on, the last: %s"
            logger.warning(words, self.lost, self.generated, self.last)

    def summary(self) -> dict[str, Any] | None:
        """{"responses": 48, "share": 0.5, "last": "score failed at r.py:3: KeyError: 'a'"}; None = none was lost."""
        if not self.lost:
            return None
        return {"responses": self.lost, "share": round(self.lost / max(1, self.generated), 4), "last": self.last}
