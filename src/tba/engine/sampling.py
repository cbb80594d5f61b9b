"""From a request to a response: how each token is chosen (counter-based randomness, inverse CDF, two log-probs per token),
and what every engine does alike with requests and responses (checks, version spans, the finished record).

The rules, exactly (`examples/sync_loop.py` repeats them, and samples the identical tokens):

1. Each response has a key: the first 8 bytes of blake2b("{seed}/{prompt id}/{sample index}", digest_size=8), read as
   a little-endian signed 64-bit integer.
2. Its token number p (0 is the response's first) uses x = mix(key + (p + 1) * 0x9E3779B97F4A7C15 mod 2^64), where mix
   is the finaliser of splitmix64: z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB;
   z ^= z >> 31. The shifts are logical.
3. u = ((x >> 40) + 0.5) * 2^-24 in float32.
4. probs = softmax(logits.float() / temperature) with truncated tokens set to 0, cdf = cumsum(probs) in the order of the
   vocabulary, token = number of entries of cdf that are <= u * cdf[-1], and at most the last one with probs > 0.

So a token depends on (seed, prompt id, sample index, p) and the logits, never on slots, batches or searchers.

Truncation follows temperature: top_k keeps the k most likely tokens (of equal ones the lower id), top_p then the
smallest set of the most likely whose share of what top_k kept reaches p, at least one. Before `min_new_tokens` stop
tokens have logit -inf. The behaviour log-prob is that of the distribution sampled from, after all this (0 for greedy);
the policy log-prob is log_softmax(logits.float() / policy_temperature), nothing forbidden or cut.

Axes: B responses, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tba.config import Config
from tba.types import Completion, Finish, Request, Sampling

# The int64 numbers with the bits of those unsigned ones.
GAMMA, MIX_1, MIX_2 = (bits - 2**64 for bits in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class BrokenLogits(RuntimeError):
    """A model's logits are NaN, so that no token can be chosen."""


def training_sampling(config: Config) -> Sampling:
    """How searchers sample: the tempered policy, truncated only where generate.top_p or generate.top_k asks for it."""
    generate = config.generate
    return Sampling(
        max_new_tokens=generate.max_new_tokens,
        min_new_tokens=generate.min_new_tokens,
        temperature=generate.temperature,
        top_p=generate.top_p,
        top_k=generate.top_k,
    )


def response_key(seed: int, prompt_id: str, sample_index: int) -> int:
    """Key of one response's random numbers, a signed 64-bit integer."""
    digest = hashlib.blake2b(f"{seed}/{prompt_id}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniforms(key_B: Tensor, position_B: Tensor) -> Tensor:
    """One float32 in (0, 1] per response, for its token number `position` (both int64)."""
    # int64 products wrap around like unsigned ones: the low 64 bits are the same.
    z = key_B + (position_B + 1) * GAMMA
    z = (z ^ _shift_right(z, 30)) * MIX_1
    z = (z ^ _shift_right(z, 27)) * MIX_2
    z = z ^ _shift_right(z, 31)
    # 24 bits, as many as a float32 holds. Only the largest rounds up to 1, which `invert_cdf` provides for.
    return (_shift_right(z, 40).float() + 0.5) * 2.0**-24


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's is arithmetic and drags the sign along."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


class SamplingNeeds(NamedTuple):
    """Features of sampling that at least one response of a batch needs; the others are skipped. All False is plain sampling
    at T = 1."""

    temperature: bool = False
    policy: bool = False
    """Whether some policy temperature is not the temperature."""
    truncation: bool = False
    greedy: bool = False
    forbidden: bool = False
    """Whether some response is still shorter than its min_new_tokens."""


def sampling_needs(sampling: Sampling) -> SamplingNeeds:
    """Sampling of one response during its whole life (`forbidden` ends before)."""
    return SamplingNeeds(
        temperature=sampling.temperature != 1.0 and not sampling.greedy,
        policy=sampling.training_temperature != sampling.temperature or sampling.greedy,
        truncation=(sampling.top_p < 1.0 or sampling.top_k > 0) and not sampling.greedy,
        greedy=sampling.greedy,
        forbidden=sampling.min_new_tokens > 0,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingState:
    """Sampling settings of each response, as tensors [B]: temperatures and top_p in float32, all others in int64."""

    key: Tensor
    position: Tensor
    """Number of response tokens so far."""
    temperature: Tensor
    """1 where greedy."""
    policy_temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    """0 = all."""
    greedy: Tensor
    min_new_tokens: Tensor

    @classmethod
    def of(cls, responses: Sequence[Response], seed: int, device: torch.device) -> SamplingState:
        numbers = [sampling_numbers(response, seed) for response in responses]
        return cls(**{name: torch.tensor([row[name] for row in numbers], device=device) for name in numbers[0]})

    def rows(self, rows_B: Tensor, num_generated: int) -> SamplingState:
        """The settings of some of them, so many tokens later."""
        chosen = SamplingState(**{name: values[rows_B] for name, values in vars(self).items()})
        return replace(chosen, position=chosen.position + num_generated)


def sampling_numbers(response: Response, seed: int) -> dict[str, int | float]:
    sampling = response.sampling
    return {
        "key": response_key(seed, response.request.prompt.id, response.sample_index),
        "position": len(response.token_ids),
        # A greedy response ignores its temperature, and a temperature of 0 would divide by it.
        "temperature": 1.0 if sampling.greedy else float(sampling.temperature),
        "policy_temperature": float(sampling.training_temperature),
        "top_p": float(sampling.top_p),
        "top_k": sampling.top_k,
        "greedy": int(sampling.greedy),
        "min_new_tokens": sampling.min_new_tokens,
    }


class SampledTokens(NamedTuple):
    """The chosen tokens, int64 [B], with their behaviour and policy log-probs, float32 [B]."""

    tokens: Tensor
    behaviour: Tensor
    policy: Tensor


def sample(logits_BV: Tensor, state: SamplingState, stop_ids: Tensor, needs: SamplingNeeds) -> SampledTokens:
    """Choose a token per response. Pure tensor code; `needs` only skips what would change nothing."""
    # Order of the rules: forbid stop tokens, divide by the temperature, soft-max, truncate, then choose.
    behaviour_BV = logits_BV
    if needs.forbidden:
        # Positions count the whole response, a prefix included.
        early_B = state.position < state.min_new_tokens
        at_stops = behaviour_BV[:, stop_ids].masked_fill(early_B[:, None], float("-inf"))
        behaviour_BV = behaviour_BV.index_copy(1, stop_ids, at_stops)
    # Greedy takes the best of these: before the temperature, which changes no order, and after stop tokens are forbidden.
    allowed_BV = behaviour_BV
    if needs.temperature:
        behaviour_BV = behaviour_BV / state.temperature[:, None]
    probs_BV = torch.softmax(behaviour_BV, dim=-1)
    if needs.truncation:
        probs_BV = torch.where(_kept(probs_BV, state), probs_BV, 0.0)
    tokens, total = invert_cdf(probs_BV, uniforms(state.key, state.position))
    if needs.greedy:
        tokens = torch.where(state.greedy.bool(), allowed_BV.argmax(dim=-1), tokens)
    chosen = probs_BV.gather(1, tokens[:, None]).squeeze(1)
    # Truncated probabilities do not sum to 1: the log-prob is that of the tokens that are left.
    behaviour = torch.log(chosen) - torch.log(total) if needs.truncation else torch.log(chosen)
    if needs.greedy:
        behaviour = torch.where(state.greedy.bool(), 0.0, behaviour)
    # Nothing was cut, forbidden or tempered otherwise: both log-probs are the same number.
    if not (needs.policy or needs.truncation or needs.forbidden):
        return SampledTokens(tokens, behaviour, behaviour)
    # From the model's own logits: what was forbidden or cut off counts in the policy's distribution.
    return SampledTokens(tokens, behaviour, token_log_probs(logits_BV, tokens, state.policy_temperature))


def token_log_probs(logits_BV: Tensor, tokens_B: Tensor, temperature_B: Tensor) -> Tensor:
    """log_softmax(logits.float() / temperature) at the tokens."""
    scaled_BV = logits_BV.float() / temperature_B[:, None]
    return scaled_BV.gather(1, tokens_B[:, None]).squeeze(1) - torch.logsumexp(scaled_BV, dim=-1)


def invert_cdf(probs_BV: Tensor, u_B: Tensor) -> tuple[Tensor, Tensor]:
    """Rule 4 -> tokens [B] and cdf[-1] [B]."""
    cdf_BV = torch.cumsum(probs_BV, dim=-1)
    total_B = cdf_BV[:, -1]
    # The cdf never decreases, so counting entries <= target is a binary search.
    tokens_B = torch.searchsorted(cdf_BV, (u_B * total_B)[:, None], right=True).squeeze(1)
    last = probs_BV.shape[1] - 1
    # u = 1 happens once in 2^24 tokens: looking first saves a pass over the vocabulary where looking costs no sync.
    if probs_BV.device.type == "cpu" and int(tokens_B.max()) <= last:
        return tokens_B, total_B
    ids_V = torch.arange(last + 1, device=probs_BV.device)
    last_possible_B = torch.where(probs_BV > 0, ids_V, 0).amax(dim=-1)
    return torch.minimum(tokens_B, last_possible_B), total_B


def _kept(probs_BV: Tensor, state: SamplingState) -> Tensor:
    """Tokens that top_k and then top_p leave -> bool [B, V]."""
    size = probs_BV.shape[1]
    # Stable: of equal probabilities the lower id comes first, as the kernels on a GPU have it.
    ordered_BV, ids_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    limit_B = torch.where(state.top_k > 0, state.top_k, size)
    in_top_k = torch.arange(size, device=probs_BV.device) < limit_B[:, None]
    ordered_BV = torch.where(in_top_k, ordered_BV, 0.0)
    mass_BV = ordered_BV.cumsum(dim=-1)
    # A token stays while the mass before it is short of the target: so the one that reaches the target stays too.
    before_BV = mass_BV - ordered_BV
    in_top_p = (before_BV < state.top_p[:, None] * mass_BV[:, -1:]) | (state.top_p >= 1.0)[:, None]
    in_top_p[:, 0] = True  # at least one, also where top_p x mass rounds to 0
    return torch.zeros_like(in_top_p).scatter(1, ids_BV, in_top_k & in_top_p)


class WrittenTokens(NamedTuple):
    """The beginning of a response, its prefix included, on the host; the log-probs of the prefix are NaN."""

    token_ids: np.ndarray
    behaviour: np.ndarray
    policy: np.ndarray


@dataclass(kw_only=True, eq=False)
class Response:
    """A response that is being generated; its tokens are in the engine's tensors until it is finished."""

    request: Request
    sample_index: int
    sampling: Sampling
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (first token, version): from that token on this version chose, up to the next pair."""
    order: int = 0
    """Place among all responses of a call: where there is not room for all, the oldest go on."""
    written: WrittenTokens | None = None
    """Its tokens when it was taken out for want of memory; None = it never was, or had only its prefix."""

    @property
    def key(self) -> tuple[str, int]:
        """Id of the prompt and index of the sample."""
        return self.request.prompt.id, self.sample_index

    @property
    def num_prefix_tokens(self) -> int:
        return len(self.request.prefix_ids)

    @property
    def token_ids(self) -> np.ndarray:
        """Tokens that it starts with: its prefix, and what it had when it was taken out."""
        return self.request.prefix_ids if self.written is None else self.written.token_ids

    @property
    def start_position(self) -> int:
        """Position of the token that is fed first: the last that is there, whose output is the first new token."""
        return len(self.request.prompt.token_ids) + len(self.token_ids) - 1

    @property
    def sequence(self) -> np.ndarray:
        """Prompt and the tokens that it starts with, int64."""
        return np.concatenate((self.request.prompt.token_ids, self.token_ids)).astype(np.int64)

    @property
    def max_length(self) -> int:
        """Number of positions that prompt and response may come to use."""
        return len(self.request.prompt.token_ids) + max(self.num_prefix_tokens, self.sampling.max_new_tokens)

    def open_span(self, num_tokens: int, version: int) -> None:
        """Note that `version` chooses from token `num_tokens` on; a span without tokens is replaced."""
        # Two loads between two tokens: only the later version chooses.
        if self.spans and self.spans[-1][0] == num_tokens:
            self.spans.pop()
        self.spans.append((num_tokens, version))

    def completion(
        self, token_ids: np.ndarray, behaviour: np.ndarray, policy: np.ndarray, stop_ids: Collection[int]
    ) -> Completion:
        """The finished record; the arrays hold the whole response, log-probs of the prefix are NaN, and only those."""
        # Softmax makes NaN of any NaN or +inf among the logits. Engines end such a response at that token.
        broken = np.flatnonzero(np.isnan(policy[self.num_prefix_tokens :]))
        if len(broken):
            token = self.num_prefix_tokens + int(broken[0])
            version = next((version for first, version in reversed(self.spans) if first <= token), None)
            raise BrokenLogits(
                f"the model's logits are NaN or infinite at token {token} of response {self.sample_index} to prompt "
                f"{self.request.prompt.id!r}, with weights of version {version}: no token can be chosen from them. Either "
                "the weights themselves are broken (training diverged: lower train.learning_rate or train.max_grad_norm, "
                "or go back to an earlier checkpoint), or the model overflows in its dtype (try model.dtype=float32)."
            )
        stopped = len(token_ids) > 0 and int(token_ids[-1]) in stop_ids
        finish: Finish = "stop" if stopped else "length"
        # Weights that arrived after the last token chose nothing; a response without tokens keeps its last span.
        spans = [span for span in self.spans if span[0] < len(token_ids)] or self.spans[-1:]
        return Completion(
            prompt_id=self.request.prompt.id,
            sample_index=self.sample_index,
            token_ids=token_ids,
            behaviour_log_probs=behaviour,
            policy_log_probs=policy,
            version_spans=tuple(spans),
            finish=finish,
            num_prefix_tokens=self.num_prefix_tokens,
        )


def responses_of(
    request: Request, samples_per_prompt: int, sampling: Sampling, *, stop_ids: Collection[int], version: int
) -> tuple[list[Response], list[Completion]]:
    """The responses that a request asks for: those that need tokens, not yet started, and those whose prefix ends in a stop
    token, or is as long as allowed."""
    prefix = np.asarray(request.prefix_ids, dtype=np.int32)
    # Sample indices go on from rollout to rollout of a prompt: random numbers are keyed by them.
    own, first = request.sampling or sampling, request.first_sample
    count = samples_per_prompt if request.samples is None else request.samples
    found = [Response(request=request, sample_index=first + index, sampling=own) for index in range(count)]
    is_stopped = len(prefix) > 0 and int(prefix[-1]) in stop_ids
    if not is_stopped and len(prefix) < own.max_new_tokens:
        return found, []
    unknown = np.full(len(prefix), np.nan, dtype=np.float32)
    for response in found:
        response.open_span(len(prefix), version)
    return [], [response.completion(prefix.copy(), unknown.copy(), unknown.copy(), stop_ids) for response in found]


def checked_requests(
    requests: Iterable[Request | None], sampling: Sampling, max_length: int
) -> Iterator[Request | None]:
    """The same requests, read lazily; a ValueError at an empty prompt, and at one that is too long with its response."""
    for request in requests:
        if request is not None:
            name, prompt, prefix = request.prompt.id, len(request.prompt.token_ids), len(request.prefix_ids)
            if prompt == 0:
                raise ValueError(f"prompt {name!r} has no tokens: add a BOS token or drop it from the data.")
            # Both count the whole response: max_new_tokens includes the prefix.
            response = max(prefix, (request.sampling or sampling).max_new_tokens)
            if prompt + response > max_length:
                raise ValueError(
                    f"prompt {name!r} has {prompt} tokens and its response up to {response} (a prefix of {prefix} "
                    f"included): together more than the engine's max_length={max_length}. Lower task.max_prompt_tokens or "
                    "generate.max_new_tokens, or use a model with a longer context."
                )
        yield request
