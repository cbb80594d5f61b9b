"""Models that read texts, by folder or hub name: judges, sentence encoders, reward models given by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from tba.models.load import context_length, first_line, load_weights, resolve_device

TEXTS_PER_PASS = 64
MAY_BE_MISSING = frozenset(("pooler.dense.weight", "pooler.dense.bias"))
"""Weights that BERT and its kin lack without a head; sentence encoders take the mean instead."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedEncoder:
    """A model that reads, with its tokenizer."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    """Longest text in tokens; longer ones are cut off at the end."""

    def batches(self, texts: Sequence[str], *, special_tokens: bool = True) -> Iterator[dict[str, torch.Tensor]]:
        """Inputs of the model, texts in their order; `special_tokens` = False where the texts have them already."""
        for start in range(0, len(texts), TEXTS_PER_PASS):
            # A tokenizer that adds no special tokens makes nothing of an empty text; a blank is one token.
            batch = [text or " " for text in texts[start : start + TEXTS_PER_PASS]]
            inputs = self.tokenizer(
                batch,
                padding=True,
                truncation=True,
                max_length=self.max_tokens,
                return_tensors="pt",
                add_special_tokens=special_tokens,
            )
            yield inputs.to(self.model.device)

    @torch.inference_mode()
    def logits(self, texts: Sequence[str], *, special_tokens: bool = True) -> torch.Tensor:
        """Logits of a classifier, float32 on the CPU [n, labels]."""
        batches = self.batches(texts, special_tokens=special_tokens)
        return torch.cat([self.model(**inputs).logits.float().cpu() for inputs in batches])


def load_encoder(
    auto_class: Any, path: str, *, key: str, device: str = "auto", tokenizer_path: str | None = None, **options: Any
) -> LoadedEncoder:
    """`auto_class` of transformers from a folder or hub name; `key` is the setting that named it, for errors, and `options`
    are from_pretrained's."""
    disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path or path)
        # Never bfloat16 unless asked: these models are small, and rewards may be logarithms of small probabilities.
        options = {"dtype": torch.float32, **options}
        model = load_weights(auto_class, path, may_be_missing=MAY_BE_MISSING, **options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key}={path!r} cannot be loaded: {first_line(error).rstrip('. ')}. Give a folder with config.json, weights "
            "and tokenizer, or a hub name that can be reached (HF_HUB_OFFLINE=1 forbids downloads)."
        ) from error
    if tokenizer.pad_token is None:  # decoders have none, and texts of a batch need one
        tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
    embeddings = getattr(model.base_model, "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    # RoBERTa counts positions from behind the padding's id: 514 of them are 512 tokens.
    positions = context_length(model.config) - (0 if padding is None else padding + 1)
    # Many tokenizers name no limit, which reads as a huge one.
    limit = min(int(tokenizer.model_max_length), positions)
    return LoadedEncoder(model=model.to(resolve_device(device)).eval(), tokenizer=tokenizer, max_tokens=limit)
