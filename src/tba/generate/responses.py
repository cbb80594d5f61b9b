"""What every engine does alike with requests and responses: checks, keys, version spans, the finished record."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tba.types import Completion, Finish, Request, Sampling


@dataclass(kw_only=True, eq=False)
class Response:
    """A response that is being generated; its tokens are in the engine's tensors until it is finished."""

    request: Request
    sample_index: int
    sampling: Sampling
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (first token, version): from that token on this version chose, up to the next pair."""

    @property
    def num_prefix_tokens(self) -> int:
        return len(self.request.prefix_ids)

    @property
    def start_position(self) -> int:
        """Position of the token that is fed first: the last of prompt and prefix, whose output is the first new token."""
        return len(self.request.prompt.token_ids) + self.num_prefix_tokens - 1

    @property
    def max_length(self) -> int:
        """Number of positions that prompt and response may come to use."""
        return len(self.request.prompt.token_ids) + max(self.num_prefix_tokens, self.sampling.max_new_tokens)

    def open_span(self, num_tokens: int, version: int) -> None:
        """Note that `version` chooses from token `num_tokens` on; a span without tokens is replaced."""
        if self.spans and self.spans[-1][0] == num_tokens:
            self.spans.pop()
        self.spans.append((num_tokens, version))

    def completion(
        self, token_ids: np.ndarray, behaviour: np.ndarray, policy: np.ndarray, stop_ids: Collection[int]
    ) -> Completion:
        """The finished record; the arrays hold the whole response, log-probs of the prefix are NaN."""
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


def sequence_of(request: Request) -> np.ndarray:
    """Prompt and prefix, int64."""
    return np.concatenate((request.prompt.token_ids, request.prefix_ids)).astype(np.int64)


def responses_of(request: Request, samples_per_prompt: int, sampling: Sampling) -> list[Response]:
    """The responses that a request asks for, not yet started."""
    first = request.first_sample
    return [
        Response(request=request, sample_index=index, sampling=request.sampling or sampling)
        for index in range(first, first + samples_per_prompt)
    ]


def finished_at_once(response: Response, stop_ids: Collection[int], version: int) -> Completion | None:
    """The completion of a response whose prefix ends in a stop token, or is as long as allowed; None for all others."""
    prefix = np.asarray(response.request.prefix_ids, dtype=np.int32)
    stopped = len(prefix) > 0 and int(prefix[-1]) in stop_ids
    if not stopped and len(prefix) < response.sampling.max_new_tokens:
        return None
    response.open_span(len(prefix), version)
    unknown = np.full(len(prefix), np.nan, dtype=np.float32)
    return response.completion(prefix.copy(), unknown, unknown.copy(), stop_ids)


def checked_requests(
    requests: Iterable[Request | None], sampling: Sampling, max_length: int
) -> Iterator[Request | None]:
    """The same requests, read lazily, with an error at the first that cannot be generated."""
    for request in requests:
        if request is not None:
            check_request(request, request.sampling or sampling, max_length)
        yield request


def check_request(request: Request, sampling: Sampling, max_length: int) -> None:
    """Raise a ValueError for an empty prompt, and for one that is too long with its response."""
    prompt, prefix = len(request.prompt.token_ids), len(request.prefix_ids)
    if prompt == 0:
        raise ValueError(f"prompt {request.prompt.id!r} has no tokens: add a BOS token or drop it from the data.")
    response = max(prefix, sampling.max_new_tokens)
    if prompt + response > max_length:
        raise ValueError(
            f"prompt {request.prompt.id!r} has {prompt} tokens and its response up to {response} "
            f"(a prefix of {prefix} included): together more than the engine's max_length={max_length}. "
            "Lower task.max_prompt_tokens or generate.max_new_tokens, or use a model with a longer context."
        )
