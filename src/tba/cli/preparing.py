"""Commands for what comes before a run: its data and models, its settings, and the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tba.cli.usage import count_option, number_option
from tba.config import ConfigError
from tba.models.names import check_there


def prepare(
    what: Annotated[str, typer.Argument(help="arithmetic, tldr, red_team, or reward_model.")],
    output: Annotated[Path, typer.Option(help="Folder for what is made.")] = Path("prepared"),
    model: Annotated[
        str | None, typer.Option(help="reward_model: folder or hub name of a causal LM to start as.")
    ] = None,
    pairs: Annotated[Path | None, typer.Option(help="reward_model: JSONL with `prompt`, `chosen`, `rejected`.")] = None,
    held_out: Annotated[Path | None, typer.Option(help="reward_model: pairs to measure on; else a tenth.")] = None,
    learning_rate: Annotated[
        float | None, number_option("reward_model: highest learning rate; 1e-5 unless given.")
    ] = None,
    epochs: Annotated[int | None, count_option("reward_model: passes over the pairs; 1 unless given.", least=1)] = None,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="reward_model: leave out pairs that cannot be used.")
    ] = False,
) -> None:
    """Make an embedded task's data and models again, or train a reward model on your preference pairs."""
    if what != "reward_model":
        if skip_bad_rows or any(given is not None for given in (model, pairs, held_out, learning_rate, epochs)):
            raise ConfigError(f"options other than --output are for `tba prepare reward_model`, not for {what}.")
        from tba.tasks.registry import prepare_task

        typer.echo(json.dumps(prepare_task(what, output)))
        return
    if model is None or pairs is None:
        raise ConfigError("tba prepare reward_model needs --model (a causal language model) and --pairs PAIRS.jsonl.")
    from tba.models.cpu import use_cpu
    from tba.tasks.tldr.train_reward import RewardTraining, train_reward_model

    use_cpu()
    settings = RewardTraining(
        learning_rate=1e-5 if learning_rate is None else learning_rate,
        epochs=1 if epochs is None else epochs,
        pairs_per_pass=8,
        on_bad_row="skip" if skip_bad_rows else "stop",
    )
    typer.echo(json.dumps(train_reward_model(model, pairs, output, settings, held_out=held_out)))


def config(
    word: Annotated[str | None, typer.Argument(help="A section (train) or a word to look for (length).")] = None,
) -> None:
    """Print every setting with its type, default and meaning, as Markdown; with a WORD those of a section, or about it."""
    from tba.config.reference import ObjectiveEntry, reference, search
    from tba.objectives.registry import OBJECTIVES

    entries = [
        ObjectiveEntry(
            name=name,
            settings=kind,
            beta=kind.default_beta,
            beta_tokens=kind.default_beta_tokens,
            max_kl_penalty=kind.default_max_kl_penalty,
            reset_every=kind.default_reset_every,
        )
        for name, kind in OBJECTIVES.items()
    ]
    if word is None:
        typer.echo(reference(entries), nl=False)
    elif found := search(entries, word):
        typer.echo("\n".join(found))
    else:
        raise ConfigError(f"no setting has {word!r} in its name or text: `tba config` prints all of them.")


def doctor(
    model: Annotated[str | None, typer.Argument(help="A model: how it would run, without loading its weights.")] = None,
) -> None:
    """What this machine has: versions, cores, GPUs, memory, disk, optional packages. With a MODEL: how it would run."""
    if model is not None:
        check_there(f"{model!r} is no model", model)  # before torch is imported
    if model is None:
        from tba.launch.doctor import examine

        findings = examine()
    else:
        from tba.launch.model_report import examine_model

        findings = examine_model(model)
    for what, finding in findings:
        typer.echo(f"{what:>14}  {finding}")
