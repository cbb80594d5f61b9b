"""The reference: how strongly the policy is pulled to it, and resets, by which the current policy becomes the reference.

Beta is the price of a nat of KL in units of the reward. A KL is a sum over tokens and a reward is not: what a short response
hardly feels holds a long one where it began. So the whole price, beta x KL, may be bounded (objective.max_kl_penalty).

A new reference is published like weights. Stored log_ref is stale from then on: such trajectories are dropped, or their
log_ref is recomputed by a copy of the new reference. A batch never mixes references, and a learned log Z begins again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tba.config import Config
from tba.engine.contract import Scorer
from tba.replay.buffer import ReplayBuffer
from tba.runtime.channels import WeightPublisher
from tba.runtime.columns import columns_of
from tba.types import TrajectoryGroup, Weights

KL_STEPS = 8  # steps that the mean KL to the reference is over


@dataclass
class Beta:
    """Beta of each step: what the config says, and less where the KL would cost more than objective.max_kl_penalty."""

    config: Config
    kl: float = field(default=0.0, init=False)  # mean over the last steps of the KL to the reference, nats per response

    def at(self, step: int, progress: float) -> float:
        """For optimizer step `step` (0 is the first), before which `progress` (0 to 1) of the run is done."""
        beta, most = self.config.beta_at(step, progress), self.config.objective.max_kl_penalty
        return beta if most is None or beta * self.kl <= most else most / self.kl

    def follow(self, metrics: Mapping[str, float]) -> None:
        """Takes what was measured of a step, `kl`; a step without any response says nothing."""
        kl = metrics.get("kl", self.kl)
        if math.isfinite(kl):
            self.kl += (kl - self.kl) / KL_STEPS

    def state(self) -> dict[str, Any]:
        return {"kl": self.kl}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.kl = state["kl"]


@dataclass
class ReferenceResets:
    every: int  # number of optimizer steps between two resets
    publisher: WeightPublisher  # where searchers get the new reference from
    replay: ReplayBuffer
    temperature: float
    scorer: Scorer | None = None  # recomputes log_ref; None = what an earlier reference scored is dropped
    on_reset: Callable[[], None] = lambda: None  # called at a reset: what was learned about the old target starts anew
    start: Weights | None = None
    """The start model on the CPU, where a run may go back to before the first reset (observe.on_collapse=rollback)."""
    version: int = 0  # version of the weights that are the reference
    _weights: Weights | None = field(default=None, init=False)
    """The reference on the CPU, for checkpoints; None = it is still the start model."""

    def reset_if_due(self, weights: Weights) -> bool:
        if weights.version % self.every:
            return False
        self.version = weights.version
        # A copy, since the tensors are those that train.
        self._weights = on_cpu(weights)
        self.publisher.publish(weights)
        if self.scorer is None:
            self.replay.drop_reference(self.version)
        else:
            # All of the buffer is scored here, in the trainer's thread, before the next step.
            self.scorer.load(weights)
            score = partial(self.scorer.score, temperature=self.temperature)
            self.replay.recompute_reference(self.version, score)
        self.on_reset()
        return True

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "weights": self._weights}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Hand searchers, and the copy that recomputes, the reference that was saved."""
        # A process that resumes begins with the start model; one that goes back may have published another since.
        reset_before = self._weights is not None
        self.version, self._weights = state["version"], state["weights"]
        reference = self.start if self._weights is None and reset_before else self._weights
        if reference is not None:
            self.publisher.publish(reference)
            if self.scorer is not None:
                self.scorer.load(reference)

    def admit(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """A group as the buffer may take it: scored by the current reference. (An earlier one's is refused there.) A later
        reference is gone with the trainer that had it: its group is scored anew, or its responses are lost."""
        versions = columns_of(group).reference_versions
        if self.scorer is None:
            from_later = any(version > self.version for version in versions)
            return replace(group, trajectories=(), num_lost=group.num_generated) if from_later else group
        if all(version == self.version for version in versions):
            return group
        responses = [trajectory.completion.token_ids for trajectory in group.trajectories]
        log_refs = self.scorer.score([group.prompt.token_ids] * len(responses), responses, self.temperature)
        scored = (
            replace(trajectory, log_ref=log_ref, reference_version=self.version)
            for trajectory, log_ref in zip(group.trajectories, log_refs)
        )
        return replace(group, trajectories=tuple(scored))


def on_cpu(weights: Weights) -> Weights:
    """A copy that later steps do not change."""
    return replace(weights, tensors={name: tensor.to("cpu", copy=True) for name, tensor in weights.tensors.items()})
