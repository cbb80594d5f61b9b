"""The rank of a process that torchrun has started, and the config for as many ranks.

Nothing here imports torch before it is asked for a device or the store: rank 0 is the supervisor of the run, which needs
none, and the trainer that it starts has imported it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tba.config import Config, ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True, kw_only=True)
class Torchrun:
    """How torchrun has started this process. Torchrun(rank=1, size=4, local_rank=1, address=("10.0.0.5", 29500))"""

    rank: int
    size: int
    local_rank: int
    address: tuple[str, int]
    """Where the ranks meet."""

    @classmethod
    def found(cls, environment: Mapping[str, str] = os.environ) -> Torchrun | None:
        """None = torchrun has not started this process."""
        # A single process under torchrun is a run like any other: it has no other ranks.
        if "TORCHELASTIC_RUN_ID" not in environment or environment.get("WORLD_SIZE", "1") == "1":
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        texts = {name: environment.get(name, "") for name in names}
        if wrong := [f"{name}={text!r}" for name, text in texts.items() if not text.isdecimal()]:
            raise ConfigError(
                f"TORCHELASTIC_RUN_ID is set, as by torchrun, but {', '.join(wrong)} is no number: start the command by "
                "torchrun, or unset TORCHELASTIC_RUN_ID."
            )
        rank, size, local_rank, port = (int(texts[name]) for name in names)
        address = (environment.get("MASTER_ADDR", "localhost"), port)
        return cls(rank=rank, size=size, local_rank=local_rank, address=address)

    def device(self, config: Config) -> str:
        """Device of this rank: the GPU with its number on its machine, where it has any."""
        if config.model.device == "cpu":
            return "cpu"
        import torch

        return f"cuda:{self.local_rank}" if torch.cuda.is_available() else "cpu"

    def store(self) -> Store:
        """Torchrun's agent has it, and it stays when a trainer dies; otherwise rank 0 has it."""
        from torch.distributed import TCPStore

        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return TCPStore(*self.address, is_master=self.rank == 0 and not by_agent, wait_for_workers=False)


def with_torchrun(config: Config, started: Torchrun | None) -> Config:
    """The config for as many ranks as torchrun has started."""
    if started is None or config.train.ranks == started.size:
        return config
    if config.train.ranks != 1:
        raise ConfigError(
            f"train.ranks={config.train.ranks}, but torchrun has started {started.size} processes: leave train.ranks unset, "
            f"start as many with --nproc-per-node, or resume a run of another number with train.ranks={started.size}."
        )
    return config.model_copy(update={"train": config.train.model_copy(update={"ranks": started.size})})
