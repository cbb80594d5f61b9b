"""The ranks of a trainer whose model is spread over several processes (train.ranks): who starts them, and how they meet.

    tba train CONFIG train.ranks=4              the trainer starts three processes on its machine
    torchrun --nproc-per-node 4 -m tba train CONFIG     torchrun has started all of them, on one machine or on several

On one machine they meet in a file, and gloo listens on the loopback device alone; under torchrun they meet where torchrun
says. Rank 0 is the trainer, whether it is a child of `tba train` or lives in this process; the others end with it. A trainer
that dies is resumed by its supervisor: its own ranks are then started anew, and those of torchrun join the new one.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from tba.config import Config, ConfigError
from tba.models.load import adapt, load_model, use_cpu
from tba.run.memory import placement_of
from tba.run.supervise import Interrupt
from tba.run.torchrun import Torchrun
from tba.runtime.links import Link
from tba.runtime.placement import threads_of
from tba.runtime.processes import STOP_SECONDS, RoleProcess, last_lines, stop_all
from tba.runtime.role_process import INTERRUPTED
from tba.trainer.make_trainer import make_train_step
from tba.trainer.sharded import ALONE, ConnectedRanks, RankLost, Ranks, ShardedTrainStep, connected

logger = logging.getLogger("tba")

POLL_SECONDS = 0.2
"""Time between two looks for a new trainer, under torchrun."""
GLOO_DEVICE = "GLOO_SOCKET_IFNAME"
"""Variable of the environment that names the network device gloo listens on."""
INCARNATION = "tba/incarnation"
"""Key of the number of trainers that have begun, under torchrun."""


@contextmanager
def ranks_of(config: Config, logs: Path) -> Iterator[Ranks]:
    """The ranks of this trainer, which is rank 0. They wait for its commands, and end with the context."""
    if config.train.ranks == 1:
        yield ALONE
        return
    if dist.is_initialized():
        raise ConfigError(
            f"train.ranks={config.train.ranks} needs torch.distributed for itself, and this process has a process group "
            "already: end it first (torch.distributed.destroy_process_group), or start the run with `tba train`."
        )
    if (found := Torchrun.found()) is None:
        meeting: AbstractContextManager[ConnectedRanks] = _own_ranks(config, logs)
    else:
        store = found.store()
        meeting = _meeting(config, found, store, store.add(INCARNATION, 1))
    with meeting as ranks:
        # The config as it is resolved here: every rank must make the same model and optimizer (`serve`).
        ranks.tell("begin", config=config.model_dump_json())
        try:
            yield ranks
        finally:
            # With a rank lost no command arrives: own ranks are killed, those of torchrun find the connection broken.
            if not ranks.lost:
                with suppress(RankLost):
                    ranks.tell("end")


@contextmanager
def _own_ranks(config: Config, logs: Path) -> Iterator[ConnectedRanks]:
    size, seconds = config.train.ranks, config.runtime.wait_seconds
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tba-ranks-") as folder:
        file = str(Path(folder) / "meeting")
        processes: list[RoleProcess] = [
            RoleProcess(
                f"trainer-rank-{rank}",
                run_rank,
                {"file": file, "rank": rank, "size": size, "device": _device(config, rank), "wait_seconds": seconds},
                log=logs / f"trainer-rank-{rank}.log",
                threads=threads_of(config).trainer,
                forked=True,
            )
            for rank in range(1, size)
        ]
        try:
            store = dist.FileStore(file, size)
            device = torch.device(_device(config, 0))
            with ExitStack() as stack:
                # For the joining alone, in which gloo chooses its device.
                with _on_loopback():
                    found = connected(store, rank=0, size=size, device=device, wait_seconds=seconds)
                    ranks = stack.enter_context(found)
                yield ranks
                # `ranks_of` has sent them their last command: this waits until they are gone.
                stop_all(processes, None, timeout_seconds=STOP_SECONDS)
        except RankLost as error:
            ended = [
                f"\n{process.name} (process {process.pid}) has ended with status {process.status} (log: {process.log}, "
                f"which ends with: {last_lines(process.log, 1).strip()})"
                for process in processes
                if process.wait(1.0) and process.status
            ]
            raise RankLost(f"{error}{''.join(ended)}") from error
        finally:
            for process in processes:
                if process.alive:
                    process.kill()
                process.link.close()


def _device(config: Config, rank: int) -> str:
    devices = placement_of(config).trainer
    if devices[0] != "cpu" and torch.cuda.device_count() < config.train.ranks:
        raise ConfigError(
            f"train.ranks={config.train.ranks} needs as many GPUs, and {torch.cuda.device_count()} can be seen: lower it."
        )
    return devices[rank % len(devices)]


def run_rank(link: Link, *, file: str, rank: int, size: int, device: str, wait_seconds: float) -> None:
    store, on = dist.FileStore(file, size), torch.device(device)
    with _on_loopback(), connected(store, rank=rank, size=size, device=on, wait_seconds=wait_seconds) as ranks:
        serve(ranks, device)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """A rank that joins a process group in this context listens on the loopback device alone."""
    before = os.environ.get(GLOO_DEVICE)
    os.environ[GLOO_DEVICE] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        yield
    finally:
        del os.environ[GLOO_DEVICE]
        if before is not None:
            os.environ[GLOO_DEVICE] = before


def serve(ranks: ConnectedRanks, device: str) -> None:
    """Do what rank 0 commands, as one of the other ranks. A rank begins by loading the model, and keeps its part of it."""
    step: ShardedTrainStep | None = None
    while True:
        what, values = ranks.listen()
        if what == "end":
            return
        if what == "begin":
            config = Config.model_validate_json(values["config"])
            use_cpu(threads_of(config).trainer)
            loaded = load_model(config.model.model_copy(update={"device": device}))
            adapt(loaded, config.model, seed=config.seed)
            made = make_train_step(config, loaded, ranks)
            assert isinstance(made, ShardedTrainStep)
            step = made
        elif step is not None:
            step.follow(what, values)


# --- torchrun --------------------------------------------------------------------------------------------------------


def _meeting(
    config: Config, started: Torchrun, store: dist.Store, number: int
) -> AbstractContextManager[ConnectedRanks]:
    """The ranks of the trainer that has begun as the one with this number."""
    # Keys of its own for each trainer: a new one must not meet what a dead one has left in the store.
    return connected(
        dist.PrefixStore(f"tba/{number}", store),
        rank=started.rank,
        size=started.size,
        device=torch.device(started.device(config)),
        wait_seconds=config.runtime.wait_seconds,
    )


def join_torchrun(started: Torchrun, config: Config) -> int:
    """Main function of a process that torchrun has started as a rank other than 0. It works for one trainer after the other,
    until one comes to its end. Torchrun ends it when the trainer is not resumed. A trainer that is asked to end needs it for
    the checkpoint: Ctrl-C and its like are heeded when that trainer is gone."""
    store, joined, interrupt = started.store(), 0, Interrupt()
    with interrupt.active():
        while not interrupt.asked:
            # To add 0 is to read the number, which each new trainer raises by one (ranks_of).
            number = store.add(INCARNATION, 0)
            if number <= joined:
                time.sleep(POLL_SECONDS)
                continue
            joined = number
            try:
                with _meeting(config, started, store, number) as ranks:
                    serve(ranks, started.device(config))
                    return 0
            except RankLost as error:
                logger.warning(
                    "rank %d: the trainer is gone, or another rank; it waits for the next. %s", started.rank, error
                )
    return INTERRUPTED
