"""What an engine is, and which one a model gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from tba.config import GenerateConfig
from tba.generate.fallback import TransformersEngine, TransformersScorer
from tba.generate.native import NativeEngine
from tba.generate.scoring import ReferenceScorer
from tba.models.decoder import UnsupportedModel
from tba.types import Completion, Request, Sampling, Weights

logger = logging.getLogger("tba.generate")


class Engine(Protocol):
    """Turns requests into responses; takes new weights while it does."""

    version: int
    """Of the weights that choose the next token."""

    def generate(
        self,
        requests: Iterable[Request],
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """Yield responses as they finish. Requests are read lazily; `between_steps` is called before every decode step.

        `sampling.max_new_tokens` and `min_new_tokens` count the whole response, a prefix included.
        """

    def load(self, weights: Weights) -> None:
        """Take new weights: at once, or after running responses under update = drain."""


class Scorer(Protocol):
    """Log-probs of given responses under a frozen model."""

    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        """float32 log-probs of each response's tokens after its prompt."""


def stop_ids_of(model: nn.Module, tokenizer: Any = None) -> list[int]:
    """All ids that end a response: those of the generation config, of the model config and the tokenizer's EOS."""
    sources = (getattr(model, "generation_config", None), model.config)
    found: set[int] = set()
    for ids in (
        *(getattr(source, "eos_token_id", None) for source in sources),
        getattr(tokenizer, "eos_token_id", None),
    ):
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    size = int(model.config.vocab_size)
    found = {index for index in found if 0 <= index < size}
    if not found:
        raise ValueError(
            "no EOS: neither the generation config, nor the model config, nor the tokenizer names a token below the "
            f"vocabulary size {size} that ends a response. Set eos_token_id in the model's generation_config.json."
        )
    return sorted(found)


def make_engine(
    model: nn.Module,
    *,
    stop_ids: Sequence[int],
    config: GenerateConfig,
    seed: int,
    max_length: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    version: int = 0,
) -> Engine:
    """The engine of generate.engine; a model the native one does not know runs through transformers, in words.

    Under transformers the engine decodes with `model` itself, so it must be a copy that nobody trains.
    """
    if config.engine == "native":
        try:
            return NativeEngine(
                model,
                stop_ids=stop_ids,
                seed=seed,
                slots=config.slots,
                max_length=max_length,
                update=config.update,
                dtype=dtype,
                device=device,
                version=version,
            )
        except UnsupportedModel as reason:
            logger.warning(
                "generate.engine=native cannot run this model: %s. Falling back to transformers, slower.", reason
            )
    return TransformersEngine(
        model, stop_ids=stop_ids, seed=seed, max_length=max_length, update=config.update, version=version
    )


def make_scorer(
    model: nn.Module,
    *,
    max_length: int,
    token_budget: int = 8192,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Scorer:
    """A scorer with the native decoder, or with the model's own forward pass where that is not possible, in words."""
    try:
        return ReferenceScorer(model, max_length=max_length, token_budget=token_budget, dtype=dtype, device=device)
    except UnsupportedModel as reason:
        logger.warning(
            "the native decoder cannot score with this model: %s. Using its own forward pass, slower.", reason
        )
        return TransformersScorer(model)
