"""The `tba` command.

tba train configs/arithmetic.yaml train.max_steps=100
tba train runs/arithmetic-tb-seed0 --resume
tba evaluate runs/arithmetic-tb-seed0 --task arithmetic
tba prepare arithmetic --output prepared
tba compare STUDY.yaml --quick
tba replay runs/arithmetic-tb-seed0 --min-reward 0.5 --export good.jsonl
tba status runs/arithmetic-tb-seed0
tba stop runs/arithmetic-tb-seed0
tba searchers runs/arithmetic-tb-seed0 --count 3
tba config
"""

from __future__ import annotations

import difflib
import faulthandler
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tba.config import Config, ConfigError, dump_config, load_config, settings_by_name
from tba.observe.streams import lasting_output
from tba.runtime.fork_server import INTERRUPTED

MOST_LINES, LONGEST_LINE = 9, 2000
"""What is shown of an error message."""
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Base class of all errors in how a command was called. Typer exports none but BadParameter, and whether its base class is
click's or typer's own copy of it depends on typer's version; an error of the other one would go by uncaught."""


def whole_number(text: str) -> int:
    """Value of an option that counts something."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number: write one, for example 100.") from None


def number(text: str) -> float:
    """Value of an option that measures something."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number: write one, for example 0.5 or 1e-5.") from None


def count_option(text: str) -> Any:
    """An option with a whole number. The parser is ours, because typer's own message leaves the value out."""
    return typer.Option(parser=whole_number, metavar="INTEGER", help=text)


def number_option(text: str) -> Any:
    """An option with a number."""
    return typer.Option(parser=number, metavar="NUMBER", help=text)


class Commands(TyperGroup):
    """The commands of `tba`; a wrong one is answered with the nearest and the list of all."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            known = self.list_commands(ctx)
            hint = nearest(args[0], {name: name for name in known})
            raise typer.BadParameter(f"there is no command {args[0]}{hint} Commands are {', '.join(known)}.", ctx)
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.callback(invoke_without_command=True)
def show_help_without_a_command(context: typer.Context) -> None:
    # Not no_args_is_help: whether that prints, raises or exits with 0 depends on typer's version.
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command()
def train(
    arguments: Annotated[
        list[str] | None, typer.Argument(help="CONFIG.yaml and section.key=value overrides, in any order.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub name; same as model.path=...")] = None,
    data: Annotated[str | None, typer.Option(help="JSONL with a `prompt` column: your own problem.")] = None,
    reward: Annotated[
        list[str] | None, typer.Option(help="file.py:function, TRL's signature; may be repeated.")
    ] = None,
    max_steps: Annotated[int | None, count_option("Same as train.max_steps=...")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue this run (config, run folder or name=...) from its last checkpoint."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")] = False,
) -> None:
    """Train a policy: tba train CONFIG.yaml key=value ... or tba train --model M --data D --reward R."""
    config = resolve(
        run_arguments(arguments or []) if resume else arguments or [],
        model=model,
        data=data,
        reward=reward or [],
        max_steps=max_steps,
    )
    # torch loads only when it is needed
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from tba.launch.ranks import Torchrun, join_torchrun, with_torchrun

        started = Torchrun.found()
        if started is not None and started.rank > 0:
            raise typer.Exit(0 if dry_run else join_torchrun(started, config))
        config = with_torchrun(config, started)
    if dry_run:
        from tba.launch.defaults import with_objective_defaults

        typer.echo(dump_config(with_objective_defaults(config)), nl=False)
        return
    from tba.launch.checks import check_before_loading
    from tba.launch.supervise import supervise

    check_before_loading(config, resume=resume)
    raise typer.Exit(supervise(config, resume=resume, target="tba.cli:run_trainer"))


def run_trainer(link: Any, *, config: Config, resume: bool, host: Any) -> int:
    """The target of the trainer's process under `tba train`; returns its exit status. It writes where the command does."""
    from tba.launch.start import train, worth_another_try
    from tba.runtime.supervisor import TRY_AGAIN

    def run() -> int:
        try:
            summary = train(config, resume=resume, host=host.open(link))
        except RuntimeError as error:
            if worth_another_try(error):
                logging.getLogger("tba").error("%s", bounded(str(error)))
                return TRY_AGAIN
            raise
        if not config.observe.progress:
            typer.echo(json.dumps(summary))
        return 0

    log_warnings()
    # One way to be asked to end: whoever signals all processes of a job reaches the supervisor too, which passes it on once.
    # SIGINT may have been ignored from the start, as it is for a command in the background of a script.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.unregister(signal.SIGUSR1)  # stacks go to the trainer's log, not to the terminal
    with lasting_output():
        return exit_status(run)


@app.command()
def evaluate(
    target: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="A run folder, a model folder or a hub name.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value overrides.")] = None,
    task: Annotated[str | None, typer.Option(help="Task; a run folder knows its own.")] = None,
    num_prompts: Annotated[int | None, count_option("Held-out prompts.")] = None,
    samples: Annotated[int | None, count_option("k of pass@k and avg@k; 0 = greedy accuracy only.")] = None,
) -> None:
    """The task's metrics on held-out prompts: greedy accuracy (pass@k and avg@k with --samples k), win rate, or success."""
    from tba.launch.checks import check_evaluated

    check_evaluated(target)
    from tba.launch import evaluate_model

    values = list(overrides or [])
    values += [f"task.name={task}"] if task else []
    values += [f"evaluate.num_prompts={num_prompts}"] if num_prompts else []
    values += [f"evaluate.samples_per_prompt={samples}"] if samples is not None else []
    typer.echo(json.dumps(evaluate_model(target, values)))


@app.command()
def compare(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="Rows, columns, seeds and overrides.")],
    output: Annotated[Path, typer.Option(help="Folder of study folders.")] = Path("runs/studies"),
    quick: Annotated[bool, typer.Option("--quick", help="The study's `quick` section: an answer in minutes.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed runs once more.")] = False,
    wait_seconds: Annotated[float, number_option("For runs that other processes of the study have.")] = 3600.0,
    show_list: Annotated[bool, typer.Option("--list", help="Print every run with its state and stop.")] = False,
) -> None:
    """A grid of training runs, then one table. Resumes; started several times, the processes share the runs."""
    from tba.compare import compare as run_study
    from tba.compare import list_runs

    if show_list:
        for label, state in list_runs(study, output=output, quick=quick):
            typer.echo(f"{state:>8}  {label}")
        return
    run_study(study, output=output, quick=quick, retry_failed=retry_failed, wait_seconds=wait_seconds)


@app.command()
def prepare(
    what: Annotated[str, typer.Argument(help="arithmetic, tldr, red_team, or reward_model.")],
    output: Annotated[Path, typer.Option(help="Folder for what is made.")] = Path("prepared"),
    model: Annotated[
        str | None, typer.Option(help="reward_model: folder or hub name of a causal LM to start as.")
    ] = None,
    pairs: Annotated[Path | None, typer.Option(help="reward_model: JSONL with `prompt`, `chosen`, `rejected`.")] = None,
    held_out: Annotated[Path | None, typer.Option(help="reward_model: pairs to measure on; else a tenth.")] = None,
    learning_rate: Annotated[float, number_option("reward_model: highest learning rate.")] = 1e-5,
    epochs: Annotated[int, count_option("reward_model: passes over the pairs.")] = 1,
) -> None:
    """Make an embedded task's data and models again, or train a reward model on your preference pairs."""
    if what != "reward_model":
        if model is not None or pairs is not None or held_out is not None:
            raise ConfigError(f"--model, --pairs and --held-out are for `tba prepare reward_model`, not for {what}.")
        from tba.tasks.registry import prepare_task

        typer.echo(json.dumps(prepare_task(what, output)))
        return
    if model is None or pairs is None:
        raise ConfigError("tba prepare reward_model needs --model (a causal language model) and --pairs PAIRS.jsonl.")
    from tba.tasks.tldr.train_reward import RewardTraining, train_reward_model

    settings = RewardTraining(learning_rate=learning_rate, epochs=epochs, pairs_per_pass=8)
    typer.echo(json.dumps(train_reward_model(model, pairs, output, settings, held_out=held_out)))


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a snapshot of its replay.sqlite.")],
    prompt: Annotated[str | None, typer.Option(help="Only groups of the prompt with this id.")] = None,
    min_reward: Annotated[float | None, number_option("Only groups whose mean reward is at least this.")] = None,
    max_reward: Annotated[float | None, number_option("Only groups whose mean reward is at most this.")] = None,
    version: Annotated[str | None, typer.Option(help="Only groups of this version, or of a range: 10:20.")] = None,
    since: Annotated[str | None, typer.Option(help="Only groups since 2026-11-16T14:30, or 30m, 2h, 1d ago.")] = None,
    until: Annotated[str | None, typer.Option(help="Only groups until then.")] = None,
    limit: Annotated[int | None, count_option("Only the newest so many groups; a listing shows 20.")] = None,
    export: Annotated[Path | None, typer.Option(help="FILE.jsonl (for replay.imports) or FILE.parquet.")] = None,
) -> None:
    """List the groups that a run has stored, or export their responses."""
    from tba.replay import export as exporting

    def parsed(name: str, parse: Any, text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise typer.BadParameter(f"{name}: {error}") from None

    first, last = parsed("--version", exporting.parse_versions, version) or (None, None)
    wanted = exporting.GroupFilter(
        prompt=prompt,
        min_reward=min_reward,
        max_reward=max_reward,
        first_version=first,
        last_version=last,
        since=parsed("--since", exporting.parse_time, since),
        until=parsed("--until", exporting.parse_time, until),
        limit=exporting.SHOWN_GROUPS if limit is None and export is None else limit,
    )
    path = exporting.database_of(run)
    if export is None:
        for line in exporting.table(path, wanted):
            typer.echo(line)
        return
    count = exporting.export(path, export, wanted)
    typer.echo(json.dumps({"responses": count, "file": str(export)}))


@app.command()
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """What each role of a run does, since when, and what waits for what."""
    from tba.launch.operate import describe, read_status

    found = read_status(run)
    print(json.dumps(found) if as_json else describe(found))


@app.command()
def stop(run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]) -> None:
    """Ask a run to save and end, as Ctrl-C does."""
    from tba.launch.operate import stop_run

    found = stop_run(run)
    print(f"asked process {found['pid']} to save and end at step {found['step']}.")


@app.command()
def searchers(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    count: Annotated[int, count_option("Searchers to go on with.")],
) -> None:
    """Change the number of searchers of a run while it goes on."""
    from tba.launch.operate import ask_for_searchers

    ask_for_searchers(run, count)
    print(f"asked for {count} searchers.")


@app.command()
def merge(
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER_OR_RUN", help="A LoRA checkpoint, or the run that made it.")
    ],
    output: Annotated[Path, typer.Argument(help="Folder for the whole model.")],
) -> None:
    """Write base model + LoRA adapter as one model that transformers and vLLM load."""
    from tba.launch import merge_adapter

    typer.echo(json.dumps(merge_adapter(adapter, output)))


@app.command()
def config() -> None:
    """Print every setting with its type, default and meaning, as Markdown."""
    from tba.config.reference import ObjectiveEntry, reference
    from tba.objectives.registry import OBJECTIVES

    entries = [
        ObjectiveEntry(name=name, settings=kind, beta=kind.default_beta, reset_every=kind.default_reset_every)
        for name, kind in OBJECTIVES.items()
    ]
    typer.echo(reference(entries), nl=False)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(help="A model: how it would run, without loading its weights.")] = None,
) -> None:
    """What this machine has: versions, cores, GPUs, memory, disk, optional packages. With a MODEL: how it would run."""
    if model is None:
        from tba.launch.doctor import examine

        findings = examine()
    else:
        from tba.launch.model_report import examine_model

        findings = examine_model(model)
    for what, finding in findings:
        typer.echo(f"{what:>14}  {finding}")


def run_arguments(arguments: list[str]) -> list[str]:
    """Arguments of `--resume` with a run folder, or a name without a config, replaced by the config of that run."""
    given = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    output = Path(given.get("output", Config().output))
    for argument in arguments:
        if "=" in argument or Path(argument).is_file():
            continue
        folder = next((found for found in (Path(argument), output / argument) if found.is_dir()), None)
        if folder is not None and (folder / "config.yaml").is_file():
            others = [other for other in arguments if other != argument]
            return [str(folder / "config.yaml"), *others, f"output={folder.parent}", f"name={folder.name}"]
    config = output / given.get("name", "") / "config.yaml"
    if "name" in given and config.is_file() and all("=" in argument for argument in arguments):
        return [str(config), *arguments]
    return arguments


def resolve(
    arguments: list[str], *, model: str | None, data: str | None, reward: list[str], max_steps: int | None
) -> Config:
    """Config file (an argument without `=`), overrides (arguments with `=`) and the shortcuts, later ones winning."""
    files = [argument for argument in arguments if "=" not in argument]
    for argument in files:
        refuse_setting_without_value(argument)
    if len(files) > 1:
        raise ConfigError(f"one config file at a time, got {', '.join(files)}: overrides are written key=value.")
    values: dict[str, dict] = {}
    if model is not None:
        values["model"] = {"path": model}
    if data is not None or reward:
        values["task"] = {"name": "custom", "rewards": [{"function": function} for function in reward]}
        if data is not None:
            values["task"]["data"] = data
    if max_steps is not None:
        values["train"] = {"max_steps": max_steps}
    overrides = [argument for argument in arguments if "=" in argument]
    return load_config(Path(files[0]) if files else None, overrides, **values)


def refuse_setting_without_value(argument: str) -> None:
    """Refuse `train.max_steps`, `max_steps` or `train.max_steps:5` in the place of a config file."""
    key, _, value = argument.partition(":")
    section, dot, name = key.partition(".")
    settings = settings_by_name()
    if (
        Path(argument).exists()
        or Path(argument).suffix in (".yaml", ".yml")
        or (dot and section not in Config.model_fields)
    ):
        return
    close = difflib.get_close_matches(name if dot else key, settings, n=1, cutoff=0.8)
    if close:
        meant = key if dot and name in settings else settings[close[0]]
        raise ConfigError(
            f"{argument!r} is no config file and sets nothing: an override has a value after `=`, write "
            f"{meant}={value.strip() or 'VALUE'}."
        )


def main() -> None:
    """Entry point: errors the user can mend are printed without a traceback (TBA_TRACEBACK=1 shows it), exit status 2."""
    with lasting_output():  # `tba train ... | head -1` must not end the training
        run_command()


def run_command() -> None:
    log_warnings()
    # By name, because `python -m tba` would be called that in messages.
    raise SystemExit(exit_status(lambda: app(standalone_mode=False, prog_name="tba")))


def log_warnings() -> None:
    form = "%(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, stream=sys.stderr, force=True)


def exit_status(action: Callable[[], Any]) -> int:
    """Do something; errors that the user can mend are printed without a traceback."""
    try:
        status = action()
    except UsageError as error:
        typer.echo(usage_message(error), err=True)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
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
    if option is not None and context is not None and option not in option_names(context):
        return f"{command}: {unknown_option(option, context)}"
    if hasattr(error, "param_type"):  # only where a required argument or option was left out
        needed = [argument_name(other) for other in context.command.params if other.required]
        return f"{command}: {argument_name(parameter)} is missing: write `{' '.join([command, *needed])}`."
    if parameter is not None:
        return f"{command}: {parameter.opts[0]}: {error.message}"
    return f"{command}: {error.message.rstrip('.')}. See `{command} --help`."


def unknown_option(option: str, context: Any) -> str:
    """What to write instead of an option that does not exist: the nearest option or setting, then all that is allowed."""
    options = option_names(context)
    choices, also = {name: name for name in options}, ""
    if any(parameter.name in ("arguments", "overrides") for parameter in context.command.params):
        settings = {f"--{name.replace('_', '-')}": f"{key}=..." for name, key in settings_by_name().items()}
        choices, also = settings | choices, "; settings are written section.key=value"
    return f"there is no option {option}{nearest(option, choices)} Options are {', '.join(options)}{also}."


def argument_name(parameter: Any) -> str:
    return parameter.metavar or parameter.name.upper()


def option_names(context: Any) -> list[str]:
    own = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    return [*own, "--help"]


def nearest(word: str, known: Mapping[str, str]) -> str:
    """`: did you mean train?`, or a full stop where no known word resembles it; `known` maps words to what to write."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f": did you mean {known[close[0]]}?" if close else "."
