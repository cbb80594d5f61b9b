"""Commands that train: `tba train`, with what its arguments mean and the process that it starts, and `tba compare`."""

from __future__ import annotations

import difflib
import faulthandler
import json
import logging
import os
import re
import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tba.cli.usage import bounded, exit_status, log_warnings, number_option, with_trl_names
from tba.config import Config, ConfigError, dump_config, load_config
from tba.config.reading import is_given, refuse_two_values, settings_by_name
from tba.config.task import code_name, is_of_package
from tba.observe.files import lasting_output
from tba.observe.run_folder import holder_of, is_begun, others_entry
from tba.run.checks import TASK_NAMES, run_of


def train(
    arguments: Annotated[
        list[str] | None, typer.Argument(help="CONFIG.yaml and section.key=value overrides, in any order.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub name; same as model.path=...")] = None,
    data: Annotated[str | None, typer.Option(help="JSONL with a `prompt` column: your own problem.")] = None,
    reward: Annotated[
        list[str] | None, typer.Option(help="file.py:function, TRL's signature; may be repeated.")
    ] = None,
    environment: Annotated[
        str | None, typer.Option(help="file.py:Class that the policy talks to; same as task.environment=...")
    ] = None,
    tools: Annotated[
        list[str] | None, typer.Option(help="file.py:function that the policy may call; may be repeated.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="file.py:function that plays episodes by calls to the served policy.")
    ] = None,
    max_steps: Annotated[int | None, number_option("Same as train.max_steps=...", kind=int)] = None,
    max_seconds: Annotated[float | None, number_option("Same as train.max_seconds=...")] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue this run (config, run folder or name=...) from its last checkpoint, or from the one given.",
        ),
    ] = False,
    accept_lost_replay: Annotated[
        bool, typer.Option("--accept-lost-replay", help="With --resume: go on also where stored groups are lost.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")] = False,
) -> None:
    """Train a policy: tba train CONFIG.yaml key=value ... or tba train --model M --data D --reward R."""
    arguments, reward, tools = arguments or [], reward or [], tools or []
    talks: dict[str, Any] = {"classes": {code_name(environment): environment}} if environment else {}
    talks |= ({"tools": tools} if tools else {}) | ({"agent": agent} if agent else {})
    shortcuts = {
        "model.path": model,
        "task.data": data,
        "task.rewards": [{"function": function} for function in reward] or None,
        "task.environment": talks or None,
        "train.max_steps": max_steps,
        "train.max_seconds": max_seconds,
    }
    options = ("--model", "--data", "--reward", "--environment", "--max-steps", "--max-seconds")
    shown = (model, data, " ".join(reward) or None, environment, max_steps, max_seconds)
    refuse_two_values(
        [argument for argument in arguments if "=" in argument], dict(zip(shortcuts, zip(options, shown)))
    )
    if accept_lost_replay and not resume:
        raise ConfigError("--accept-lost-replay is for a run that goes on: write --resume too, or leave it out.")
    config = given_config(run_arguments(arguments) if resume else arguments, shortcuts)
    # From here on torch may load, which takes seconds: all that is wrong with the arguments alone was said before.
    # Under torchrun every rank runs this command: rank 0 goes on with the run, the others join it.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from tba.run.torchrun import Torchrun, with_torchrun

        started = Torchrun.found()
        if started is not None and started.rank > 0:
            if dry_run:
                raise typer.Exit(0)
            from tba.run.rank_processes import join_torchrun

            raise typer.Exit(join_torchrun(started, config))
        config = with_torchrun(config, started)
    if dry_run:
        from tba.run.memory import Machine
        from tba.run.resolve import resolve

        typer.echo(dump_config(resolve(config, None, Machine.seen())), nl=False)
        return
    from tba.run.checks import check_before_loading
    from tba.run.status import stopped_message
    from tba.run.supervise import supervise

    if config.name is None and not config.overwrite:
        config = config.model_copy(update={"name": name_to_resume(config) if resume else free_name(config)})
    check_before_loading(config, resume=resume)
    if config.observe.progress:
        typer.echo(f"{config.run_folder} {'goes on' if resume else 'starts'}", err=True)
    origin = checkpoint_among(arguments) if resume else None
    target = "tba.cli.training:run_trainer"
    # The trainer is another process (run_trainer below), which the supervisor may start again.
    status = supervise(config, resume=origin or resume, target=target, accept_lost_replay=accept_lost_replay)
    if status == 128 + signal.SIGKILL:  # by a third Ctrl-C, or for want of memory: it could say nothing
        typer.echo(f"tba: {stopped_message(config, by_command=True)}", err=True)
    raise typer.Exit(status)


def run_trainer(link: Any, *, config: Config, resume: bool | Path, accept_lost_replay: bool, host: Any) -> int:
    """The target of the trainer's process under `tba train`; returns its exit status. It writes where the command does."""
    from tba.run.start import is_retryable, train

    def run() -> int:
        try:
            # Runs in the trainer's process, with the terminal of the command.
            summary = train(config, resume=resume, accept_lost_replay=accept_lost_replay, host=host)
        except KeyboardInterrupt as stopped:
            raise KeyboardInterrupt(*(stopped.args or ["stopped before the first step: nothing was saved."])) from None
        except RuntimeError as error:
            if is_retryable(error):
                logging.getLogger("tba").error("%s", bounded(str(error)))
                return os.EX_TEMPFAIL  # the supervisor then starts another trainer
            raise
        if not config.observe.progress:
            typer.echo(json.dumps(summary))
        return 0

    log_warnings()
    # A run is asked to end in one way: a signal to all processes of a job reaches the supervisor, which passes it on once.
    # SIGINT may have been ignored from the start, as it is for a command in the background of a script.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.unregister(signal.SIGUSR1)  # stacks go to the trainer's log, not to the terminal
    with lasting_output():
        return exit_status(run)


def run_arguments(arguments: list[str]) -> list[str]:
    """Arguments of `--resume`; a run folder, a checkpoint, or a name without a config is replaced by that run's config."""
    # The first argument that is no override decides which run is meant.
    for argument in arguments:
        if "=" in argument:
            continue
        if Path(argument).is_file():
            parent = Path(argument).parent
            if Path(argument).suffix not in (".yaml", ".yml") and run_of(str(parent)) is not None:
                raise ConfigError(f"{argument} is a file: `tba train {parent} --resume` goes on from its folder.")
            continue
        path = _run_or_checkpoint(argument, arguments)
        if path is not None and (run := run_of(str(path))) is not None:
            # output and name last: the run goes on in its folder, also where that was moved since.
            others = [other for other in arguments if other != argument]
            return [_own_config(run.path), *others, f"output={run.path.parent}", f"name={run.path.name}"]
        if Path(argument).suffix not in (".yaml", ".yml"):
            refuse_setting_without_value(argument)
            lacks = " (it has no config.yaml)" if Path(argument).is_dir() else ""
            raise ConfigError(
                f"there is no run to resume in {argument}{lacks}: give the folder, the name or the config of a run, or "
                "one of its checkpoints."
            )
    # `tba train name=NAME --resume` without a config: the run's own is taken.
    if all("=" in argument for argument in arguments):
        names = [argument.removeprefix("name=") for argument in arguments if argument.startswith("name=")]
        if names and (_output(arguments) / names[-1] / "config.yaml").is_file():
            return [_own_config(_output(arguments) / names[-1]), *arguments]
    return arguments


def _own_config(run: Path) -> str:
    """The config of a run to resume. Refuses one that another user may have written: it names code that would run here."""
    if (others := others_entry(run, *run.rglob("*"))) is not None:
        raise ConfigError(
            f"{others}: the config.yaml of a run names code to run, its rewards and its model's. Look at it first, then "
            f"name it yourself: tba train {run}/config.yaml --resume output={run.parent} name={run.name}"
        )
    return str(run / "config.yaml")


def free_name(config: Config) -> str | None:
    """The name of a new run where none was given: None = NAME is free; else NAME-2, NAME-3, which is said."""
    taken = numbered_runs(config)
    if not taken:
        return None
    name = f"{config.run_name}-{max(taken) + 1}"
    typer.echo(f"{taken[max(taken)]} is there already: this run is {config.output / name}.", err=True)
    return name


def name_to_resume(config: Config) -> str | None:
    """The name of the run to go on with where none was given. Of several the user has to name one."""
    found = numbered_runs(config)
    if len(found) > 1:
        choices = " or ".join(f"`tba train {shlex.quote(str(path))} --resume`" for _, path in sorted(found.items()))
        raise ConfigError(f"{len(found)} runs have the name {config.run_name}: write {choices}.")
    return next((path.name for path in found.values()), None)


def numbered_runs(config: Config) -> dict[int, Path]:
    """Files, and folders that a run has begun or claimed, under the name of a config's run, by their number."""
    # Without a number it is run 1, so the next one is NAME-2.
    name = re.compile(re.escape(config.run_name) + r"(?:-(\d+))?")
    found = ((name.fullmatch(path.name), path) for path in config.output.glob("*"))
    return {
        int(match[1] or 1): path
        for match, path in found
        if match is not None and (path.is_file() or is_begun(path) or holder_of(path) is not None)
    }


def checkpoint_among(arguments: list[str]) -> Path | None:
    """The argument that is a checkpoint of a run: `--resume` goes on from there."""
    for argument in arguments:
        path = None if "=" in argument else _run_or_checkpoint(argument, arguments)
        # A run folder has config.yaml, a checkpoint has not.
        if path is not None and not (path / "config.yaml").is_file():
            return path.absolute()
    return None


def _run_or_checkpoint(argument: str, arguments: list[str]) -> Path | None:
    """The folder of a run, or of a checkpoint of one, that is meant: as it stands or in the output folder."""
    return next((path for path in (Path(argument), _output(arguments) / argument) if run_of(str(path))), None)


def _output(arguments: list[str]) -> Path:
    given = [argument.removeprefix("output=") for argument in arguments if argument.startswith("output=")]
    return Path(given[-1] if given else Config().output)


def given_config(arguments: list[str], shortcuts: Mapping[str, Any]) -> Config:
    """Config file (an argument without `=`), overrides (arguments with `=`) and values of shortcuts by setting, None = not
    given. Overrides win over shortcuts, shortcuts over the file."""
    files = [argument for argument in arguments if "=" not in argument]
    for argument in files:
        refuse_setting_without_value(argument)
    if len(files) > 1:
        raise ConfigError(f"one config file at a time, got {', '.join(files)}: overrides are written key=value.")
    values: dict[str, dict[str, Any]] = {}
    for setting, value in shortcuts.items():
        section, _, name = setting.partition(".")
        if value is not None:
            # Data, a reward or an environment of the user's own mean the task `custom`, unless an override names another.
            values.setdefault(section, {"name": "custom"} if section == "task" else {})[name] = value
    file, overrides = Path(files[0]) if files else None, [argument for argument in arguments if "=" in argument]
    try:
        config = load_config(file, overrides, **values)
    except ConfigError as error:
        raise ConfigError(with_trl_names(str(error), error.unknown)) from None
    # Only arithmetic and red_team have no data at all; no other registered task takes rewards.
    for option, name, without in (("--reward", "rewards", TASK_NAMES), ("--data", "data", ("arithmetic", "red_team"))):
        task, is_given_here = config.task.name, bool(values.get("task", {}).get(name))
        if is_given_here and task != "custom" and (task in without or is_of_package(task)):
            raise ConfigError(
                f"{option} is for task.name=custom, and task.name={task} has its own: leave out one of the two."
            )
    # A model of the package belongs to a task: where only the model is named, its task is meant.
    if not is_given("model.path", file, overrides, **values) or is_given("task.name", file, overrides, **values):
        return config
    from tba.run.checks import task_to_train

    task = task_to_train(config.model.path)
    typer.echo(f"{config.model.path} is trained on its own task, {task}: task.name names another.", err=True)
    return load_config(file, [*overrides, f"task.name={task}"], **values)


def refuse_setting_without_value(argument: str) -> None:
    """Refuse `train.max_steps`, `max_steps` or `train.max_steps:5` in the place of a config file."""
    key, _, value = argument.partition(":")
    section, dot, name = key.partition(".")
    settings, is_yaml = settings_by_name(), Path(argument).suffix in (".yaml", ".yml")
    if is_yaml or Path(argument).exists() or (dot and section not in Config.model_fields):
        return
    close = difflib.get_close_matches(name if dot else key, settings, n=1, cutoff=0.8)
    if close:
        meant = key if dot and name in settings else settings[close[0]]
        raise ConfigError(
            f"{argument!r} is no config file and sets nothing: an override has a value after `=`, write "
            f"{meant}={value.strip() or 'VALUE'}."
        )


def compare(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="Rows, columns, seeds and overrides.")],
    output: Annotated[Path, typer.Option(help="Folder of study folders.")] = Path("runs/studies"),
    quick: Annotated[bool, typer.Option("--quick", help="The study's `quick` section: an answer in minutes.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed runs once more.")] = False,
    wait_seconds: Annotated[float, number_option("For runs that other processes of the study have.", least=0)] = 3600.0,
) -> None:
    """A grid of training runs, then one table. Resumes; started several times, the processes share the runs. The exit
    status is 1 where some of them failed."""
    from tba.run.compare import compare as run_study

    results = run_study(study, output=output, quick=quick, retry_failed=retry_failed, wait_seconds=wait_seconds)
    if results.failures:
        count = "1 run" if len(results.failures) == 1 else f"{len(results.failures)} runs"
        typer.echo(f"tba: {count} failed: correct what they name, then --retry-failed.", err=True)
        raise typer.Exit(1)
