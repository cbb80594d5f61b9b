"""What clients get: answers in the shapes of OpenAI's routes and of verifiers' route.

Beside OpenAI's fields there are, as vLLM has them, `token_ids` and `prompt_token_ids` where a request asks for them, and of
our own `version_spans` of each choice and `tba.version`, the oldest version behind any of its tokens. Log-probs are those of
the policy at the request's temperature (1 where it is 0), before any truncation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tba.serve.answers import Answer, Piece
from tba.serve.bodies import Asked

TokenText = Callable[[int], str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Shape:
    """The shape of the answers to one request."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    is_chat: bool
    asked: Asked
    with_log_probs: bool
    with_token_ids: bool
    token_text: TokenText
    _begun: set[int] = field(default_factory=set)
    """Choices of which a chunk was made."""

    @property
    def has_tools(self) -> bool:
        return self.asked.chat is not None and bool(self.asked.chat.form.tools)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """All answers at once."""
        choices = []
        for answer in answers:
            completion = answer.completion
            choice = self._choice(answer.index, completion.token_ids, completion.policy_log_probs)
            if self.is_chat:
                choice["message"] = answer.message
            else:
                choice["text"] = answer.text
            choices.append(choice | self._prompt_ids(answer.index) | _end_of(answer))
        body = self._body("chat.completion" if self.is_chat else "text_completion", choices)
        if self.is_chat and self.with_token_ids:
            body["prompt_token_ids"] = self.asked.prompts[0]
        return body | {"usage": usage(self.asked, answers), "tba": _version(answers)}

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """A piece of a stream; None where it says nothing yet."""
        is_first = piece.index not in self._begun
        with_tokens = self.with_token_ids or self.with_log_probs
        if not (piece.text or piece.answer or is_first or (with_tokens and len(piece.token_ids))):
            return None
        self._begun.add(piece.index)
        choice = self._choice(piece.index, piece.token_ids, piece.log_probs)
        if self.is_chat:
            said: dict[str, Any] = {"content": piece.text}
            if self.has_tools:  # calls are known at the end, so all comes then
                said = {} if piece.answer is None else _indexed(piece.answer)
            choice["delta"] = ({"role": "assistant"} if is_first else {}) | said
        else:
            choice["text"] = piece.text
        choice |= (self._prompt_ids(piece.index) if is_first else {}) | (_end_of(piece.answer) if piece.answer else {})
        body = self._body("chat.completion.chunk" if self.is_chat else "text_completion", [choice])
        if is_first and self.is_chat and self.with_token_ids:
            body["prompt_token_ids"] = self.asked.prompts[0]
        return body | ({"tba": _version([piece.answer])} if piece.answer else {})

    def last_chunk(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The chunk with the usage, without choices."""
        body = self._body("chat.completion.chunk" if self.is_chat else "text_completion", [])
        return body | {"usage": usage(self.asked, answers)}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(self, index: int, token_ids: np.ndarray, log_probs: np.ndarray) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
        if self.with_token_ids:
            choice["token_ids"] = token_ids.tolist()
        if self.with_log_probs:
            texts = [self.token_text(token) for token in token_ids.tolist()]
            numbers = log_probs.tolist()
            if self.is_chat:
                choice["logprobs"] = {"content": [_token(*pair) for pair in zip(texts, numbers)]}
            else:
                choice["logprobs"] = {"tokens": texts, "token_logprobs": numbers}
        return choice

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        if self.is_chat or not self.with_token_ids:
            return {}
        return {"prompt_token_ids": self.asked.prompts[index // self.asked.num_samples]}


def _token(text: str, log_prob: float) -> dict[str, Any]:
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}


def _indexed(answer: Answer) -> dict[str, Any]:
    """The message of an answer as OpenAI streams it: each tool call has a number."""
    message = dict(answer.message)
    calls = [{"index": index, **call} for index, call in enumerate(message.pop("tool_calls", ()))]
    return message | ({"tool_calls": calls} if calls else {})


def _end_of(answer: Answer) -> dict[str, Any]:
    spans = [list(span) for span in answer.completion.version_spans]
    return {"finish_reason": answer.finish, "version_spans": spans}


def _version(answers: Sequence[Answer]) -> dict[str, int]:
    return {"version": min(answer.completion.version for answer in answers)}


def usage(asked: Asked, answers: Sequence[Answer]) -> dict[str, int]:
    prompt = sum(map(len, asked.prompts))
    response = sum(len(answer.completion.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": response, "total_tokens": prompt + response}


def generated(request_id: str, asked: Asked, answers: Sequence[Answer], *, with_log_probs: bool) -> dict[str, Any]:
    """The answer of verifiers' route: tokens by their ids."""
    choices = []
    for answer in answers:
        tokens, numbers = answer.completion.token_ids.tolist(), answer.completion.policy_log_probs.tolist()
        content = [{"token": f"token_id:{token}", "logprob": number} for token, number in zip(tokens, numbers)]
        log_probs = {"content": content} if with_log_probs else None
        choices.append({"index": answer.index, "token_ids": tokens, "logprobs": log_probs} | _end_of(answer))
    body = {"request_id": request_id, "choices": choices, "usage": usage(asked, answers)}
    return body | {"tba": _version(answers)}


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI shapes it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
