"""An engine whose weights arrive as a LoRA adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from transformers import PreTrainedModel

from tba.generate.engine import Engine
from tba.models.lora import merged
from tba.types import Completion, Request, Sampling, Weights


class AdaptedEngine:
    """Decodes with merged weights; `model` is the base with an adapter in it, to merge with."""

    def __init__(self, engine: Engine, model: PreTrainedModel) -> None:
        self._engine = engine
        self._model = model

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def vocabulary(self) -> int:
        return self._engine.vocabulary

    def load(self, weights: Weights) -> None:
        self._engine.load(merged(self._model, weights))

    def generate(
        self,
        requests: Iterable[Request | None],
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        return self._engine.generate(
            requests, samples_per_prompt=samples_per_prompt, sampling=sampling, between_steps=between_steps
        )

    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        return self._engine.score(prompt_ids, response_ids, temperature)

    def sibling(self) -> Engine:
        return self._engine.sibling()
