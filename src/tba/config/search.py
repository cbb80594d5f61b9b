"""Settings of the searchers: how many there are, how they visit prompts, and how they explore."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from tba.config.base import Device, Section

Devices = Annotated[tuple[Device, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""Devices, of which one may stand without a list."""


class ExploreConfig(Section):
    """Off-policy exploration, off by default: the loss keeps the training temperature and no truncation."""

    probability: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the visits to prompts that explore (the official code: 0.3)."""
    temperature: tuple[float, float] = (1.0, 1.0)
    """Range of the sampling temperature of an exploring visit."""
    reference_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the responses of every visit that the reference (the frozen start model, unless it is reset) generates,
    so that what the policy has given up is still found. They count as responses of the reference's version."""

    @model_validator(mode="after")
    def _check(self) -> ExploreConfig:
        low, high = self.temperature
        if not 0.0 < low <= high:
            raise ValueError(f"temperature=[{low}, {high}] is no range: it needs 0 < low <= high.")
        return self


class SearchConfig(Section):
    """The searchers, which visit prompts, generate responses and have them rewarded."""

    num_searchers: int | None = Field(default=None, ge=1, le=64)
    """Number of searcher processes at the start. None = 1, or 2 where all of an
    asynchronous run computes on the CPU of one machine, for models of 5M parameters and more: they keep its cores busy while
    nobody trains. Visits to prompts are
    handed out to searchers one by one, so that they can be replaced, and `tba searchers RUN --count N` can change their
    number while the run goes on."""
    devices: Devices = ()
    """Devices of the searchers, such as [cuda:1, cuda:2, cuda:3], for runtime.kind=local: searcher i uses number i, and
    where there are more searchers than devices the list begins again. Where they differ from the trainer's, weights go
    through the machine's memory. Empty = model.device."""
    samples_multiplier: float = Field(default=1.0, ge=1.0, le=100.0)
    """Factor of the responses generated at a visit: S = ceil(samples_multiplier * train.samples_per_prompt)."""
    shuffle: bool = True
    """Whether prompts are visited in random order; False = in the order of the data."""
    reward_timeout_seconds: float = Field(default=30.0, gt=0.0)
    """Deadline of a reward call for the samples of one visit; one that takes longer is killed and its samples are dropped.
    A run whose reward has never answered ends after 40 s of such calls, or one call where this is longer."""
    reward_workers: int | None = Field(default=None, ge=1, le=256)
    """Number of processes in which a searcher has its rewards called, each one visit at a time; they are started where
    visits wait for one. A reward that waits (a remote judge) wants as many as the judge answers at once, shared by the
    searchers; one that computes wants no more than there are cores. Each imports the reward's file. None = 1, or 8 where
    every reward is `async def`."""
    reward_environment: tuple[str, ...] = ()
    """Names of environment variables that rewards get although they look like secrets, such as [OPENAI_API_KEY]. All others
    that do (TOKEN, KEY, SECRET, PASSWORD, CREDENTIAL, AUTH in the name, AWS_*, AZURE_*) are kept from the processes of
    rewards."""
    explore: ExploreConfig = ExploreConfig()

    @property
    def count(self) -> int:
        """Number of searcher processes at the start; 1 where it was left open and the machine was not asked."""
        return self.num_searchers or 1
