"""A command in a terminal of its own, and what is on its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from commands import Command, heed_signals


class Terminal(Command):
    """A command that runs in a pseudo terminal. `typed("\\x03")` presses Ctrl-C."""

    def __init__(self, command: Sequence[str], *, columns: int = 80, kind: str = "xterm") -> None:
        # The other end stays open: without anybody there nothing can be read, and the process is yet to open it.
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self._bytes = b""
        started = ["/usr/bin/env", f"TERM={kind}", *command]
        super().__init__(started, captured=(), prepare=partial(take_terminal, os.ttyname(self._slave)))
        threading.Thread(target=self._take, daemon=True).start()

    def typed(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    @property
    def written(self) -> str:
        """All that was written so far, with its control sequences."""
        return self._bytes.decode(errors="replace")

    @property
    def screen(self) -> str:
        return rendered(self.written)

    def _take(self) -> None:
        with suppress(OSError):  # nobody has the other end any more
            while True:
                self._bytes += os.read(self._master, 65536)
        os.close(self._master)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        os.close(self._slave)


def take_terminal(name: str) -> None:
    """Called in the new process, which leads a session: the terminal that it opens becomes its own."""
    terminal = os.open(name, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(terminal, stream)
    heed_signals()


def rendered(text: str) -> str:
    """What a screen shows of it in the end: rich moves the cursor up, and clears lines."""
    lines: list[list[str]] = [[]]
    row = column = 0
    for number, action, character in re.findall(r"\x1b\[([0-9;?]*)([a-zA-Z])|(.)", text, re.DOTALL):
        if action == "A":
            row = max(0, row - int(number or 1))
        elif action == "K" and number == "2":
            lines[row] = []
        elif character == "\n":
            row += 1
            lines += [[] for _ in range(row + 1 - len(lines))]
        elif character == "\r":
            column = 0
        elif character not in ("", "\x1b"):
            lines[row] += [" "] * (column + 1 - len(lines[row]))
            lines[row][column] = character
            column += 1
    return "\n".join("".join(line).rstrip() for line in lines)
