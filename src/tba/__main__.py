"""The `tba` command. What the roles of a training need is being imported while the command line itself is."""

import sys


def main() -> None:
    """Run the command line; see tba.cli."""
    if sys.argv[1:2] == ["train"] and not {"--help", "--dry-run"} & set(sys.argv):
        from tba.runtime.processes import prepare_roles  # nothing heavy comes with it

        prepare_roles(threads=1)  # the default; another number would need another process
    from tba.cli import main as run

    run()


if __name__ == "__main__":
    main()
