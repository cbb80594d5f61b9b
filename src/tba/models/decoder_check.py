"""A decoder is used only if it computes what the model it was made from computes."""

from __future__ import annotations

import logging

import torch
from torch import nn

from tba.models.decoder import Decoder, UnsupportedModel
from tba.models.decoder_attention import CausalAttention

logger = logging.getLogger("tba.models")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest mean total variation distance to the model's own next-token distribution, by the coarser dtype of the two."""


def check_decoder(model: nn.Module, decoder: Decoder, max_length: int) -> None:
    """With the pass that serves; a fused one that fails, or is wrong, makes room for the plain one, in words."""
    try:
        _check_against(model, decoder, max_length)
    except Exception as error:  # a kernel may fail to compile in as many ways as there are drivers
        if decoder.fused_pass is None:
            raise
        logger.warning("fused kernels are not used: %s: %.300s", type(error).__name__, error)
        decoder.fused_pass = None
        _check_against(model, decoder, max_length)


@torch.no_grad()
def _check_against(model: nn.Module, decoder: Decoder, max_length: int) -> None:
    """Log-probs of a few random tokens must be those of the model's own forward pass."""
    length = min(12, max_length)
    ids = torch.randint(decoder.spec.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    device = next(model.parameters()).device
    was_training, _ = model.training, model.eval()
    expected = model(input_ids=ids.to(device), use_cache=False).logits.float().log_softmax(-1).cpu()
    model.train(was_training)
    positions = torch.arange(length).expand(2, -1).reshape(-1).to(decoder.device)
    hidden = decoder.hidden(ids.reshape(-1).to(decoder.device), positions, CausalAttention(decoder.spec, 2, length))
    found = decoder.logits(hidden).log_softmax(-1).cpu().view_as(expected)
    coarse = next((dtype for dtype in (torch.bfloat16,) if dtype in (decoder.dtype, model.dtype)), torch.float32)
    # Not the largest gap of log-probs: in bf16 those of tokens that never come are off by whole nats in both. And not the
    # worst position: two bf16 passes of a small chat model differ by 0.16 at one of 24, by 0.04 on average.
    difference = float((found.exp() - expected.exp()).abs().sum(-1).mean()) / 2
    if not difference <= TOLERANCE[coarse]:
        raise UnsupportedModel(
            f"the native decoder's next-token distribution differs from this {decoder.spec.family} model's forward pass by "
            f"{difference:.2g} (allowed {TOLERANCE[coarse]:g}): its config uses something the decoder does not know"
        )
