"""The text part of a model and its longest sequence, read from its config and its modules. The modules of a model that also
sees images (Gemma 3 4B and larger) are not trained, not published, and without an adapter."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx")
"""Names that configs have for the longest sequence in tokens."""


def trunk_of(model: PreTrainedModel) -> nn.Module:
    """The part of a model that makes hidden states of text: without its head, and without a part that sees images."""
    trunk: Any = model.base_model
    if trunk is model:  # transformers does not know the name of this one (Llama 4)
        trunk = getattr(model, "model", model)
    return getattr(trunk, "language_model", trunk)


def text_parameters(model: PreTrainedModel) -> set[str]:
    """Names of the parameters that text goes through: all but those of parts that see images."""
    if model.config.get_text_config() is model.config:
        return {name for name, _ in model.named_parameters()}
    head = model.get_output_embeddings()
    # By identity: a tied head is the embedding, and names differ from those inside the part.
    text = {id(found) for part in (trunk_of(model), head) if part is not None for found in part.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in text}


def modules_beside_text(model: PreTrainedModel) -> list[str]:
    """Names of the layers that text does not go through."""
    if model.config.get_text_config() is model.config:
        return []
    text = {name.rpartition(".")[0] for name in text_parameters(model)}
    layers = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    return sorted(layers - text - {name_of(model, model.get_output_embeddings())})


def name_of(model: nn.Module, module: nn.Module | None) -> str | None:
    return next((name for name, found in model.named_modules() if found is module), None)


def is_tied(model: nn.Module) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    return head is not None and embedding is not None and head.weight is embedding.weight


def stated_context(model_config: Any) -> int | None:
    """Longest sequence in tokens that the config of a model's text part states; None = none."""
    text = model_config.get_text_config()
    return next((int(getattr(text, name)) for name in CONTEXT_NAMES if getattr(text, name, None)), None)


def kv_bytes_per_token(model_config: Any, dtype: torch.dtype) -> int:
    text = model_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_dim * dtype.itemsize


def switch_length(model_config: Any) -> int | None:
    """Longest sequence in tokens that has the rotary angles of short sequences, where longer ones have others (longrope:
    Phi-3.5, Phi-4-mini; dynamic: beyond the context); None = the angles do not depend on the length."""
    text = model_config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    # Some configs have rotary settings for each kind of layer (Gemma 3), one dict inside the other.
    by_layer_type = bool(rope) and all(isinstance(value, dict) for value in rope.values())
    lengths = []
    for parameters in rope.values() if by_layer_type else [rope]:
        if parameters.get("rope_type") == "longrope":
            lengths.append(int(parameters["original_max_position_embeddings"]))
        if parameters.get("rope_type") == "dynamic":
            lengths.append(int(text.max_position_embeddings))
    return min(lengths, default=None)
