"""Keys and values of responses that are complete for now: the turns of an episode, while its environment answers.

The request that goes on from a turn takes them, and only the answer is prefilled. They are a loan: they go when new weights
come, when memory is short, when the episode ends, and with the oldest when there are many. What was lost is computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")
TURNS_PER_SLOT = 2
"""Most turns that are kept, for each slot: as many episodes are open."""
TurnKey = tuple[str, int]
"""Id of the prompt and index of the sample."""


@dataclass(eq=False)
class KeptTurn(Generic[T]):
    """A turn: what the cache holds of it, and its tokens."""

    stored: T
    ids: np.ndarray | None = None
    """Prompt and response but for the last token, which is fed with the next turn; None = they are still on the device."""


class KeptTurns(Generic[T]):
    """The turns of one cache, the oldest first."""

    def __init__(self, most: int, release: Callable[[T], None] = lambda stored: None) -> None:
        self._most, self._release = most, release
        self._turns: OrderedDict[TurnKey, KeptTurn[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def keep(self, key: TurnKey, stored: T) -> KeptTurn[T]:
        self.drop(key)
        while len(self._turns) >= self._most:
            self.drop_oldest()
        turn = self._turns[key] = KeptTurn(stored)
        return turn

    def has(self, key: TurnKey, turn: KeptTurn[T]) -> bool:
        return self._turns.get(key) is turn

    def has_beginning(self, key: TurnKey, ids: np.ndarray) -> bool:
        """Whether a turn is kept that these tokens go on from."""
        turn = self._turns.get(key)
        return turn is not None and turn.ids is not None and np.array_equal(turn.ids, ids[: len(turn.ids)])

    def take(self, key: TurnKey, ids: np.ndarray) -> T | None:
        """Stored keys and values of the turn that these tokens go on from, which is kept no longer; None where there is
        none."""
        return self._turns.pop(key).stored if self.has_beginning(key, ids) else None

    def drop(self, key: TurnKey) -> None:
        if key in self._turns:
            self._release(self._turns.pop(key).stored)

    def drop_oldest(self, but: TurnKey | None = None) -> bool:
        """Drop the oldest turn other than that of `but` -> whether there was one."""
        key = next((key for key in self._turns if key != but), None)
        if key is None:
            return False
        self.drop(key)
        return True

    def clear(self) -> None:
        while self.drop_oldest():
            pass
