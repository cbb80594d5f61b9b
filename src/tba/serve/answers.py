"""The responses to one HTTP request while they come: texts grow, stop strings end them, and a client that leaves cancels
them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tba.engine.contract import RunningTokens
from tba.serve.bodies import Asked
from tba.serve.chat import Message
from tba.serve.driver import Job, JobQueue, Update
from tba.serve.text import ResponseText
from tba.types import Completion, Request

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """A whole response: Answer(index=0, text="46", completion=Completion(...))"""

    index: int
    text: str
    """Without the stop string that ended it."""
    completion: Completion
    """Up to the token that completed a stop string."""
    message: Message
    """The response in OpenAI's form, with its tool calls."""

    @property
    def finish(self) -> str:
        return "tool_calls" if "tool_calls" in self.message else self.completion.finish


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """What has come of a response since the piece before."""

    index: int
    text: str
    token_ids: np.ndarray
    log_probs: np.ndarray
    answer: Answer | None
    """The whole response; None = more is to come."""


class Answers:
    """The responses to one request of a client: number i answers prompt i // n."""

    def __init__(
        self,
        driver: JobQueue,
        requests: Sequence[Request],
        asked: Asked,
        decode: Decode,
        *,
        name: str,
        streams: bool,
    ) -> None:
        """Asks the driver for them, or raises QueueFull; `name` is part of the ids of tool calls."""
        self._driver, self._requests, self._chat, self._name = driver, requests, asked.chat, name
        self._loop = asyncio.get_running_loop()
        self._latest: dict[int, Update] = {}
        """The newest update of each response that was not read yet: a client that reads slowly costs no memory."""
        self._news = asyncio.Event()
        self._texts = [ResponseText(decode, stop=asked.stop, stop_ids=asked.stop_ids) for _ in requests]
        self._num_read, self._num_sent = [0] * len(requests), [0] * len(requests)
        is_watched = streams or bool(asked.stop) or bool(asked.stop_ids)
        self._jobs = [
            Job(request=request, deliver=partial(self._deliver, index), is_watched=is_watched)
            for index, request in enumerate(requests)
        ]
        driver.submit(self._jobs)

    def _deliver(self, index: int, update: Update) -> None:
        """Called in the driver's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, index, update)

    def _take(self, index: int, update: Update) -> None:
        self._latest[index] = without_prefix(update, len(self._requests[index].prefix_ids))
        self._news.set()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces as they come; an error of the engine is raised. Whoever stops reading cancels what is unfinished."""
        unfinished = set(range(len(self._jobs)))
        try:
            while unfinished:
                await self._news.wait()
                self._news.clear()
                while self._latest:
                    index, update = self._latest.popitem()
                    if isinstance(update, Exception):
                        raise update
                    if isinstance(update, Completion):
                        unfinished.discard(index)
                    yield self._piece(index, update)
        finally:
            self._driver.end([self._jobs[index] for index in unfinished])

    async def all(self) -> list[Answer]:
        """All responses, in order."""
        found = [piece.answer async for piece in self.pieces() if piece.answer is not None]
        return sorted(found, key=lambda answer: answer.index)

    def _piece(self, index: int, update: RunningTokens | Completion) -> Piece:
        text, job = self._texts[index], self._jobs[index]
        is_complete, was_stopped = isinstance(update, Completion), text.is_stopped
        new = text.read(update.token_ids[self._num_read[index] :].tolist(), is_complete=is_complete)
        self._num_read[index] = len(update.token_ids)
        if text.is_stopped and not was_stopped and not is_complete:
            self._driver.end([job])  # the completion follows, with what no one needs at its end
        tokens = slice(self._num_sent[index], text.num_tokens)
        piece = Piece(
            index=index,
            text=new,
            token_ids=update.token_ids[tokens],
            log_probs=update.policy_log_probs[tokens],
            answer=self._answer(index, update) if isinstance(update, Completion) else None,
        )
        self._num_sent[index] += len(piece.token_ids)
        return piece

    def _answer(self, index: int, completion: Completion) -> Answer:
        text = self._texts[index]
        count = text.num_tokens
        assert count is not None
        kept = replace(
            completion,
            token_ids=completion.token_ids[:count],
            behaviour_log_probs=completion.behaviour_log_probs[:count],
            policy_log_probs=completion.policy_log_probs[:count],
            version_spans=tuple(span for span in completion.version_spans if span[0] < max(count, 1)),
            # A response without room for a token was cut off, whatever came before it.
            finish="stop" if text.is_stopped else completion.finish if count else "length",
        )
        calls = {} if self._chat is None else self._chat.calls(kept.token_ids, f"{self._name}-{index}")
        message = {"role": "assistant", "content": text.whole, **calls}
        return Answer(index=index, text=text.whole, completion=kept, message=message)


def without_prefix(update: Update, count: int) -> Update:
    """An update without the tokens that its request began with."""
    if not count or isinstance(update, Exception):
        return update
    own = slice(count, None)
    if isinstance(update, RunningTokens):
        return update._replace(token_ids=update.token_ids[own], policy_log_probs=update.policy_log_probs[own])
    return replace(
        update,
        token_ids=update.token_ids[own],
        behaviour_log_probs=update.behaviour_log_probs[own],
        policy_log_probs=update.policy_log_probs[own],
        version_spans=tuple((max(0, first - count), version) for first, version in update.version_spans),
        num_prefix_tokens=0,
    )
