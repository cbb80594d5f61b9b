"""All commands but those that train: for a run that is there or goes on, and for what comes before one."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from tba.cli.usage import Overrides, RunFolderArgument, TargetArgument, number_option
from tba.config import ConfigError
from tba.config.reading import refuse_two_values
from tba.models.paths import check_there


def evaluate(
    target: TargetArgument,
    overrides: Overrides = None,
    task: Annotated[
        str | None, typer.Option(help="Task; a run folder and a model of the package know their own.")
    ] = None,
    num_prompts: Annotated[int | None, number_option("Held-out prompts.", kind=int)] = None,
    samples: Annotated[int | None, number_option("k of pass@k and avg@k; 0 = greedy accuracy only.", kind=int)] = None,
    responses: Annotated[
        Path | None, typer.Option(help="Write all responses to this file, a JSON line a prompt.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Such a file of another model: also show the paired difference to it.")
    ] = None,
) -> None:
    """The task's metrics on held-out prompts: greedy accuracy (pass@k and avg@k with --samples k), win rate, or success."""
    from tba.run.checks import check_evaluated, collapse_message, task_to_evaluate

    # Checks in order of cost: torch is imported below, once all arguments are known to be good.
    check_evaluated(target)
    values = list(overrides or [])
    options = {
        "task.name": ("--task", task),
        "evaluate.num_prompts": ("--num-prompts", num_prompts),
        "evaluate.samples_per_prompt": ("--samples", samples),
    }
    # Later values win in a config: an option and an override of one key would hide each other.
    refuse_two_values(values, options)
    values += [f"{key}={value}" for key, (_, value) in options.items() if value is not None]
    own_task = task_to_evaluate(target, values)
    if against is not None and responses is None:
        raise typer.BadParameter("--against needs --responses FILE, where the responses of this model are kept.")
    if against is not None and responses is not None and against.resolve() == responses.resolve():
        raise typer.BadParameter(f"--responses would overwrite {against}, which is compared with: give another file.")
    from tba.run import evaluate_model
    from tba.tasks.evaluation import paired_differences, read_responses, responses_file

    if own_task is not None:
        typer.echo(f"{target} is evaluated on its own task, {own_task}: --task names another.", err=True)
    if (warning := collapse_message(target)) is not None:
        typer.echo(warning, err=True)
    if against is not None:
        read_responses(against)  # says now what is wrong with it
    with ExitStack() as stack:
        keep = None if responses is None else stack.enter_context(responses_file(responses))
        found: dict[str, Any] = dict(evaluate_model(target, values, keep=keep))
    if responses is not None and against is not None:
        # It is read back from the file under its own name.
        found["against"] = {"file": str(against), **paired_differences(responses, against)}
    typer.echo(json.dumps(found))


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a snapshot of its replay.sqlite.")],
    prompt: Annotated[str | None, typer.Option(help="Only groups of the prompt with this id.")] = None,
    min_reward: Annotated[float | None, number_option("Only groups whose mean reward is at least this.")] = None,
    max_reward: Annotated[float | None, number_option("Only groups whose mean reward is at most this.")] = None,
    version: Annotated[str | None, typer.Option(help="Only groups of this version, or of a range: 10:20.")] = None,
    since: Annotated[str | None, typer.Option(help="Only groups since 2026-11-16T14:30, or 30m, 2h, 1d ago.")] = None,
    until: Annotated[str | None, typer.Option(help="Only groups until then.")] = None,
    limit: Annotated[
        int | None, number_option("Most groups, the newest; a listing shows 20.", kind=int, least=0)
    ] = None,
    export: Annotated[Path | None, typer.Option(help="FILE.jsonl (for replay.imports) or FILE.parquet.")] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="For --export: run Python code that comes with the run's tokenizer."),
    ] = False,
) -> None:
    """List the groups that a run has stored, or export their responses."""
    from tba.run import export_groups as exporting

    # A ValueError of a parser becomes a usage error that names the option.
    def parsed(name: str, parse: Any, text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise typer.BadParameter(f"{name}: {error}") from None

    wanted = exporting.GroupFilter(
        prompt=prompt,
        rewards=(min_reward, max_reward),
        versions=parsed("--version", exporting.parse_versions, version) or (None, None),
        times=(parsed("--since", exporting.parse_time, since), parsed("--until", exporting.parse_time, until)),
        limit=exporting.SHOWN_GROUPS if limit is None and export is None else limit,
    )
    path = exporting.database_of(run)
    if export is None:
        for line in exporting.table(path, wanted):
            typer.echo(line)
        return
    decode = exporting.decoder_of_run(run, trust_remote_code=trust_remote_code)
    count = exporting.export(path, export, wanted, decode=decode)
    typer.echo(json.dumps({"responses": count, "file": str(export)}))


def status(
    run: RunFolderArgument,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Show the roles of a run: their states, since when, and their waits."""
    from tba.run.status import describe, read_status

    found = read_status(run)
    print(json.dumps(found) if as_json else describe(found))


def stop(run: RunFolderArgument) -> None:
    """Ask a run to save and end, as Ctrl-C does."""
    from tba.run.status import stop_run

    found = stop_run(run)
    print(f"asked process {found['pid']} to save and end at step {found['step']}.")


def scale(
    run: RunFolderArgument,
    count: Annotated[int, number_option("Searchers to go on with.", kind=int, least=1)],
) -> None:
    """Change the number of searchers of a run while it goes on."""
    from tba.run.status import ask_for_searchers

    ask_for_searchers(run, count)
    print(f"asked for {count} searcher{'s' if count > 1 else ''}.")


def merge(
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER_OR_RUN", help="A LoRA checkpoint, or the run that made it.")
    ],
    output: Annotated[Path, typer.Argument(help="Folder for the whole model.")],
) -> None:
    """Write base model + LoRA adapter as one model that transformers and vLLM load."""
    from tba.run import merge_adapter

    typer.echo(json.dumps(merge_adapter(adapter, output)))


def prepare(
    what: Annotated[str, typer.Argument(help="reward_model.")],
    output: Annotated[Path, typer.Option(help="Folder for what is made.")] = Path("prepared"),
    model: Annotated[str | None, typer.Option(help="Folder or hub name of a causal LM to start as.")] = None,
    pairs: Annotated[Path | None, typer.Option(help="JSONL with `prompt`, `chosen`, `rejected`.")] = None,
    held_out: Annotated[Path | None, typer.Option(help="Pairs to measure on; else a tenth.")] = None,
    learning_rate: Annotated[float, number_option("Highest learning rate.")] = 1e-5,
    epochs: Annotated[int, number_option("Passes over the pairs.", kind=int, least=1)] = 1,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Leave out pairs that cannot be used.")
    ] = False,
) -> None:
    """Train a reward model on your preference pairs."""
    if what != "reward_model":
        raise ConfigError(
            f"{what!r} has nothing to prepare: it may be reward_model. In a clone, `python -m recipes TASK` makes the data "
            "and models of arithmetic, tldr or red_team again."
        )
    if model is None or pairs is None:
        raise ConfigError("tba prepare reward_model needs --model (a causal language model) and --pairs PAIRS.jsonl.")
    from tba.models.load import use_cpu
    from tba.tasks.tldr.reward_model import RewardTraining, train_reward_model

    use_cpu()
    settings = RewardTraining(
        learning_rate=learning_rate,
        epochs=epochs,
        pairs_per_pass=8,
        on_bad_row="skip" if skip_bad_rows else "stop",
    )
    typer.echo(json.dumps(train_reward_model(model, pairs, output, settings, held_out=held_out)))


def config(
    word: Annotated[str | None, typer.Argument(help="A section (train) or a word to look for (length).")] = None,
) -> None:
    """Print every setting with its type, default and meaning, as Markdown; with a WORD those of a section, or about it."""
    from tba.config.settings_page import reference, search
    from tba.objectives.registry import OBJECTIVES

    if word is None:
        typer.echo(reference(OBJECTIVES), nl=False)
    elif found := search(OBJECTIVES, word):
        typer.echo("\n".join(found))
    else:
        raise ConfigError(f"no setting has {word!r} in its name or text: `tba config` prints all of them.")


def doctor(
    model: Annotated[str | None, typer.Argument(help="A model: how it would run, without loading its weights.")] = None,
) -> None:
    """Show this machine: versions, cores, GPUs, memory, disk, optional packages. With a MODEL: how it would run."""
    if model is not None:
        check_there(f"{model!r} is no model", model)  # before torch is imported
    from tba.run.doctor import examine, examine_model

    findings = examine() if model is None else examine_model(model)
    for what, finding in findings:
        typer.echo(f"{what:>14}  {finding}")
