"""Output that may vanish while a run goes on: `tba train ... | head -1`, a terminal that is closed, a log on a full disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO


class LastingStream:
    """A text stream that drops what is written once nobody takes it any more; everything else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.gone = False
        """Whether writing has failed."""

    def write(self, text: str) -> int:
        if not self.gone:
            try:
                self._stream.write(text)
            except (OSError, ValueError):
                self._give_up()
        return len(text)

    def flush(self) -> None:
        if not self.gone:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def _give_up(self) -> None:
        """Send what is still buffered nowhere: Python would try to write it once more when it ends, and fail."""
        self.gone = True
        with suppress(OSError, ValueError):
            descriptor, nowhere = self._stream.fileno(), os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting(stream: TextIO) -> TextIO:
    """The stream in a form that never raises because its reader is gone."""
    return stream if isinstance(stream, LastingStream) else LastingStream(stream)  # type: ignore[return-value]


@contextmanager
def lasting_output() -> Iterator[None]:
    """While active, nothing that is printed raises because its reader is gone."""
    with redirect_stdout(lasting(sys.stdout)), redirect_stderr(lasting(sys.stderr)):
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
