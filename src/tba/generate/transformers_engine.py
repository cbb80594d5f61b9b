"""The engine for models the native one does not know: transformers' own forward pass and cache, one prompt at a time.

Same contract, same random numbers, same log-probs as the native engine; only slower. The samples of one request are a
batch of equal length, so nothing is padded; the batch runs until its last response finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.generate.sampling import (
    Response,
    SamplingNeeds,
    SamplingState,
    checked_requests,
    finished_at_once,
    response_key,
    responses_of,
    sample,
    sampling_needs,
    sequence_of,
    token_log_probs,
)
from tba.models.decoder_spec import name_problem
from tba.models.packed_check import own_logits
from tba.models.text_part import switch_length, text_parameters
from tba.types import Completion, Request, Sampling, Weights

CACHES = ("past_key_values", "cache_params")
"""Names under which models give back, and take, what they keep of the tokens they have read: keys and values, or states."""


class TransformersEngine:
    """An engine that decodes with `model` itself, which must therefore be a copy that nobody trains."""

    def __init__(
        self,
        model: nn.Module,
        *,
        stop_ids: Sequence[int],
        seed: int,
        max_length: int,
        update: Literal["in_flight", "drain"] = "in_flight",
        version: int = 0,
    ) -> None:
        self.model: Any = model.eval()
        self.device = next(model.parameters()).device
        self.stop_ids = frozenset(stop_ids)
        self._stop_ids = torch.tensor(sorted(self.stop_ids), device=self.device)
        self.seed, self.max_length, self.update, self.version = seed, max_length, update, version
        self._running: _Group | None = None
        self._pending: Weights | None = None
        self._generating = False

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def sibling(self) -> TransformersEngine:
        """A second engine over the same weights: to evaluate while this one stands still."""
        return TransformersEngine(
            self.model,
            stop_ids=sorted(self.stop_ids),
            seed=self.seed,
            max_length=self.max_length,
            version=self.version,
        )

    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        """Log-probs of given responses under the weights in use."""
        return TransformersScorer(self.model).score(prompt_ids, response_ids, temperature)

    def load(self, weights: Weights) -> None:
        """Take new weights: now, or under `drain` when the running prompt has finished."""
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
        """Yield responses as they finish, prompt after prompt."""
        if self._generating:
            raise RuntimeError("this engine is already generating: exhaust or close the other iterator first.")
        self._generating = True
        try:
            for request in checked_requests(requests, sampling, self.max_length):
                if request is None:
                    continue
                yield from self._generate_group(responses_of(request, samples_per_prompt, sampling), between_steps)
        finally:
            self._finish_group()
            self._generating = False

    def _generate_group(
        self, responses: list[Response], between_steps: Callable[[], None] | None
    ) -> Iterator[Completion]:
        at_once = [finished_at_once(response, self.stop_ids, self.version) for response in responses]
        # The samples of one request share prefix and limit, so either all are finished or none is.
        if at_once and at_once[0] is not None:
            yield from (completion for completion in at_once if completion is not None)
            return
        switch = switch_length(self.model.config)
        group = self._running = _Group(responses, self.seed, self.version, self.device, switch)
        while group.open_rows:
            if between_steps is not None:
                between_steps()
            yield from self._decode_step(group)
        self._finish_group()

    @torch.no_grad()
    def _decode_step(self, group: _Group) -> list[Completion]:
        output = self.model(input_ids=group.next_ids, **group.cache, use_cache=True, logits_to_keep=1)
        group.keep_cache(output)
        sampled = sample(output.logits[:, -1].float(), group.sampling_state(), self._stop_ids, group.needs())
        group.append(sampled.tokens, sampled.behaviour, sampled.policy)
        return group.take_finished(self.stop_ids)

    def _finish_group(self) -> None:
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


class _Group:
    """The samples of one request, decoded together. Axes: B samples.

    `switch` is the length in tokens beyond which the model's rotary angles change (longrope): there the cached keys, which
    have the old ones, are thrown away, and everything is read again, as in transformers' `generate`.
    """

    def __init__(
        self, responses: list[Response], seed: int, version: int, device: torch.device, switch: int | None
    ) -> None:
        self.responses, self.switch = responses, switch
        self.open_rows = set(range(len(responses)))
        self.sampling = responses[0].sampling
        sequence = torch.from_numpy(sequence_of(responses[0].request)).to(device)
        self.next_ids: Tensor = sequence.expand(len(responses), -1)
        self.prompt = sequence[: len(responses[0].request.prompt.token_ids)]
        self.cache: dict[str, Any] = {}
        """What the model keeps of the tokens it has read, by the name of the argument; empty = nothing."""
        prefix = torch.from_numpy(responses[0].request.prefix_ids.astype(np.int64)).to(device)
        unknown = torch.full((len(responses),), float("nan"), device=device)
        self.columns = [(token.expand(len(responses)), unknown, unknown) for token in prefix]
        keys = [response_key(seed, response.request.prompt.id, response.sample_index) for response in responses]
        self.keys = torch.tensor(keys, device=device)
        self.open_spans(version)

    def open_spans(self, version: int) -> None:
        for row in self.open_rows:
            self.responses[row].open_span(len(self.columns), version)

    def needs(self) -> SamplingNeeds:
        return sampling_needs(self.sampling)._replace(forbidden=len(self.columns) < self.sampling.min_new_tokens)

    def sampling_state(self) -> SamplingState:
        sampling, like = self.sampling, self.keys
        real = lambda value: torch.full(like.shape, value, dtype=torch.float32, device=like.device)  # noqa: E731
        return SamplingState(
            key=self.keys,
            position=torch.full_like(like, len(self.columns)),
            temperature=real(sampling.temperature),
            policy_temperature=real(sampling.training_temperature),
            top_p=real(sampling.top_p),
            top_k=torch.full_like(like, sampling.top_k),
            greedy=torch.full_like(like, int(sampling.greedy)),
            min_new_tokens=torch.full_like(like, sampling.min_new_tokens),
        )

    def keep_cache(self, output: Any) -> None:
        kept = ((name, getattr(output, name, None)) for name in CACHES)
        self.cache = {name: cache for name, cache in kept if cache is not None}

    def append(self, tokens: Tensor, behaviour: Tensor, policy: Tensor) -> None:
        self.columns.append((tokens, behaviour, policy))
        if self.switch is not None and len(self.prompt) + len(self.columns) == self.switch + 1:
            self.cache = {}
        self.next_ids = tokens[:, None] if self.cache else self._everything()

    def _everything(self) -> Tensor:
        """Prompt and response so far [B, T]."""
        response = torch.stack([tokens for tokens, _, _ in self.columns], dim=1)
        return torch.cat([self.prompt.expand(len(response), -1), response], dim=1)

    def take_finished(self, stop_ids: frozenset[int]) -> list[Completion]:
        last = self.columns[-1][0].tolist()
        full = len(self.columns) >= self.sampling.max_new_tokens
        # Rows that have finished go on being decoded with the others, so that the batch keeps its shape; nobody reads them.
        finished = [row for row in sorted(self.open_rows) if full or last[row] in stop_ids]
        self.open_rows.difference_update(finished)
        return [self._completion(row, stop_ids) for row in finished]

    def _completion(self, row: int, stop_ids: frozenset[int]) -> Completion:
        tokens, behaviour, policy = (
            torch.stack([column[part][row] for column in self.columns]).cpu().numpy() for part in range(3)
        )
        return self.responses[row].completion(tokens.astype(np.int32), behaviour, policy, stop_ids)


class TransformersScorer:
    """Log-probs of given responses by the model's own forward pass, one at a time."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.device = next(model.parameters()).device

    def load(self, weights: Weights) -> None:
        """Replace the frozen model by another of the same shape (a reference reset)."""
        load_weights(self.model, weights.tensors)

    @torch.no_grad()
    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        """float32 log-probs of each response's tokens after its prompt, at `temperature`."""
        return [self._score(prompt, response, temperature) for prompt, response in zip(prompt_ids, response_ids)]

    def _score(self, prompt: np.ndarray, response: np.ndarray, temperature: float) -> np.ndarray:
        if len(response) == 0:
            return np.zeros(0, np.float32)
        ids = torch.from_numpy(np.concatenate((prompt, response)).astype(np.int64)).to(self.device)
        # The last token predicts nothing. Where the angles change with the length, reading it could change the others.
        logits, tokens = own_logits(self.model, ids[:-1], len(response)), ids[len(prompt) :]
        return token_log_probs(logits, tokens, torch.full(tokens.shape, temperature, device=ids.device)).cpu().numpy()
