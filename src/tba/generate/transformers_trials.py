"""What may be done with a model's own cache, tried once with a few tokens: nothing in a config says it.

Models that keep states instead of keys may see padding, and some caches select the rows of their keys and forget those of
their states.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tba.generate.transformers_batch import kept_cache, left_padded, positions_of
from tba.models.load import first_line

logger = logging.getLogger("tba.generate")

LEAST_GAP, LARGEST_SHARE = 1e-6, 1e-3
"""Gap to a plain pass that is rounding in fp32: in total variation distance, and as a share of how far the distributions
after different sequences lie apart. A model that says nearly the same after everything hides what is wrong."""
COARSE_GAP, COARSE_SHARE = 0.03, 0.5
"""The same in half precision, whichever is less."""

Verdict = bool | None
"""Whether it is exact; None = the model's numbers are not finite, and nothing is known."""


@torch.no_grad()
def caches_exactly(model: Any) -> Verdict:
    """Whether a token that is read with the cache of those before it gives what a plain pass over all gives."""
    (sequence,) = sequences = _sequences(model, (6,))
    device = next(model.parameters()).device
    try:
        ids, mask = left_padded([sequence[:-1]], device)
        first = model(input_ids=ids, **_told_positions(model, mask), use_cache=True)
        more = _told_positions(model, torch.ones(1, 6, dtype=torch.bool, device=device), newest=True)
        second = model(input_ids=_last(sequences, device), **more, **kept_cache(first), use_cache=True)
    except Exception as error:  # a model's code fails in its own ways when it is given what it was not written for
        logger.info(
            "everything is read again for each token: decoding failed with %s: %s",
            type(error).__name__,
            first_line(error),
        )
        return False
    return _is_plain(model, sequences, second.logits[:, -1:])


@torch.no_grad()
def pads_exactly(model: Any) -> Verdict:
    """Whether sequences that are left-padded to a common length get the next-token distributions that each has alone, also
    after one more token with the cache."""
    sequences = _sequences(model, (4, 11, 7))
    device = next(model.parameters()).device
    try:
        ids, mask = left_padded([sequence[:-1] for sequence in sequences], device)
        first = model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=True)
        mask = torch.nn.functional.pad(mask, (0, 1), value=True)
        more = {"attention_mask": mask, "position_ids": positions_of(mask)[:, -1:], **kept_cache(first)}
        second = model(input_ids=_last(sequences, device), **more, use_cache=True)
    except Exception as error:
        logger.info(
            "prompts of one length are decoded together: padding failed with %s: %s",
            type(error).__name__,
            first_line(error),
        )
        return False
    return _is_plain(model, sequences, torch.stack((first.logits[:, -1], second.logits[:, -1]), dim=1))


@torch.no_grad()
def selects_exactly(model: Any) -> Verdict:
    """Whether rows of the cache may be repeated and put in another order: what follows is as if each had been read alone."""
    one, other = _sequences(model, (6, 6))
    device = next(model.parameters()).device
    try:
        ids, mask = left_padded([one[:-1], other[:-1]], device)
        cache = kept_cache(model(input_ids=ids, **_told_positions(model, mask), use_cache=True))
        if not cache:
            return False
        for part in cache.values():
            part.batch_select_indices(torch.tensor([1, 0, 1], device=device))
        chosen, mask = [other, one, other], torch.ones(3, 6, dtype=torch.bool, device=device)
        more = _told_positions(model, mask, newest=True)
        found = model(input_ids=_last(chosen, device), **more, **cache, use_cache=True)
    except Exception as error:
        logger.info(
            "every response reads its prompt itself: selecting rows failed with %s: %s",
            type(error).__name__,
            first_line(error),
        )
        return False
    return _is_plain(model, chosen, found.logits[:, -1:])


def _failed(consequence: str, error: Exception) -> Literal[False]:
    logger.info("%s: a trial of it failed with %s: %s", consequence, type(error).__name__, first_line(error))
    return False


def takes_positions(model: Any) -> bool:
    """Whether a model can be told the positions of tokens: left to itself with a cache, one or another (Bamba) counts
    wrongly."""
    return "position_ids" in inspect.signature(model.forward).parameters


def _told_positions(model: Any, mask: Tensor, *, newest: bool = False) -> dict[str, Tensor]:
    """The positions of the tokens of all columns, or of the last one alone, for a model that takes them."""
    positions = positions_of(mask)
    return {"position_ids": positions[:, -1:] if newest else positions} if takes_positions(model) else {}


def _sequences(model: Any, lengths: Sequence[int]) -> list[np.ndarray]:
    size, generator = int(model.config.get_text_config().vocab_size), torch.Generator().manual_seed(0)
    return [torch.randint(size, (length,), generator=generator).numpy() for length in lengths]


def _last(sequences: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.tensor([[int(sequence[-1])] for sequence in sequences], device=device)


def _is_plain(model: Any, sequences: Sequence[np.ndarray], logits_BTV: Tensor) -> Verdict:
    """Whether these logits after the last tokens of each sequence are those of a plain pass over it alone."""
    gaps, spreads = [], []
    for sequence, logits_TV in zip(sequences, logits_BTV):
        ids = torch.from_numpy(sequence).to(logits_TV.device)[None]
        plain_TV = model(input_ids=ids, use_cache=False).logits[0].float().softmax(-1)
        gaps.append(_distance(logits_TV.float().softmax(-1), plain_TV[-len(logits_TV) :]))
        spreads.append(_distance(plain_TV[1:], plain_TV[:-1]))
    gap, spread = float(torch.stack(gaps).mean()), float(torch.stack(spreads).mean())
    if not math.isfinite(spread):
        return None
    is_coarse = logits_BTV.dtype != torch.float32
    return gap <= (min(COARSE_GAP, COARSE_SHARE * spread) if is_coarse else LEAST_GAP + LARGEST_SHARE * spread)


def _distance(p: Tensor, q: Tensor) -> Tensor:
    """Mean total variation distance."""
    return (p - q).abs().sum(-1).mean() / 2
