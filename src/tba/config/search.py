"""Settings of the searchers: how many there are, how they visit prompts, and how they explore."""

from __future__ import annotations

import math

from pydantic import Field, model_validator

from tba.config.base import Section


class ExploreConfig(Section):
    """Off-policy exploration, off by default: the loss keeps the training temperature and no truncation."""

    probability: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the visits to prompts that explore (the official code: 0.3)."""
    temperature: tuple[float, float] = (1.0, 1.0)
    """Range of the sampling temperature of an exploring visit."""
    top_p: tuple[float, float] = (1.0, 1.0)
    """Range of the top-p of an exploring visit."""
    reference_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the responses of every visit that the reference (the frozen start model, unless it is reset) generates,
    so that what the policy has given up is still found. They count as responses of the reference's version."""

    @model_validator(mode="after")
    def _check(self) -> ExploreConfig:
        for name, (low, high), largest in (("temperature", self.temperature, math.inf), ("top_p", self.top_p, 1.0)):
            if not 0.0 < low <= high <= largest:
                raise ValueError(
                    f"{name}=[{low}, {high}] is no range: it needs 0 < low <= high"
                    f"{'' if largest == math.inf else f' <= {largest:g}'}."
                )
        return self


class SearchConfig(Section):
    """The searchers, which visit prompts, generate responses and have them rewarded."""

    num_searchers: int | None = Field(default=None, ge=1, le=64)
    """Number of searcher processes at the start. None = 1, or 2 where all of an
    asynchronous run computes on the CPU of one machine, for models of 5M parameters and more: they keep its cores busy while
    nobody trains. Visits to prompts are
    handed out to searchers one by one, so that they can be replaced, and `tba searchers RUN --count N` can change their
    number while the run goes on."""
    max_searchers: int | None = Field(default=None, ge=1, le=64)
    """Number of searchers that a run may come to where the trainer would wait for responses: beginning with num_searchers,
    one joins while it waits a tenth of its time, and one leaves where they wait for the time of more than one. None =
    num_searchers, always."""
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
    reward_memory_gb: float | None = Field(default=None, gt=0.0)
    """Memory in GiB that the process of a reward may use (private writable memory, its own processes each the same); None =
    half of the machine's or the container's. A call that needs more fails, and the process is started anew."""
    reward_environment: tuple[str, ...] = ()
    """Names of environment variables that rewards get although they look like secrets, such as [OPENAI_API_KEY]. All others
    that do (TOKEN, KEY, SECRET, PASSWORD, CREDENTIAL, AUTH in the name, AWS_*, AZURE_*) are kept from the processes of
    rewards."""
    explore: ExploreConfig = ExploreConfig()
    skip_solved_after: int | None = Field(default=None, ge=1)
    """Number of solved visits in a row after which a prompt is skipped every other epoch; None = never skipped."""
    skip_unsolved_after: int | None = Field(default=None, ge=1)
    """Number of unsolved visits in a row after which a prompt is skipped every other epoch; None = never skipped."""

    @property
    def count(self) -> int:
        """Number of searcher processes at the start; 1 where it was left open and the machine was not asked."""
        return self.num_searchers or 1

    @model_validator(mode="after")
    def _check_numbers(self) -> SearchConfig:
        if self.max_searchers is not None and self.max_searchers < self.count:
            raise ValueError(
                f"search.max_searchers={self.max_searchers} is below search.num_searchers={self.num_searchers}: raise it, "
                "or leave it out to keep their number."
            )
        return self
