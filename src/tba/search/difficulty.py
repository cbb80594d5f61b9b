"""Which prompts teach nothing: solved at every recent visit, or at none."""

from __future__ import annotations

from collections import defaultdict


class Difficulty:
    """Counts, per prompt, visits in a row on which all samples were solved, or none was.

    A prompt beyond its limit is skipped every other epoch: it is visited again, in case the policy has changed.
    """

    def __init__(self, *, skip_solved_after: int | None = None, skip_unsolved_after: int | None = None) -> None:
        self._limits = {True: skip_solved_after, False: skip_unsolved_after}
        self._streaks: dict[str, tuple[bool, int]] = {}
        self._rested: set[str] = set()
        self.skipped: dict[str, int] = defaultdict(int)
        """By reason: `solved`, `unsolved`."""

    def record(self, prompt_id: str, solved: list[bool]) -> None:
        if not solved or any(solved) != all(solved):
            self._streaks.pop(prompt_id, None)
            return
        kind, count = self._streaks.get(prompt_id, (solved[0], 0))
        self._streaks[prompt_id] = (solved[0], count + 1 if kind == solved[0] else 1)

    def skips(self, prompt_id: str) -> bool:
        """Whether to pass over this visit; the one after it is made."""
        kind, count = self._streaks.get(prompt_id, (False, 0))
        limit = self._limits[kind]
        if limit is None or count < limit or prompt_id in self._rested:
            self._rested.discard(prompt_id)
            return False
        self._rested.add(prompt_id)
        self.skipped["solved" if kind else "unsolved"] += 1
        return True
