"""vLLM in this process: made without weights, given them through its own weight-transfer interface, stepped by hand, and
asked for the log-probs of given tokens. What every engine over it shares; `vllm_engine` makes responses of it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tba.generate.sampling import Response, sampling_needs
from tba.types import Completion, Weights

# vLLM reads these when it is imported or started: an engine in this process, which meets nobody outside this machine, no
# usage reports, errors only in the log.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from tba.generate.vllm_make import keep
from tba.generate.vllm_weights import Transfer

if TYPE_CHECKING:
    from tba.generate.engine import Scorer


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
    """Of the tensors that weights must have."""
    scorer: Scorer | None = None
    transfer: Transfer = Transfer.in_process
    """How vLLM takes weights."""
    version: int = -1
    _num_loads: int = 0
    _ids: Iterator[int] = field(default_factory=itertools.count)
    _takers: dict[str, Callable[[RequestOutput], None]] = field(default_factory=dict)
    """By the id of the request: whose output it is."""

    def __post_init__(self) -> None:
        keep(self)

    def add(self, tokens: np.ndarray, parameters: SamplingParams, taker: Callable[[RequestOutput], None]) -> str:
        """Queue a request -> its id. `taker` is given each of its outputs."""
        name = str(next(self._ids))
        # vLLM cannot forget its prefix cache while requests run, so requests after a load are told apart by a salt: they
        # find no keys and values of older weights. A count, because a run that goes back uses a version's number again.
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
        """Take new weights while nothing is scheduled; requests that run keep the keys and values that they have."""
        self.llm.sleep(level=0, mode="keep")
        try:
            self._transfer(weights)
        finally:
            self.llm.wake_up(["scheduling"])
        if self.scorer is not None:
            self.scorer.load(weights)
        self.version = weights.version
        self._num_loads += 1

    def _transfer(self, weights: Weights) -> None:
        missing, unknown = self.names - weights.tensors.keys(), weights.tensors.keys() - self.names
        if missing or unknown:  # vLLM would keep what is missing as it was
            raise KeyError(
                f"weights do not fit the engine's model: missing {sorted(missing)[:1]}, unknown {sorted(unknown)[:1]}."
            )
        self.transfer.send(self.llm, weights)

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
