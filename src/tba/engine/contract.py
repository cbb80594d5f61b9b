"""The contract of engines and scorers, on which searchers and evaluations rely, and the code that all engines share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from tba.engine.sampling import checked_requests
from tba.types import Completion, Request, Sampling, Weights

Update = Literal["in_flight", "drain"]
"""When new weights are taken: between two decode steps, where running responses keep their old keys and values, or after all
of them have finished."""


class Scorer(Protocol):
    """A scorer computes the log-probs of given responses under a frozen model."""

    def load(self, weights: Weights) -> None:
        """Replace the frozen model by another of the same shape (a reference reset)."""

    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        """float32 log-probs of each response's tokens after its prompt."""


class RunningTokens(NamedTuple):
    """Tokens so far of a response that is being generated, its prefix included; arrays [T] as in a `Completion`."""

    request: Request
    sample_index: int
    token_ids: np.ndarray
    policy_log_probs: np.ndarray


class Engine(ABC):
    """An engine turns requests into responses, and takes new weights while it does."""

    version: int
    """Version of the weights that choose the next token."""

    def __init__(
        self, *, stop_ids: Iterable[int], seed: int, slots: int, max_length: int, vocabulary: int, update: Update
    ) -> None:
        self.stop_ids = frozenset(stop_ids)
        self.seed, self.slots, self.max_length, self.update = seed, slots, max_length, update
        self.vocabulary = vocabulary
        self.prepare: Callable[[Weights], Weights] | None = None
        """Function from the weights that arrive to those that are loaded (LoRA); None = they are the same."""
        self._pending: Weights | None = None
        self._generating = False

    @property
    def options(self) -> dict[str, Any]:
        """What a clone shares with its engine."""
        names = ("stop_ids", "seed", "slots", "max_length")
        return {name: getattr(self, name) for name in names}

    @property
    def has_pending(self) -> bool:
        """Whether weights that it was given wait until the running responses have finished."""
        return self._pending is not None

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
        if self._generating:
            raise RuntimeError("this engine is already generating: exhaust or close the other iterator first.")
        self._generating = True
        try:
            # A generator: a request is checked when the engine reads it, so a bad one raises in the middle of a run.
            checked = checked_requests(requests, sampling, self.max_length)
            yield from self._generate(checked, samples_per_prompt, sampling, between_steps)
        finally:
            # In this order: weights wait for responses that are unfinished, and after `_stop` there are none.
            self._stop()
            self._load_pending()
            self._generating = False

    def load(self, weights: Weights) -> None:
        """Take new weights: at once under update = in_flight, after the running responses have finished under drain."""
        # Prepared before they wait: a pending bundle is always what `_use` takes.
        weights = weights if self.prepare is None else self.prepare(weights)
        if self.update == "drain" and self._any_unfinished():
            # At most one bundle waits: a newer one takes its place, and the older is never used.
            self._pending = weights
            return
        self._pending = None  # what waited for the last response is older than these
        self._use(weights)

    def running_tokens(self, requests: Collection[Request]) -> list[RunningTokens]:
        """Tokens so far of the running responses to these requests, to be read from `between_steps`. An engine that learns
        of tokens only when a response is complete returns none."""
        return []

    def end_early(self, requests: Collection[Request]) -> None:  # noqa: B027 (optional)
        """End the running responses to these requests with their next token, as at the length limit; called from
        `between_steps`. Responses that wait are not ended: the caller asks again. An engine that cannot goes on."""

    def _load_pending(self) -> None:
        if self._pending is not None and not self._any_unfinished():
            # Cleared first: `_use` may raise, and the same weights would raise again when the call ends.
            weights, self._pending = self._pending, None
            self._use(weights)

    @abstractmethod
    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        """float32 log-probs of each response's tokens after its prompt, under the weights in use."""

    def close(self) -> None:  # noqa: B027
        """End the processes that it has started, with those of its clone."""

    @abstractmethod
    def clone_for_evaluation(self) -> Engine:
        """A second engine over the same weights, to evaluate while this one stands still."""

    @abstractmethod
    def _generate(
        self,
        requests: Iterator[Request | None],
        samples_per_prompt: int,
        sampling: Sampling,
        between_steps: Callable[[], None] | None,
    ) -> Iterator[Completion]:
        """`generate`, of requests that have been checked."""

    @abstractmethod
    def _stop(self) -> None:
        """Forget all responses: the caller has the last one, or needs no more."""

    @abstractmethod
    def _any_unfinished(self) -> bool:
        """Whether a response has tokens and is not complete."""

    @abstractmethod
    def _use(self, weights: Weights) -> None:
        """Compute with other weights from now on, and open spans of their version in the running responses."""
