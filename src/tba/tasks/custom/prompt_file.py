"""Prompts that stay in their file: two numbers of each in memory, the rest is read when it is visited."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from itertools import compress
from pathlib import Path
from typing import overload

from tba.tasks.rows import Row, parsed_row
from tba.types import Prompt

ReadPrompt = Callable[[Row], Prompt]


class FilePrompts(Sequence[Prompt]):
    """The prompts of some lines of a JSONL file, which must not change meanwhile."""

    def __init__(self, path: Path, read: ReadPrompt) -> None:
        self._path, self._read = path, read
        self._offsets, self._lines = array("q"), array("q")
        self._file = path.open("rb")
        self._stamp = self._stamp_now()

    def append(self, row: Row) -> None:
        """A row of the file that `read` found good."""
        assert row.offset is not None, "rows of a plain file have a place to come back to"
        self._offsets.append(row.offset)
        self._lines.append(row.line)

    def keep(self, kept: Sequence[bool]) -> None:
        """Leave out the prompts for which `kept` is False."""
        self._offsets, self._lines = (array("q", compress(own, kept)) for own in (self._offsets, self._lines))

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if self._stamp_now() != self._stamp:
            raise RuntimeError(
                f"{self._path} has changed since the run began: its prompts are no longer those checked."
            )
        self._file.seek(self._offsets[index])
        line = self._lines[index]
        return self._read(parsed_row(self._file.readline(), f"{self._path} line {line}", line))

    def _stamp_now(self) -> tuple[int, int]:
        """Size and time of change. A file that replaces this one does no harm: the old one stays open."""
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns
