"""`python -m tba` is the `tba` command."""

from tba.cli import main

if __name__ == "__main__":
    main()
