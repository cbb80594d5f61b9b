"""Published weights: a versioned bundle of named tensors, and the canary, which says whether the engine computes with them.

A canary is a few teacher-forced tokens, whose log-probs the trainer evaluates on what it publishes and each searcher on what
it has loaded. It shows weights that never reach the engine though version and checksum (runtime/shared_weights.py) are
right.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

import numpy as np
from torch import Tensor, nn

from tba.types import Weights

CANARY_TOKENS = 64  # number of teacher-forced tokens of the canary
SAFETY_FACTOR = 5.0  # tolerance divided by the gap at version 0, where both sides surely hold the same weights
SMALLEST_GAP, LARGEST_FIRST_GAP = 1e-5, 0.1
"""Least gap assumed at version 0, in nats per token (two fp32 implementations may agree by luck), and the largest that may
be rounding: beyond it the engine computes something else."""


def check_fits(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, ignored: Collection[str] = ()
) -> None:
    """Raise unless a bundle has the tensors that a model needs, by name and shape; it may have those that are ignored."""
    unknown = [name for name in tensors if name not in shapes and name not in ignored]
    missing = [name for name in shapes if name not in tensors]
    parts = []
    if unknown:
        close = difflib.get_close_matches(unknown[0], list(shapes), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        parts.append(f"{len(unknown)} unknown names, the first {unknown[0]!r}{hint}")
    if missing:
        parts.append(f"{len(missing)} missing names, the first {missing[0]!r}")
    if parts:
        raise KeyError(
            f"weights do not fit the engine's model: {'; '.join(parts)}. Names are those of its transformers state dict."
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"weights: {name} has shape {tuple(tensors[name].shape)}, the engine's model has {shape}: load weights of "
                "the same model (and model.lora)."
            )


def make_weights(model: nn.Module, *, version: int) -> Weights:
    """The parameters that train, as they are now (views, not copies; tied tensors once), not yet published: no checksum."""
    # Views: what must outlive the next optimizer step has to be copied by its taker.
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return Weights(version=version, tensors=tensors)


class CanaryMismatch(RuntimeError):
    """The engine does not compute with the weights that were published."""


def canary_tokens(vocabulary: int, length: int) -> np.ndarray:
    """Fixed pseudo-random token ids, the same in every process."""
    # By arithmetic and not by a generator: trainer and searchers need no seed in common.
    return ((np.arange(length + 1, dtype=np.int64) * 7919 + 17) * 104729 % vocabulary).astype(np.int32)


def kl_estimate(sampled: np.ndarray, other: np.ndarray) -> float:
    """KL(p || q) in nats per token from log-probs of the same tokens under p, which sampled them, and under q: the mean of
    q/p - 1 - log(q/p). It is never negative and varies far less than -log(q/p), so that a few tokens suffice. Of tokens that
    p has not sampled, such as the canary's, it is no KL, but still a distance that is 0 only where both agree."""
    log_ratio = np.asarray(other, np.float64) - np.asarray(sampled, np.float64)
    return float(np.mean(np.expm1(log_ratio) - log_ratio))


class CanaryCheck:
    """Judges later versions by the gap at the first. An engine that still holds its first weights is caught too, once the
    trainer's canary has moved by more than two tolerances."""

    def __init__(self) -> None:
        self.tolerance = 0.0  # largest gap allowed, in nats per token; set at the first check

    def check(self, *, published: np.ndarray, computed: np.ndarray, version: int) -> float:
        """Raise unless `computed` is the canary of the published weights; returns the gap."""
        gap = float(np.mean(np.abs(np.asarray(published, np.float64) - np.asarray(computed, np.float64))))
        # Set once, at the first version: later gaps are judged by what rounding does to this pair of trainer and engine.
        if self.tolerance == 0.0:
            self.tolerance = SAFETY_FACTOR * max(min(gap, LARGEST_FIRST_GAP), SMALLEST_GAP)
        if gap > self.tolerance:
            raise CanaryMismatch(
                f"canary of version {version} differs by {gap:.3g} nats per token between trainer and searcher, tolerance "
                f"{self.tolerance:.3g}: the engine does not compute with the published weights."
            )
        return gap
