"""What an engine and a scorer are: the contract that searchers and evaluations rely on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from tba.types import Completion, Request, Sampling, Weights


class Engine(Protocol):
    """An engine turns requests into responses, and takes new weights while it does."""

    @property
    def version(self) -> int:
        """Version of the weights that choose the next token."""

    @property
    def has_pending(self) -> bool:
        """Whether weights that it was given wait until the running responses have finished."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""

    def generate(
        self,
        requests: Iterable[Request | None],
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """Yield responses as they finish. Requests are read lazily; `between_steps` is called before every decode step (on
        CUDA before every few). A None among the requests means that there is nothing to start now: the engine goes on with
        what runs and asks again.

        `sampling.max_new_tokens` and `min_new_tokens` count the whole response, a prefix included.
        """

    def load(self, weights: Weights) -> None:
        """Take new weights: at once under update = in_flight, after the running responses have finished under drain."""

    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        """float32 log-probs of each response's tokens after its prompt, under the weights in use."""

    def sibling(self) -> Engine:
        """A second engine over the same weights, to evaluate while this one stands still."""


class Scorer(Protocol):
    """A scorer computes the log-probs of given responses under a frozen model."""

    def load(self, weights: Weights) -> None:
        """Replace the frozen model by another of the same shape (a reference reset)."""

    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        """float32 log-probs of each response's tokens after its prompt."""
