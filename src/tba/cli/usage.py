"""Calls of commands: options with numbers, and the messages about a wrong call or a command that fails."""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tba.config import Config
from tba.config.reading import abbreviates, settings_by_name, unknown_key

MOST_LINES, LONGEST_LINE = 9, 2000
"""Most lines of an error message that are shown, and most characters of a line."""
LARGEST = 2**63 - 1
"""Largest number of an option that counts: SQLite compares with none beyond."""
MEANT, TRL = "did you mean", "is TRL's name"
RENAMED = {"searchers": "scale"}
"""Commands of earlier versions: {"old": "new"}."""
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Base class of all errors in how a command was called. Typer exports none but BadParameter, and whether its base class is
click's or typer's own copy of it depends on typer's version; an error of the other one would go by uncaught."""


def number(text: str, *, kind: type[int] | type[float], least: float | None) -> float:
    """Value of an option that is a number; `least` is the smallest that is allowed."""
    try:
        # float() takes nan, which compares with nothing: it is refused as a text is.
        value: float = kind(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        what, example = ("whole number", "100") if kind is int else ("number", "0.5 or 1e-5")
        raise typer.BadParameter(f"{text!r} is not a {what}: write one, for example {example}.")
    if least is not None and value < least:
        raise typer.BadParameter(f"{value:g} is below {least:g}: write {least:g} or more.")
    if kind is int and value > LARGEST:
        raise typer.BadParameter(f"{value} is beyond {LARGEST}: write a smaller one.")
    return value


def number_option(text: str, *, kind: type[int] | type[float] = float, least: float | None = None) -> Any:
    """An option with a number. The parser is ours, because typer's own message leaves the value out."""
    metavar = "INTEGER" if kind is int else "NUMBER"
    return typer.Option(parser=partial(number, kind=kind, least=least), metavar=metavar, help=text)


RunFolderArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
TargetArgument = Annotated[
    str, typer.Argument(metavar="MODEL_OR_RUN", help="A run folder, a checkpoint of one, a model folder or a hub name.")
]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value overrides.")]


class Command(TyperCommand):
    """A command that refuses an option which is given twice, where click would take the last one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # The parser's third result is the order of parameters as they were given, each time anew.
        given = self.make_parser(ctx).parse_args(list(args))[2]
        for option in dict.fromkeys(given):
            if given.count(option) > 1 and not option.multiple and option.nargs == 1:
                raise typer.BadParameter(f"{option.opts[0]} is given twice: keep one of them.", ctx)
        return super().parse_args(ctx, args)


class Commands(TyperGroup):
    """The commands of `tba`; a wrong one is answered with the nearest and the list of all."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            known = self.list_commands(ctx)
            hint = nearest(args[0], {name: name for name in known})
            for command in filter(None, (self.get_command(ctx, name) for name in known)):
                if any(f"--{args[0]}" in option.opts for option in command.params):
                    hint = f": {MEANT} tba {command.name} --{args[0]}?"
                    break
            if args[0] in RENAMED:
                hint = f": it is called tba {RENAMED[args[0]]} now."
            raise typer.BadParameter(f"there is no command {args[0]}{hint} Commands are {', '.join(known)}.", ctx)
        return super().resolve_command(ctx, args)


def log_warnings() -> None:
    # Logging's handler of last resort writes to sys.stderr as it is at the time. While a live display is on, that stream
    # prints above it; a line that is written past it is lost under the display.
    handler, form = logging.lastResort, "%(levelname)s %(name)s: %(message)s"
    assert handler is not None
    # force: libraries that were imported before may have installed handlers.
    logging.basicConfig(level=logging.WARNING, format=form, handlers=[handler], force=True)


def exit_status(action: Callable[[], Any]) -> int:
    """Do something; errors that the user can mend are printed without a traceback."""
    try:
        try:
            os.getcwd()
        except FileNotFoundError:  # no path would be found from a folder that has been deleted
            raise ValueError("the working folder has been deleted: cd into one that is there.") from None
        # Typer runs with standalone_mode=False, so its errors arrive here as exceptions.
        status = action()
    # 2 = a mistake that the user can mend, as in click; 128 + 2 = stopped by Ctrl-C, as in shells.
    except UsageError as error:
        typer.echo(usage_message(error), err=True)
        return 2
    except KeyboardInterrupt as stopped:
        typer.echo(f"tba: {stopped or 'stopped.'}", err=True)
        return 128 + signal.SIGINT
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if os.environ.get("TBA_TRACEBACK"):
            raise
        typer.echo(f"tba: {bounded(str(error) or type(error).__name__)}", err=True)
        return 2
    return status if isinstance(status, int) else 0


def bounded(message: str) -> str:
    """A message that fits a screen: the text of an error may come from a user's code or from a log."""
    lines = message.splitlines()
    kept = [line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..." for line in lines[:MOST_LINES]]
    return "\n".join([*kept, f"({len(lines) - MOST_LINES} more lines)"] if len(lines) > MOST_LINES else kept)


def usage_message(error: Any) -> str:
    """One line about a wrong call: what is wrong, the value, what is allowed, and what to write instead."""
    context, option, parameter = error.ctx, getattr(error, "option_name", None), getattr(error, "param", None)
    command = context.command_path if context is not None else "tba"
    # By attributes: click's error classes cannot be imported reliably, see UsageError.
    if option is not None and context is not None and option not in option_names(context):
        return f"{command}: {unknown_option(option, context)}"
    if hasattr(error, "param_type"):  # only where a required argument or option was left out
        needed = [argument_text(other) for other in context.command.params if other.required]
        return f"{command}: {argument_text(parameter)} is missing: write `{' '.join([command, *needed])}`."
    if parameter is not None:
        return f"{command}: {parameter.opts[0]}: {error.message}"
    return f"{command}: {error.message.rstrip('.')}. See `{command} --help`."


def trl_message(name: str) -> str | None:
    """What to write for a name of TRL's, or one that resembles it: `num_generations is TRL's name: use
    train.samples_per_prompt`; None = TRL has none, or we have it too."""
    from tba.config.trl_names import REFUSED, SETTINGS

    known = name if name in SETTINGS | REFUSED else None
    known = known or next((other for other in SETTINGS if abbreviates(name, other)), None)
    if known is None or name in settings_by_name():
        return None
    answer = (SETTINGS | REFUSED)[known].removeprefix("= ")
    if known in SETTINGS and re.split(r"\W", answer)[0] in Config.model_fields:
        answer = f"use {re.split('[;:,]', answer)[0]}"  # how a script's value becomes the setting's follows
    return f"{known} {TRL}: {answer}."


def with_trl_names(message: str, unknown: Sequence[str]) -> str:
    """A message about unknown keys, by TRL's names where the key is one, or resembles one and no setting of ours."""
    lines = message.split("\n")
    for key in unknown:
        name, begin = key.rpartition(".")[2], f"unknown key {key}: "
        answer = trl_message(name)
        # An exact name of TRL's beats a guess among ours; a resembling one does not.
        exact = answer is not None and answer.startswith(f"{name} ")
        lines = [
            f"{begin}{answer}" if answer and line.startswith(begin) and (exact or MEANT not in line) else line
            for line in lines
        ]
    return "\n".join(lines)


def unknown_option(option: str, context: Any) -> str:
    """What to write instead of an option that does not exist: the nearest option or setting, then all that is allowed."""
    options, name = option_names(context), option.lstrip("-").replace("-", "_")
    hint, also = nearest(name, {known.lstrip("-").replace("-", "_"): known for known in options}), ""
    if any(parameter.name == name for parameter in context.command.params):
        hint = f": write `{context.command_path} {name.upper()}`."
    if any(parameter.name in ("arguments", "overrides") for parameter in context.command.params):
        also = "; settings are written section.key=value"
        answer = with_trl_names(unknown_key([name]), [name]).removeprefix(f"unknown key {name}").replace("?", "=...?")
        is_plural = name.removesuffix("s") in (known.lstrip("-") for known in options)
        exact = not is_plural and (name in settings_by_name() or answer.startswith(f": {name} {TRL}"))
        hint = answer if exact or (hint == "." and (MEANT in answer or TRL in answer)) else hint
    return f"there is no option {option}{hint} Options are {', '.join(options)}{also}."


def argument_text(parameter: Any) -> str:
    """What to write for an argument (RUN) or for an option with its value (--count INTEGER)."""
    name = parameter.metavar or parameter.name.upper()
    return f"{parameter.opts[0]} {name}" if parameter.opts[0].startswith("--") else name


def option_names(context: Any) -> list[str]:
    own = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    return [*own, "--help"]


def nearest(word: str, known: Mapping[str, str]) -> str:
    """`: did you mean train?`, or a full stop where no known word resembles it; `known` maps words to what to write."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f": {MEANT} {known[close[0]]}?" if close else "."
