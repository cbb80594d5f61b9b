"""The engine over vLLM: its scheduler, its paged cache and its kernels behind our contract.

vLLM runs in this process and is stepped by hand, so that requests are read lazily and weights arrive between two steps.
Every sample is a vLLM request of its own: they share their prompt's pass through the prefix cache, as those of n > 1 do, but
each is handed out when it finishes, and has a seed of its own. The same seed, prompt and sample index give the same response
again, as far as the batch's arithmetic allows; it is not the native engine's, because vLLM draws its own random numbers.

`load` may be called whenever the caller has control: between two completions, or from `between_steps`.
    in_flight   new weights act from the next token on, and vLLM is paused while it takes them. Running responses keep their
                old keys and values: the spans say which version chose which token, and the keys of a token are of the
                version that chose the one after it. Responses that start later share no keys with older ones. (One that
                vLLM puts back for lack of memory is read again, with the weights of then.)
    drain       running responses finish first. The tensors given to `load` must not change until then.

Log-probs are vLLM's `processed_logprobs`: those of the distribution that was sampled from. They are the policy's as well,
unless something was cut off, forbidden or explored. There our own scorer computes the policy's, for the tokens of each
version before the next is loaded; without a scorer they are NaN, and such a response counts as nobody's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from tba.config import ConfigError
from tba.generate.sampling import (
    Response,
    checked_requests,
    finished_at_once,
    response_key,
    responses_of,
    sequence_of,
)

# vLLM's own names come from there as well: what must be set before vLLM is imported is set there.
from tba.generate.vllm_in_process import (
    RequestOutput,
    RequestOutputKind,
    RunningResponse,
    SamplingParams,
    SharedLLM,
    Transfer,
)
from tba.generate.vllm_make import make_llm
from tba.models.load import first_line
from tba.types import Completion, Request, Sampling, Weights

if TYPE_CHECKING:
    from tba.generate.engine import Scorer

MIN_TEMPERATURE = 0.01
"""vLLM samples at this temperature where a lower one is asked for, with a warning only."""


def make_vllm_engine(
    model: PreTrainedModel,
    *,
    stop_ids: Sequence[int],
    seed: int,
    slots: int,
    max_length: int,
    update: Literal["in_flight", "drain"],
    dtype: torch.dtype,
    device: torch.device | str,
    version: int,
    scorer: Scorer | None,
    beside_trainer: bool = False,
) -> VllmEngine:
    """An engine with a copy of the model inside vLLM. `scorer` holds the same weights; it is needed to score at temperatures
    other than 1, because vLLM's log-probs of given tokens know no temperature, and for policies that are not what is sampled
    from (top_p, top_k, min_new_tokens, exploration)."""
    config: Any = model.config
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    where = torch.device(device)
    try:
        transfer = Transfer.chosen(where, beside_trainer=beside_trainer)
        llm = make_llm(
            model,
            seed=seed,
            slots=slots,
            max_length=max_length,
            dtype=dtype,
            device=where,
            transfer=transfer,
        )
        shared = SharedLLM(llm=llm, names=frozenset(parameters), scorer=scorer, transfer=transfer)
        shared.load(Weights(version=version, tensors=parameters))
        # Kernels that do not know the shape of a model say so in the first pass only.
        shared.score([np.zeros(1, np.int32)], [np.zeros(1, np.int32)])
    except (ValueError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"generate.engine=vllm cannot run this model: {first_line(error)}. Use generate.engine=native, or "
            "generate.engine=transformers, which runs every model that transformers loads."
        ) from error
    return VllmEngine(
        shared,
        stop_ids=stop_ids,
        seed=seed,
        slots=slots,
        max_length=max_length,
        vocabulary=int(config.get_text_config().vocab_size),
        update=update,
    )


class VllmEngine:
    """An engine that generates with a vLLM, alone or beside its siblings."""

    def __init__(
        self,
        shared: SharedLLM,
        *,
        stop_ids: Iterable[int],
        seed: int,
        slots: int,
        max_length: int,
        vocabulary: int,
        update: Literal["in_flight", "drain"] = "in_flight",
    ) -> None:
        self._shared = shared
        self.stop_ids = frozenset(stop_ids)
        self.seed, self.slots, self.max_length, self.update = seed, slots, max_length, update
        self.vocabulary = vocabulary
        self._waiting: deque[Response] = deque()
        """Samples of the request that was read last which have no slot yet."""
        self._running: dict[str, RunningResponse] = {}
        """By the id of the vLLM request."""
        self._ended: list[RunningResponse] = []
        """Responses that vLLM has finished, and that are completions when they are handed out."""
        self._finished: deque[Completion] = deque()
        self._pending: Weights | None = None
        self._generating = False

    @property
    def version(self) -> int:
        return self._shared.version

    @property
    def has_pending(self) -> bool:
        return self._pending is not None

    def sibling(self) -> VllmEngine:
        """A second engine over the same vLLM. While it generates, what this one has running goes on too, with the same
        weights, and is handed out when this one's turn comes."""
        return VllmEngine(
            self._shared,
            stop_ids=self.stop_ids,
            seed=self.seed,
            slots=self.slots,
            max_length=self.max_length,
            vocabulary=self.vocabulary,
        )

    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        """Log-probs of given responses under the weights in use: at temperature 1 by vLLM itself, so that a canary sees the
        weights that generate; running responses go on meanwhile."""
        longest = max((len(prompt) + len(response) for prompt, response in zip(prompt_ids, response_ids)), default=0)
        if longest > self.max_length:
            raise ValueError(
                f"generate.engine=vllm cannot score {longest} tokens: max_length is {self.max_length}. Use a model with a "
                "longer context, or generate.engine=native."
            )
        if temperature == 1.0:
            return self._shared.score(prompt_ids, response_ids)
        if self._shared.scorer is None:
            raise ConfigError(
                f"generate.engine=vllm cannot score at temperature {temperature}: its log-probs of given tokens are at "
                "temperature 1, and this engine was made without a scorer. Set generate.temperature to what is scored at."
            )
        return self._shared.scorer.score(prompt_ids, response_ids, temperature)

    def load(self, weights: Weights) -> None:
        """Take new weights: now, or under `drain` when the running responses have finished."""
        if self.update == "drain" and self._running:
            self._pending = weights
            return
        self._load_now(weights)
        for running in self._running.values():
            running.response.open_span(running.num_tokens, weights.version)

    def generate(
        self,
        requests: Iterable[Request | None],
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """Yield responses as they finish."""
        if self._generating:
            raise RuntimeError("this engine is already generating: exhaust or close the other iterator first.")
        self._generating = True
        responses = self._responses(checked_requests(requests, sampling, self.max_length), samples_per_prompt, sampling)
        try:
            while self._refill(responses) or self._running or self._ended or self._finished:
                if self._running and between_steps is not None:
                    between_steps()
                if self._running:  # scoring between the steps may have finished the last one
                    self._shared.step()
                self._complete()
                while self._finished:
                    yield self._finished.popleft()
                self._load_pending()
        finally:
            self._shared.abort(list(self._running))
            self._running.clear()
            self._waiting.clear()
            self._ended.clear()
            self._finished.clear()
            self._load_pending()
            self._generating = False

    def _responses(
        self, requests: Iterator[Request | None], samples_per_prompt: int, sampling: Sampling
    ) -> Iterator[list[Response]]:
        """The samples of each request that need tokens; an empty list when there is nothing to start now."""
        for request in requests:
            responses = [] if request is None else responses_of(request, samples_per_prompt, sampling)
            at_once = [finished_at_once(response, self.stop_ids, self.version) for response in responses]
            self._finished.extend(completion for completion in at_once if completion is not None)
            yield [response for response, completion in zip(responses, at_once) if completion is None]

    def _refill(self, responses: Iterator[list[Response]]) -> bool:
        """Start responses while slots are free (not while draining) -> whether there may be more to start."""
        while self._pending is None and len(self._running) < self.slots:
            if not self._waiting:
                # Reading may load weights: the caller has control meanwhile.
                found = next(responses, None)
                if found is None:
                    return False
                self._waiting.extend(found)
                if not found:
                    return True
                continue
            self._start(self._waiting.popleft())
        return True

    def _start(self, response: Response) -> None:
        response.open_span(response.num_prefix_tokens, self.version)
        running = RunningResponse(response)
        tokens, taker = sequence_of(response.request), partial(self._take, running)
        self._running[self._shared.add(tokens, self._parameters(response), taker)] = running

    def _parameters(self, response: Response) -> SamplingParams:
        sampling, prefix = response.sampling, response.num_prefix_tokens
        if not sampling.greedy and sampling.temperature < MIN_TEMPERATURE:
            raise ConfigError(
                f"generate.engine=vllm samples at temperatures from {MIN_TEMPERATURE}, got {sampling.temperature}: raise "
                "generate.temperature (or search.explore.temperature), or use generate.engine=native."
            )
        # vLLM's random numbers begin anew with each request: a continuation must not draw its beginning's again.
        prompt_id = response.request.prompt.id + (f"/after {prefix}" if prefix else "")
        max_tokens = sampling.max_new_tokens - prefix
        return SamplingParams(
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_p=1.0 if sampling.greedy else sampling.top_p,
            top_k=0 if sampling.greedy else sampling.top_k,
            seed=response_key(self.seed, prompt_id, response.sample_index) % 2**63,
            max_tokens=max_tokens,
            min_tokens=min(max(0, sampling.min_new_tokens - prefix), max_tokens),
            stop_token_ids=sorted(self.stop_ids),
            ignore_eos=True,  # stop_ids are all of them
            logprobs=0,  # of the chosen token, no others
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def _take(self, running: RunningResponse, output: RequestOutput) -> None:
        running.take(output)
        if output.finished:
            self._ended.append(self._running.pop(output.request_id))

    def _complete(self) -> None:
        self._shared.score_policy(self._ended)
        self._finished.extend(running.completion(self.stop_ids) for running in self._ended)
        self._ended.clear()

    def _load_pending(self) -> None:
        if self._pending is not None and not self._running:
            weights, self._pending = self._pending, None
            self._load_now(weights)

    def _load_now(self, weights: Weights) -> None:
        self._shared.score_policy([*self._ended, *self._running.values()])
        self._shared.load(weights)
