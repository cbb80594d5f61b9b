"""What may be done with a model's own cache, tried once with a few tokens: nothing in a config says it.

Models that keep states instead of keys may see padding, and some caches select the rows of their keys and forget those of
their states.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.generate.transformers_batch import can_select, left_padded

logger = logging.getLogger("tba.generate")

TOLERANCE = {torch.float32: 1e-4}
"""Largest mean total variation distance to a plain pass, by dtype; COARSE_TOLERANCE for all others."""
COARSE_TOLERANCE = 0.03


@torch.no_grad()
def pads_exactly(model: Any) -> bool:
    """Whether sequences that are left-padded to a common length get the next-token distributions that each has alone, also
    after one more token with the cache."""
    sequences = _sequences(model, (4, 11, 7))
    device = next(model.parameters()).device
    try:
        ids, mask = left_padded([sequence[:-1] for sequence in sequences], device)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        first = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
        mask = torch.nn.functional.pad(mask, (0, 1), value=True)
        more = {"attention_mask": mask, "position_ids": positions[:, -1:] + 1, "past_key_values": first.past_key_values}
        second = model(input_ids=_last(sequences, device), **more, use_cache=True)
    except Exception as error:  # a model's code fails in its own ways when it is given what it was not written for
        logger.info("prompts of one length are decoded together: padding failed with %s", type(error).__name__)
        return False
    return _is_plain(model, sequences, torch.stack((first.logits[:, -1], second.logits[:, -1]), dim=1))


@torch.no_grad()
def selects_exactly(model: Any) -> bool:
    """Whether rows of the cache may be repeated and put in another order: what follows is as if each had been read alone."""
    one, other = _sequences(model, (6, 6))
    device = next(model.parameters()).device
    try:
        ids, _ = left_padded([one[:-1], other[:-1]], device)
        cache = model(input_ids=ids, use_cache=True).past_key_values
        if not can_select(cache):
            return False
        cache.batch_select_indices(torch.tensor([1, 0, 1], device=device))
        chosen = [other, one, other]
        found = model(input_ids=_last(chosen, device), past_key_values=cache, use_cache=True)
    except Exception as error:
        logger.info("every response reads its prompt itself: selecting rows failed with %s", type(error).__name__)
        return False
    return _is_plain(model, chosen, found.logits[:, -1:])


def _sequences(model: Any, lengths: Sequence[int]) -> list[np.ndarray]:
    size, generator = int(model.config.get_text_config().vocab_size), torch.Generator().manual_seed(0)
    return [torch.randint(size, (length,), generator=generator).numpy() for length in lengths]


def _last(sequences: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.tensor([[int(sequence[-1])] for sequence in sequences], device=device)


def _is_plain(model: Any, sequences: Sequence[np.ndarray], logits_BTV: Tensor) -> bool:
    """Whether these logits after the last tokens of each sequence are those of a plain pass over it alone."""
    gaps = []
    for sequence, logits_TV in zip(sequences, logits_BTV):
        ids = torch.from_numpy(sequence).to(logits_TV.device)[None]
        alone = model(input_ids=ids, use_cache=False).logits[0, -len(logits_TV) :].float()
        gaps.append((logits_TV.float().softmax(-1) - alone.softmax(-1)).abs().sum(-1).mean() / 2)
    return float(torch.stack(gaps).mean()) <= TOLERANCE.get(logits_BTV.dtype, COARSE_TOLERANCE)
