"""Published weights: a versioned bundle of named tensors, and the two checks that it arrived.

The checksum says whether the bytes are those that were published. The canary says whether the engine computes with them: a
few teacher-forced tokens whose log-probs the trainer evaluates on what it publishes and each searcher on what it has loaded.
A bundle that never reaches the engine, or reaches it wrongly, shows as a difference though checksum and version are right.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from tba.types import Weights

_ROW = 2048
"""Number of int64 values summed before they are weighted."""
ROW_BYTES = 8 * _ROW
CANARY_TOKENS = 64
"""Number of teacher-forced tokens of the canary."""
SAFETY_FACTOR = 5.0
"""Tolerance divided by the gap at version 0, where both sides surely hold the same weights."""
SMALLEST_GAP = 1e-5
"""Least gap assumed at version 0, in nats per token: two fp32 implementations may agree by luck."""
LARGEST_FIRST_GAP = 0.1
"""Largest gap at version 0, in nats per token, that may be rounding: beyond it the engine computes something else."""


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


class ChecksumMismatch(RuntimeError):
    """Weights arrived other than they were published."""


def make_weights(model: nn.Module, *, version: int) -> Weights:
    """The parameters that train, as they are now (views, not copies; tied tensors once), not yet published: no checksum."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return Weights(version=version, tensors=tensors)


def copy_all(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy each source over its target, casting: on a GPU in a few kernels for all of them, where launching one for each of
    hundreds would take longer than copying."""
    alike: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        is_plain = target.shape == source.shape and target.is_contiguous() and source.is_contiguous()
        if is_plain and target.is_cuda and source.device == target.device:
            # PyTorch copies a list at once only where all of it has the same dtypes and layout.
            own_targets, own_sources = alike.setdefault((target.dtype, source.dtype, target.device), ([], []))
            own_targets.append(target)
            own_sources.append(source)
        else:
            target.copy_(source)
    for own_targets, own_sources in alike.values():
        torch._foreach_copy_(own_targets, own_sources)


def checksum(data: Tensor) -> int:
    """Integer reduction of all bytes of a packed bundle, on its device. Sees changed values, moved rows and other tensors;
    eight bytes that trade places with others of their row of 16 KiB it does not see (the canary does)."""
    return checksum_of_rows(row_sums(data))


def row_sums(data: Tensor) -> Tensor:
    """int64 [rows]: the sum of each row of a packed bundle, or of a part of it that begins with a row; the last row may be
    shorter."""
    # Sums of int64 wrap around, alike on all devices. For those of int32 into int64 a CPU would cast all of it first: twice
    # the memory, and up to forty times as long (1 GB: .2 to .6 GB/s, so 10 to 19).
    numbers = data[: data.numel() // 8 * 8].view(torch.int64)
    whole = numbers.numel() // _ROW * _ROW
    rows = numbers[:whole].view(-1, _ROW).sum(dim=1)
    if data.numel() == 8 * whole:
        return rows
    rest = numbers[whole:].sum() + data[8 * numbers.numel() :].sum(dtype=torch.int64)
    return torch.cat([rows, rest[None]])


def checksum_of_rows(rows: Tensor) -> int:
    """The checksum of a bundle whose rows have these sums."""
    # Fletcher-like: the rows weighted by their number, so that rows out of place are seen too.
    weighted = rows * torch.arange(1, len(rows) + 1, device=rows.device)
    place_sum, plain_sum = torch.stack([weighted.sum(), rows.sum()]).tolist()
    # Rotated, not shifted: in a row of even number the highest bits show in the plain sum alone.
    plain_sum %= 2**64
    return place_sum % 2**64 ^ (plain_sum << 17 | plain_sum >> 47) % 2**64


def verify(data: Tensor, *, published: int, version: int) -> None:
    """Raise unless the bytes are what was published."""
    found = checksum(data)
    if found != published:
        raise ChecksumMismatch(
            f"weights of version {version} have checksum {found:#018x}, published was {published:#018x}: the copy is "
            "damaged; nothing was loaded."
        )


class CanaryMismatch(RuntimeError):
    """The engine does not compute with the weights that were published."""


def canary_tokens(vocabulary: int, length: int) -> np.ndarray:
    """Fixed pseudo-random token ids, the same in every process."""
    return ((np.arange(length + 1, dtype=np.int64) * 7919 + 17) * 104729 % vocabulary).astype(np.int32)


def distance(left: np.ndarray, right: np.ndarray) -> float:
    """Mean absolute difference of log-probs, in nats per token."""
    return float(np.mean(np.abs(np.asarray(left, np.float64) - np.asarray(right, np.float64))))


def kl_estimate(sampled: np.ndarray, other: np.ndarray) -> float:
    """KL(p || q) in nats per token from log-probs of the same tokens under p, which sampled them, and under q: the mean of
    q/p - 1 - log(q/p). Its expectation is that of -log(q/p), but it is never negative and varies far less, so that a few
    tokens of two policies that nearly agree tell how nearly. Of tokens that p has not sampled, such as the canary's, it is
    no KL, but still a distance that is 0 only where both agree."""
    log_ratio = np.asarray(other, np.float64) - np.asarray(sampled, np.float64)
    return float(np.mean(np.expm1(log_ratio) - log_ratio))


class CanaryCheck:
    """Judges later versions by the gap at the first.

    An engine that still holds its first weights is caught by the same bound: once the trainer's canary has moved by more
    than two tolerances, being within one of the current value and of the first value is impossible.
    """

    def __init__(self) -> None:
        self.tolerance = 0.0
        """Largest gap allowed, in nats per token; set at the first check."""

    def check(self, *, published: np.ndarray, computed: np.ndarray, version: int) -> float:
        """Raise unless `computed` is the canary of the published weights; returns the gap."""
        gap = distance(published, computed)
        if self.tolerance == 0.0:
            self.tolerance = SAFETY_FACTOR * max(min(gap, LARGEST_FIRST_GAP), SMALLEST_GAP)
        if gap > self.tolerance:
            raise CanaryMismatch(
                f"canary of version {version} differs by {gap:.3g} nats per token between trainer and searcher, tolerance "
                f"{self.tolerance:.3g}: the engine does not compute with the published weights."
            )
        return gap
