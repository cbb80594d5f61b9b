"""`tba serve`: a model, or the newest checkpoint of a run, behind OpenAI's routes."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tba.cli.usage import Overrides, TargetArgument, number_option
from tba.config import Config, ConfigError, load_config
from tba.serve import check_web

if TYPE_CHECKING:
    from tba.observe.run_folder import RunFolder

TOKEN_VARIABLE = "TBA_SERVE_TOKEN"
SETTINGS = ("model.dtype=", "model.device=", "generate.engine=", "generate.slots=", "task.chat_template_kwargs=")
"""Settings that mean something to a served model."""
MOST_SESSIONS, IDLE_SECONDS = 10_000, 3600.0
"""Most sessions that go on at once; one that no call uses for so long makes room for another."""


def serve(
    target: TargetArgument,
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond this machine a token is demanded.")
    ] = "127.0.0.1",
    port: Annotated[int, number_option("Port; 0 = any that is free.", kind=int, least=0)] = 8000,
    token: Annotated[str | None, typer.Option(help=f"Token that clients must send; else ${TOKEN_VARIABLE}.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model for clients; else MODEL_OR_RUN.")] = None,
    max_length: Annotated[
        int | None, number_option("Longest prompt and response together; else the context.", kind=int, least=2)
    ] = None,
    max_waiting: Annotated[
        int, number_option("Most responses that wait for slots; more are answered with 429.", kind=int, least=0)
    ] = 1024,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
) -> None:
    """Serve a model or a run over HTTP: OpenAI's routes, and sessions of agents. A run's newer checkpoints are loaded."""
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    check_call(host, token, overrides or [])
    config, folder, checkpoint = served_config(target, overrides or [], trust_remote_code=trust_remote_code)
    from tba.engine.make_engine import make_engine
    from tba.models.load import load_model, use_cpu
    from tba.observe.run_folder import step_of
    from tba.runtime.placement import threads_alone
    from tba.serve.checkpoints import CheckpointWatch
    from tba.serve.driver import Driver
    from tba.serve.server import open_socket, run_server
    from tba.serve.service import Service
    from tba.serve.sessions import Sessions

    address = open_socket(host, port)  # a port that is taken shows before a model is loaded
    use_cpu(threads_alone(config))
    loaded = load_model(config.model)
    length = min(max_length or loaded.context, loaded.context)
    version = 0 if checkpoint is None else step_of(checkpoint)
    engine = make_engine(
        loaded.model, loaded.tokenizer, config.generate, seed=0, max_length=length, version=version, explores=True
    )
    driver = Driver(engine, max_waiting=max_waiting)
    sessions = Sessions(most=MOST_SESSIONS, idle_seconds=IDLE_SECONDS)
    template = config.task.chat_template_kwargs
    service = Service(driver, loaded.tokenizer, sessions, name=name or target, token=token, template=template)
    watch = None
    if folder is not None and checkpoint is not None and folder.path == Path(target):
        dtype = str(loaded.model.dtype).removeprefix("torch.")  # auto would be another one on the CPU, where it is read
        watch = CheckpointWatch(folder, checkpoint, config.model.model_copy(update={"dtype": dtype}), driver.load)
        watch.start()
    place, listening = address.getsockname()[:2]
    shown = f"[{place}]" if ":" in place else place
    what = f"{service.name} (version {version}, {length} tokens, {engine.slots} slots)"
    typer.echo(f"serving {what} at http://{shown}:{listening}/v1")
    try:
        run_server(service, address)
    finally:
        if watch is not None:
            watch.close()
        driver.close()


def check_call(host: str, token: str | None, overrides: list[str]) -> None:
    """Refuse what cannot be served, before torch is imported."""
    check_web("tba serve")
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} lets other machines in, and without a token everyone on them: set {TOKEN_VARIABLE}, or give "
            "--token."
        )
    if other := [override for override in overrides if not override.startswith(SETTINGS)]:
        known = ", ".join(setting.rstrip("=") for setting in SETTINGS)
        raise ConfigError(f"{other[0]} means nothing to a served model: settings are {known}.")


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name may be anyone's
        return False


def served_config(
    target: str, overrides: list[str], *, trust_remote_code: bool
) -> tuple[Config, RunFolder | None, Path | None]:
    """The config of what is served, with the run that it is of and the checkpoint; None for a model that is of no run.

    Code that comes with a model runs only where this command says so: the run's own setting does not count, as its folder
    may be a stranger's.
    """
    from tba.run.checks import check_evaluated, run_of

    check_evaluated(target)
    folder, checkpoint = run_of(target), None
    if folder is not None:
        checkpoint = folder.newest_checkpoint() if folder.path == Path(target) else Path(target)
    trusted = f"model.trust_remote_code={str(trust_remote_code).lower()}"
    path = f"model.path={checkpoint or target}"
    config = load_config(None if folder is None else folder.config, [*overrides, path, trusted])
    return config, folder, checkpoint
