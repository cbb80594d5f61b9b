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
    what: Annotated[str, typer.Argument(help="reward_model.")],
    output: Annotated[Path, typer.Option(help="Folder for what is made.")] = Path("prepared"),
    model: Annotated[str | None, typer.Option(help="Folder or hub name of a causal LM to start as.")] = None,
    pairs: Annotated[Path | None, typer.Option(help="JSONL with `prompt`, `chosen`, `rejected`.")] = None,
    held_out: Annotated[Path | None, typer.Option(help="Pairs to measure on; else a tenth.")] = None,
    learning_rate: Annotated[float, number_option("Highest learning rate.")] = 1e-5,
    epochs: Annotated[int, count_option("Passes over the pairs.", least=1)] = 1,
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
    from tba.models.cpu import use_cpu
    from tba.tasks.tldr.train_reward import RewardTraining, train_reward_model

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
        from tba.launch.doctor import examine_model

        findings = examine_model(model)
    for what, finding in findings:
        typer.echo(f"{what:>14}  {finding}")
