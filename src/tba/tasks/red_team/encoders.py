"""Transformers models that read a text and write none (classifiers, sentence encoders): loading, and texts in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from tba.models.load import context_length, first_line, resolve_device

TEXTS_PER_PASS = 64
MAY_BE_MISSING = frozenset(("pooler.dense.weight", "pooler.dense.bias"))
"""Of BERT and its kin without a head; sentence encoders take the mean instead."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedEncoder:
    """A model that reads, with its tokenizer."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    """Longer texts are cut off at the end."""

    def batches(self, texts: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        """Inputs of the model, texts in their order."""
        for start in range(0, len(texts), TEXTS_PER_PASS):
            # A tokenizer that adds no special tokens makes nothing of an empty text; a blank is one token.
            batch = [text or " " for text in texts[start : start + TEXTS_PER_PASS]]
            inputs = self.tokenizer(
                batch, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
            )
            yield inputs.to(self.model.device)


def load_encoder(auto_class: Any, path: str, *, key: str, device: str = "auto") -> LoadedEncoder:
    """`auto_class` of transformers from a folder or hub name; `key` is the setting that named it, for errors."""
    disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        # Never bfloat16: these models are small, and rewards may be logarithms of small probabilities.
        model, found = auto_class.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
        if found["missing_keys"] - MAY_BE_MISSING:
            # Such weights are random, and different ones in every process.
            missing = ", ".join(sorted(found["missing_keys"]))
            raise ValueError(f"its files have no {missing}: it was not trained as {auto_class.__name__}.")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key}={path!r} cannot be loaded: {first_line(error)} Give a folder with config.json, weights "
            "and tokenizer, or a hub name that can be reached (HF_HUB_OFFLINE=1 forbids downloads)."
        ) from error
    if tokenizer.pad_token is None:  # decoders have none, and texts of a batch need one
        tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
    return LoadedEncoder(
        model=model.to(resolve_device(device)).eval(), tokenizer=tokenizer, max_tokens=token_limit(model, tokenizer)
    )


def token_limit(model: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """The smaller of what tokenizer and model allow; many tokenizers name no limit, which reads as a huge one."""
    embeddings = getattr(model.base_model, "embeddings", None)
    positions = getattr(embeddings, "position_embeddings", None)
    padding = getattr(positions, "padding_idx", None)
    # RoBERTa counts positions from behind the padding's id: 514 of them are 512 tokens.
    lost = 0 if padding is None else padding + 1
    return min(int(tokenizer.model_max_length), context_length(model.config) - lost)
