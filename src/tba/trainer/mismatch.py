"""Distance between searchers and trainer at one version, on generated responses: `off_policy/mismatch_kl`.

At one version a searcher's engine and the trainer should be the same policy; other kernels, another precision, a cache
or weights that did not arrive make them two. Responses carry the engine's log-probs, so one more evaluation by the
trainer, with the same version, gives their KL. Where the roles take turns, the log_pi of a batch is at hand. In an
asynchronous run a few responses are scored now and then as they arrive, if the buffers still hold the weights of their
version. The figure includes keys and values of older weights that a waiting prompt kept. observe/watches.py warns when
it rises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tba.models.policy import PolicyModel
from tba.models.weights import kl_estimate
from tba.runtime.columns import columns_of
from tba.types import Batch, TrajectoryGroup, Weights

LEAST_TOKENS = 64  # tokens below which an estimate says too little
ENOUGH_TOKENS, EVERY_STEPS = 128, 20
"""Tokens that are scored for one measurement of an asynchronous run, and optimizer steps between two. Each response costs
the trainer a forward pass, in the quickstart run 13 ms on a busy core: 1% of its time."""


def mismatch_of_batch(batch: Batch, log_pi_N: Tensor, *, step: int) -> float | None:
    """The KL, from log_pi before the update, of the responses of a batch (on the CPU) that the weights of this very step
    chose whole; None = there are too few."""
    same_N = batch.per_token(batch.sampled_PK & (batch.version_PK == step)) & batch.loss_mask_N
    same_N &= torch.isfinite(batch.policy_N)
    if int(same_N.sum()) < LEAST_TOKENS:
        return None
    return kl_estimate(batch.policy_N[same_N].numpy(), log_pi_N[same_N].float().numpy())


@dataclass
class MismatchProbe:
    policy: PolicyModel
    temperature: float  # sampling temperature of the policy in training
    published: Callable[[int], Weights | None]
    """The weights of a version as searchers got them, as long as they are kept."""
    every: int = EVERY_STEPS
    _due: int = field(default=0, init=False)  # step from which on responses are scored again
    _pairs: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list, init=False)
    """Log-probs of the responses scored since then: the engine's and the trainer's."""

    def look(self, group: TrajectoryGroup, *, step: int) -> None:
        if step < self._due:
            return
        columns = columns_of(group)
        starts, versions = columns.starts.tolist(), columns.versions.tolist()
        published = {version: self.published(version) for version in set(versions)}
        for response, spans in enumerate(columns.version_spans):
            own = slice(starts[response], starts[response] + int(columns.lengths[response]))
            # One version of the policy must have chosen it whole: one that newer weights took over has keys and values of
            # older ones in its cache, and of imports and the reference's responses the policy's log-probs are not known.
            is_whole = bool((columns.loss_mask[own] & np.isfinite(columns.policy[own])).all())
            weights = published[versions[response]]
            if not is_whole or len({version for _, version in spans}) > 1 or weights is None:
                continue
            # Scored in the trainer's thread, between two steps: no more than one measurement takes.
            if self._num_tokens < ENOUGH_TOKENS:
                log_pi = self.policy.log_probs_under(
                    weights.tensors, group.prompt.token_ids, columns.token_ids[own], temperature=self.temperature
                )
                self._pairs.append((columns.policy[own].copy(), log_pi))

    def take(self, step: int) -> float | None:
        """The KL, where enough was scored before this step; None otherwise."""
        if self._num_tokens < LEAST_TOKENS:
            return None
        engine, trainer = (np.concatenate(parts) for parts in zip(*self._pairs))
        self._pairs, self._due = [], step + self.every
        return kl_estimate(engine, trainer)

    @property
    def _num_tokens(self) -> int:
        return sum(len(engine) for engine, _ in self._pairs)
