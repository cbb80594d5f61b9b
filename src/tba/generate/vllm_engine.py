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

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tba.config import ConfigError
from tba.generate.contract import Engine, Scorer, Update
from tba.generate.sampling import (
    Response,
    response_key,
    responses_of,
    sampling_needs,
)

# vLLM's own names come from there as well: what must be set before vLLM is imported is set there.
from tba.generate.vllm_llm import (
    LLM,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    Transfer,
    keep,
    make_llm,
    tokens_input,
)
from tba.models.load import first_line
from tba.types import Completion, Request, Sampling, Weights

MIN_TEMPERATURE = 0.01
"""vLLM samples at this temperature where a lower one is asked for, with a warning only."""


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


class VllmEngine(Engine):
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
        update: Update = "in_flight",
    ) -> None:
        super().__init__(
            stop_ids=stop_ids, seed=seed, slots=slots, max_length=max_length, vocabulary=vocabulary, update=update
        )
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

    def _any_unfinished(self) -> bool:
        return bool(self._running)

    def _use(self, weights: Weights) -> None:
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
        responses = self._responses(requests, samples_per_prompt, sampling)
        while self._refill(responses) or self._running or self._ended or self._finished:
            if self._running and between_steps is not None:
                between_steps()
            if self._running:  # scoring between the steps may have finished the last one
                self._shared.step()
            self._complete()
            while self._finished:
                yield self._finished.popleft()
            self._load_pending()

    def _stop(self) -> None:
        self._shared.abort(list(self._running))
        self._running.clear()
        self._waiting.clear()
        self._ended.clear()
        self._finished.clear()

    def _responses(
        self, requests: Iterator[Request | None], samples_per_prompt: int, sampling: Sampling
    ) -> Iterator[list[Response]]:
        """The samples of each request that need tokens; an empty list when there is nothing to start now."""
        for request in requests:
            responses: list[Response] = []
            if request is not None:
                responses, completions = responses_of(
                    request, samples_per_prompt, sampling, stop_ids=self.stop_ids, version=self.version
                )
                self._finished.extend(completions)
            yield responses

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

    def _complete(self) -> None:
        self._shared.score_policy(self._ended)
        self._finished.extend(running.completion(self.stop_ids) for running in self._ended)
        self._ended.clear()


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
