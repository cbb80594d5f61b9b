"""Texts as unit vectors, whose angles the diversity metrics measure: counts of words, or a sentence encoder."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from transformers import AutoModel

from tba.tasks.red_team.encoders import load_encoder
from tba.tasks.red_team.world import WORDS

OTHER_COLUMNS = 1024
"""Words outside the embedded world share so many columns, by a hash: attacks of a real model have such words."""


class Embedder(Protocol):
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [n, d], rows of length 1."""
        ...


class WordCounts:
    """How often each word occurs, as a direction: one column per word of the embedded world, so calls can be compared."""

    def __init__(self, words: Sequence[str] = WORDS) -> None:
        self._column = {word: index for index, word in enumerate(words)}

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        counts = np.zeros((len(texts), len(self._column) + OTHER_COLUMNS), np.float32)
        for row, text in enumerate(texts):
            for word in text.split() or [""]:  # an empty text too must have a direction
                counts[row, self._column_of(word)] += 1
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)

    def _column_of(self, word: str) -> int:
        if word in self._column:
            return self._column[word]
        return len(self._column) + zlib.crc32(word.encode()) % OTHER_COLUMNS


class SentenceEncoder:
    """Mean of the last hidden states over a text's tokens, scaled to length 1: what sentence-transformers does with
    all-MiniLM-L6-v2, the paper's encoder."""

    def __init__(self, path: str, *, device: str = "auto") -> None:
        self._encoder = load_encoder(AutoModel, path, key="task.red_team.embedder", device=device)

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        found = [np.zeros((0, self._encoder.model.config.hidden_size), np.float32)]
        for inputs in self._encoder.batches(texts):
            hidden = self._encoder.model(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"].unsqueeze(-1).float()
            mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            found.append(torch.nn.functional.normalize(mean, dim=-1).cpu().numpy())
        return np.concatenate(found)
