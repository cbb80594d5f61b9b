"""Layers of a transformers model, compiled or recomputed: time or memory for the trainer."""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

logger = logging.getLogger("tba.models")


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep each layer's input only, and compute the layer again in the backward pass."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers asks the layer whether it trains. Dropout modules stay off; some layers drop by a rate of their own.
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", None) is not None:
            module.training = True
            for name in ("dropout", "attention_dropout", "activation_dropout", "hidden_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)


def compile_layers(model: PreTrainedModel) -> bool:
    """Compile in place, for any number of tokens. False, in words, where that is not possible; nothing is changed then."""
    if next(model.parameters()).device.type != "cuda":
        logger.warning("train.compile has no effect without CUDA.")
        return False
    layers = getattr(model.base_model, "layers", None)
    if layers is None:
        logger.warning("train.compile: %s has no `layers` to compile; training goes on without.", type(model).__name__)
        return False
    for layer in layers:
        layer.compile(dynamic=True)
    return True
