"""The responses to one HTTP request while they come: texts grow, stop strings end them, and a client that leaves cancels
them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

import numpy as np

from tba.engine.contract import RunningTokens
from tba.serve.bodies import Asked
from tba.serve.driver import Driver, Job, Update
from tba.serve.text import ResponseText
from tba.types import Completion, Prompt, Request

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """A whole response: Answer(index=0, text="46", completion=Completion(...))"""

    index: int
    text: str
    """Without the stop string that ended it."""
    completion: Completion
    """Up to the token that completed a stop string."""


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
    """The responses to one request: number i answers prompt i // n."""

    def __init__(self, driver: Driver, asked: Asked, decode: Decode, *, unique: str, streams: bool) -> None:
        """Asks the driver for them, or raises QueueFull; `unique` is part of no other request."""
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._latest: dict[int, Update] = {}
        """The newest update of each response that was not read yet: a client that reads slowly costs no memory."""
        self._news = asyncio.Event()
        requests = requests_of(asked, unique)
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
        self._latest[index] = update
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
            finish="stop" if text.is_stopped else completion.finish,
        )
        return Answer(index=index, text=text.whole, completion=kept)


def requests_of(asked: Asked, unique: str) -> list[Request]:
    """A request for each response: random numbers follow from the seed, the prompt and the sample's number."""
    return [
        Request(prompt=prompt, first_sample=sample, sampling=asked.sampling)
        for prompt in (make_prompt(ids, asked.seed, f"{unique}/{place}") for place, ids in enumerate(asked.prompts))
        for sample in range(asked.num_samples)
    ]


def make_prompt(token_ids: Sequence[int], seed: int | None, unique: str) -> Prompt:
    ids = np.array(token_ids, dtype=np.int32)
    name = unique if seed is None else f"seed {seed}/{blake2b(ids.tobytes(), digest_size=16).hexdigest()}"
    return Prompt(id=name, token_ids=ids, text="")
