"""Settings of the searchers: how many there are and of which kinds, how they visit prompts, and how they explore."""

from __future__ import annotations

import math
import re
from typing import Any

from pydantic import Field, field_validator, model_validator

from tba.config.base import Device, EngineName, Section, UpdateRule

POLICY_SETTINGS = ("temperature", "max_new_tokens", "min_new_tokens")
"""Settings of `generate` that say what the policy is: the same for all searchers."""


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


class KindConfig(Section):
    """Searchers of one kind: how many, and where they differ from the others. Temperature and lengths are the policy's, and
    the same for all; a kind that explores at every visit samples at other temperatures."""

    count: int = Field(ge=1, le=64)
    """Number of searchers of this kind."""
    engine: EngineName | None = None
    """Engine that generates; None = generate.engine."""
    slots: int | None = Field(default=None, ge=1)
    """Number of responses decoded side by side; None = generate.slots or, where that is None too, by this kind's device."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """Nucleus that responses are sampled from; None = generate.top_p."""
    top_k: int | None = Field(default=None, ge=0)
    """Number of most probable tokens that responses are sampled from, 0 = all; None = generate.top_k."""
    update: UpdateRule | None = None
    """When the engine takes new weights; None = generate.update."""
    explore: ExploreConfig | None = None
    """Off-policy exploration, whole: what is not given has its default, not the run's value. None = search.explore."""
    device: Device | None = None
    """Device such as cpu or cuda:1; None = by runtime.placement, or model.device."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_the_policys(cls, values: Any) -> Any:
        given = [name for name in POLICY_SETTINGS if isinstance(values, dict) and name in values]
        for name in given:
            otherwise = "Other temperatures come by explore: {probability: 1, temperature: [LOW, HIGH]}."
            raise ValueError(
                f"{name}={values[name]} cannot be a kind's own: {', '.join(POLICY_SETTINGS)} belong to the policy, which is "
                f"one for all searchers. Set generate.{name}. {otherwise if name == 'temperature' else ''}".strip()
            )
        return values


class SearchConfig(Section):
    """The searchers, which visit prompts, generate responses and have them rewarded."""

    num_searchers: int | None = Field(default=None, ge=1, le=64)
    """Number of searcher processes at the start; with kinds it follows from them. None = 1, or 2 where all of an
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
    max_reward_failures: int = Field(default=100, ge=1)
    """Number of samples in a row without a reward that stops the run: because it failed, or because every reward was
    None."""
    explore: ExploreConfig = ExploreConfig()
    kinds: dict[str, KindConfig] = Field(default_factory=dict)
    """Kinds of searchers by name, for runs whose searchers are not all alike: `{plain: {count: 3}, wide: {count: 1, explore:
    {probability: 1, temperature: [1, 1.5]}}}`. num_searchers is then the sum of their counts. Searchers 0, 1, ... are of
    the kinds in this order, and those that join later begin the list again. Empty = all are alike."""
    skip_solved_after: int | None = Field(default=None, ge=1)
    """Number of solved visits in a row after which a prompt is skipped every other epoch; None = never skipped."""
    skip_unsolved_after: int | None = Field(default=None, ge=1)
    """Number of unsolved visits in a row after which a prompt is skipped every other epoch; None = never skipped."""

    @property
    def count(self) -> int:
        """Number of searcher processes at the start; 1 where it was left open and the machine was not asked."""
        return self.num_searchers or 1

    def kind_at(self, index: int) -> str | None:
        """Name of the kind of searcher `index`; None where all are alike."""
        names = [name for name, kind in self.kinds.items() for _ in range(kind.count)]
        return names[index % len(names)] if names else None

    @field_validator("kinds")
    @classmethod
    def _check_names(cls, kinds: dict[str, KindConfig]) -> dict[str, KindConfig]:
        for name in kinds:
            if not re.fullmatch(r"\w+", name):
                raise ValueError(
                    f"{name!r} is no name of a kind in search.kinds: use letters, digits and _, it becomes part of the "
                    "names of metrics."
                )
        return kinds

    @model_validator(mode="before")
    @classmethod
    def _count_kinds(cls, values: Any) -> Any:
        """With kinds, num_searchers is their sum."""
        kinds = values.get("kinds") if isinstance(values, dict) else None
        if not isinstance(kinds, dict) or not kinds:
            return values
        counts = [kind.count if isinstance(kind, KindConfig) else _count_of(kind) for kind in kinds.values()]
        if any(count is None for count in counts):
            return values  # their own checks say what is wrong
        total, given = sum(count or 0 for count in counts), values.get("num_searchers")
        if given not in (None, total):
            raise ValueError(
                f"search.num_searchers={given} contradicts search.kinds, which are {total} searchers in all: leave it out."
            )
        return {**values, "num_searchers": total}

    @model_validator(mode="after")
    def _check_numbers(self) -> SearchConfig:
        if self.max_searchers is not None and self.max_searchers < self.count:
            raise ValueError(
                f"search.max_searchers={self.max_searchers} is below search.num_searchers={self.num_searchers}: raise it, "
                "or leave it out to keep their number."
            )
        return self


def _count_of(kind: Any) -> int | None:
    """The count of a kind before it is checked; None = it has none."""
    count = kind.get("count") if isinstance(kind, dict) else None
    return count if type(count) is int and count >= 1 else None
