"""Settings of the processes of a run: where roles run, their threads, their channels and their deadlines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tba.config.base import OnOff, Section


class RuntimeConfig(Section):
    """The processes of a run: their threads, their channels and their deadlines."""

    kind: Literal["local", "ray"] = "local"
    """Where roles run: local = processes of this machine; ray = actors on a Ray cluster, for which the extra `ray` is needed
    (docs/scaling.md)."""
    address: str | None = None
    """Address of the Ray cluster to join with kind=ray, as `ray start` prints it, or `auto`; None = a private one is started
    on this machine, which nobody else can reach, and ends with the run."""
    threads: int | None = Field(default=None, ge=1)
    """Number of threads that each process computes a product of matrices with; None = the cores of the machine but one,
    shared out among trainer and searchers (all cores where that gives each two threads instead of one), or all cores but one
    for a process that is alone (sync runs, evaluations); at most OMP_NUM_THREADS where that is set, otherwise 16; one for a
    role on a GPU or a Ray cluster, where a process takes up as many CPUs of its node. More threads than free cores make all
    of them slow. A trainer on a CPU computes its micro-batches side by side with so many workers, each a single thread. With
    None it has one worker for each core where it is alone or searchers have one thread, within the same limits, and
    otherwise one for each of its threads."""
    wait_seconds: float = Field(default=300.0, gt=0.0)
    """Deadline of every wait, which counts only while the awaited role does nothing, and for a sign of life: a searcher that
    shows none, also while it loads its model, is replaced, a trainer is killed and resumed. Raise it for a model that takes
    longer to load or to compile."""
    mps: Annotated[Literal["auto", "on", "off"], OnOff] = "auto"
    """Whether CUDA MPS lets roles on one GPU run side by side: auto = where a GPU is shared and it can be started. `tba
    doctor` says what it gains and risks."""

    @model_validator(mode="after")
    def _check(self) -> RuntimeConfig:
        if self.address is not None and self.kind != "ray":
            raise ValueError(
                f"runtime.address={self.address} is of a Ray cluster and needs runtime.kind=ray: set it, or leave the "
                "address out (null)."
            )
        return self
