"""The engine for models the native one does not know: transformers' own forward pass and cache.

Same contract, same random numbers, same log-probs as the native engine; only slower. Requests are decoded in batches, each
until its last response has finished. Prompts of different lengths share a batch where a trial shows that the model's padding
is exact; where it is not, those of one length do (transformers_trials.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.generate.decoder.spec import name_problem
from tba.generate.sampling import (
    Response,
    checked_requests,
    finished_at_once,
    responses_of,
    sample,
    token_log_probs,
)
from tba.generate.transformers_batch import ResponseBatch
from tba.generate.transformers_trials import caches_exactly, pads_exactly, selects_exactly, takes_positions
from tba.models.text_part import switch_length, text_parameters
from tba.policy.packed_check import own_logits
from tba.policy.packing import length_batches, padded
from tba.types import Completion, Request, Sampling, Weights

MOST_SCORED_TOKENS, MOST_LOGITS = 4096, 2**27
"""Tokens, and numbers of logits, in one scoring pass."""


class TransformersEngine:
    """An engine that decodes with `model` itself, which must therefore be a copy that nobody trains."""

    def __init__(
        self,
        model: nn.Module,
        *,
        stop_ids: Sequence[int],
        seed: int,
        max_length: int,
        slots: int = 128,
        update: Literal["in_flight", "drain"] = "in_flight",
        version: int = 0,
    ) -> None:
        """`slots` is the number of responses that are decoded together, unless one request asks for more."""
        self.model: Any = model.eval()
        self.device = next(model.parameters()).device
        self.stop_ids = frozenset(stop_ids)
        self._stop_ids = torch.tensor(sorted(self.stop_ids), device=self.device)
        self.seed, self.max_length, self.update, self.version = seed, max_length, update, version
        self.slots = slots
        self._switch = switch_length(self.model.config)
        self._verdicts: dict[Callable[[Any], bool | None], bool | None] = {}
        """What may be done with the model's cache, by trial."""
        self._running: ResponseBatch | None = None
        self._pending: Weights | None = None
        self._generating = False

    @property
    def has_pending(self) -> bool:
        return self._pending is not None

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def sibling(self) -> TransformersEngine:
        """A second engine over the same weights: to evaluate while this one stands still."""
        other = TransformersEngine(
            self.model,
            stop_ids=sorted(self.stop_ids),
            seed=self.seed,
            max_length=self.max_length,
            slots=self.slots,
            version=self.version,
        )
        other._verdicts = self._verdicts  # the same model: nothing is tried twice
        return other

    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        """Log-probs of given responses under the weights in use."""
        return TransformersScorer(self.model).score(prompt_ids, response_ids, temperature)

    def load(self, weights: Weights) -> None:
        """Take new weights: now, or under `drain` when the running batch has finished."""
        if self.update == "drain" and self._running is not None:
            self._pending = weights
            return
        self._load_now(weights)
        if self._running is not None:
            self._running.open_spans(weights.version)

    def generate(
        self,
        requests: Iterable[Request | None],
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """Yield responses as they finish, batch after batch."""
        if self._generating:
            raise RuntimeError("this engine is already generating: exhaust or close the other iterator first.")
        self._generating = True
        try:
            for chosen in self._batches(checked_requests(requests, sampling, self.max_length), samples_per_prompt):
                responses = [r for request in chosen for r in responses_of(request, samples_per_prompt, sampling)]
                yield from self._generate_batch(responses, between_steps)
        finally:
            self._finish_batch()
            self._generating = False

    def _batches(self, requests: Iterator[Request | None], samples_per_prompt: int) -> Iterator[list[Request]]:
        """Requests that are decoded together: as many as there are now, up to `slots` responses."""
        most, waiting = max(1, self.slots // max(1, samples_per_prompt)), deque[Request]()
        for request in requests:
            if request is not None:
                waiting.append(request)
            while waiting and (request is None or len(waiting) >= most):
                yield self._next_batch(waiting, most)
        while waiting:
            yield self._next_batch(waiting, most)

    def _next_batch(self, waiting: deque[Request], most: int) -> list[Request]:
        lengths = [len(request.prompt.token_ids) + len(request.prefix_ids) for request in waiting]
        chosen, left = list[Request](), list[Request]()
        for request, length in zip(waiting, lengths):
            fits = length == lengths[0] or self._pads_exactly()
            (chosen if fits and len(chosen) < most else left).append(request)
        waiting.clear()
        waiting.extend(left)
        return chosen

    def _generate_batch(
        self, responses: list[Response], between_steps: Callable[[], None] | None
    ) -> Iterator[Completion]:
        at_once = {id(r): finished_at_once(r, self.stop_ids, self.version) for r in responses}
        yield from (completion for completion in at_once.values() if completion is not None)
        responses = [response for response in responses if at_once[id(response)] is None]
        if not responses:
            return
        batch = self._running = ResponseBatch(
            responses,
            seed=self.seed,
            version=self.version,
            device=self.device,
            switch=self._switch,
            may_select=self._is_exact(selects_exactly),
            may_cache=self._is_exact(caches_exactly),
            takes_positions=takes_positions(self.model),
        )
        while batch.open_rows:
            if between_steps is not None:
                between_steps()
            yield from self._decode_step(batch)
        self._finish_batch()

    @torch.no_grad()
    def _decode_step(self, batch: ResponseBatch) -> list[Completion]:
        logits = batch.take_outputs(self.model(**batch.inputs(), use_cache=True, logits_to_keep=1))
        batch.append(sample(logits, batch.state(), self._stop_ids, batch.needs()))
        return batch.take_finished(self.stop_ids)

    def _pads_exactly(self) -> bool:
        """Whether prompts of different lengths may share a batch. Rows of one length come to the switch together."""
        return self._switch is None and self._is_exact(caches_exactly) and self._is_exact(pads_exactly)

    def _is_exact(self, trial: Callable[[Any], bool | None]) -> bool:
        """What a trial says, which is made once; again where the weights of the last one were not finite."""
        if self._verdicts.get(trial) is None:
            self._verdicts[trial] = trial(self.model)
        return bool(self._verdicts[trial])

    def _finish_batch(self) -> None:
        self._running = None
        if self._pending is not None:
            weights, self._pending = self._pending, None
            self._load_now(weights)

    def _load_now(self, weights: Weights) -> None:
        load_weights(self.model, weights.tensors)
        self.version = weights.version


def load_weights(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Copy published tensors over a model's parameters; nothing is copied when a name or a shape is wrong.

    Published are parameters that text goes through, tied ones once. Buffers (the correction bias of DeepSeek's router) are
    not, nor are parts that see images: nothing moves them, so those that the model was loaded with stay right.
    """
    parameters = text_parameters(model)
    known = model.state_dict()
    unknown = [name for name in tensors if name not in known]
    missing = [name for name in parameters if name not in tensors]
    if unknown or missing:
        raise KeyError(name_problem(unknown, missing, parameters))
    for name, tensor in tensors.items():
        if tensor.shape != known[name].shape:
            raise ValueError(
                f"weights: {name} has shape {tuple(tensor.shape)}, the engine's model has {tuple(known[name].shape)}: "
                "load weights of the same model."
            )
    model.load_state_dict(dict(tensors), strict=False)


class TransformersScorer:
    """Log-probs of given responses by the model's own forward pass, those of similar length together: padding comes last,
    and no token sees what follows it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.device = next(model.parameters()).device
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        alone = switch_length(self.model.config) is not None  # the angles of a batch are those of its longest sequence
        self._token_budget = 1 if alone else min(MOST_SCORED_TOKENS, MOST_LOGITS // vocabulary)

    def load(self, weights: Weights) -> None:
        """Replace the frozen model by another of the same shape (a reference reset)."""
        load_weights(self.model, weights.tensors)

    @torch.no_grad()
    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        """float32 log-probs of each response's tokens after its prompt, at `temperature`."""
        scores: list[np.ndarray] = [np.zeros(0, np.float32)] * len(response_ids)
        some = [index for index, response in enumerate(response_ids) if len(response)]
        lengths = [len(prompt_ids[index]) + len(response_ids[index]) for index in some]
        for batch in length_batches(lengths, token_budget=self._token_budget):
            chosen = [some[place] for place in batch]
            rows = [np.concatenate((prompt_ids[index], response_ids[index])) for index in chosen]
            for index, found in zip(chosen, self._score(rows, [len(response_ids[i]) for i in chosen], temperature)):
                scores[index] = found
        return scores

    def _score(self, rows: Sequence[np.ndarray], sizes: Sequence[int], temperature: float) -> Iterator[np.ndarray]:
        """Of the last tokens of each row, as many as `sizes` says."""
        # The last token predicts nothing. Where the angles change with the length, reading it could change the others.
        columns = max(map(len, rows)) - 1
        first = min(len(row) - size for row, size in zip(rows, sizes)) - 1
        ids = padded([row[:-1] for row in rows], columns=columns, device=self.device)
        logits_BTV = own_logits(self.model, ids, columns - first)
        for row, size, logits_TV in zip(rows, sizes, logits_BTV):
            start = len(row) - size - 1 - first
            tokens = torch.from_numpy(row[-size:].astype(np.int64)).to(self.device)
            heat = torch.full(tokens.shape, temperature, device=self.device)
            yield token_log_probs(logits_TV[start : start + size].float(), tokens, heat).cpu().numpy()
