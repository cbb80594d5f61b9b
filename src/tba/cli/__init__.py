"""The `tba` command.

tba train configs/arithmetic.yaml train.max_steps=100
tba train runs/arithmetic-tb-seed0 --resume
tba evaluate runs/arithmetic-tb-seed0 --task arithmetic
tba prepare reward_model --model BASE --pairs pairs.jsonl --output FOLDER
tba compare STUDY.yaml --quick
tba serve runs/arithmetic-tb-seed0
tba replay runs/arithmetic-tb-seed0 --min-reward 0.5 --export good.jsonl
tba status runs/arithmetic-tb-seed0
tba stop runs/arithmetic-tb-seed0
tba scale runs/arithmetic-tb-seed0 --count 3
tba config
"""

from __future__ import annotations

import typer

from tba.cli.commands import config, doctor, evaluate, merge, prepare, replay, scale, status, stop
from tba.cli.serving import serve
from tba.cli.training import compare, train
from tba.cli.usage import Command, Commands, exit_status, log_warnings
from tba.observe.files import lasting_output

app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
# In the order of `tba --help`. What a command needs it imports itself: torch takes seconds, and most need none.
for command in (train, evaluate, serve, compare, prepare, replay, status, stop, scale, merge, config, doctor):
    app.command(cls=Command)(command)


@app.callback(invoke_without_command=True)
def show_help_without_a_command(context: typer.Context) -> None:
    # Not no_args_is_help: whether that prints, raises or exits with 0 depends on typer's version.
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def main() -> None:
    """Entry point: errors the user can mend are printed without a traceback (TBA_TRACEBACK=1 shows it), exit status 2."""
    with lasting_output():  # `tba train ... | head -1` must not end the training
        run_command()


def run_command() -> None:
    log_warnings()
    # By name, because `python -m tba` would be called that in messages.
    raise SystemExit(exit_status(lambda: app(standalone_mode=False, prog_name="tba")))
