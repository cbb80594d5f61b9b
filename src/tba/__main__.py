"""The `tba` command. What the roles of a training need is being imported while the command line itself is."""

import os
import sys
from contextlib import suppress

NO_ROLES = frozenset({"--help", "--dry-run", "runtime.kind=ray"})
"""Arguments with which a training starts no roles on this machine, or none by itself."""


def open_closed_streams() -> None:
    """Lead standard streams that were closed (`2>&-`, as some daemons are started) to /dev/null. Otherwise the next file
    that is opened has their number, and gets what is printed."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null != number:
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def main() -> None:
    """Run the command line; see tba.cli."""
    open_closed_streams()
    is_later_rank = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"
    try:
        if sys.argv[1:2] == ["train"] and not NO_ROLES & set(sys.argv) and not is_later_rank:
            from tba.runtime.processes import prepare_roles  # nothing heavy comes with it

            with suppress(OSError):  # a head start: the run says in words that no process can be started
                prepare_roles()
        from tba.cli import main as run
    except KeyboardInterrupt:  # Ctrl-C during the imports, before any handler is set
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
