"""A judge: a model behind an OpenAI-compatible endpoint (vLLM's, a provider's) whose opinion is the reward.

    from tba import Judge                                                               # rewards.py

    helpful = Judge(url="http://127.0.0.1:8000/v1", model="judge-7b", prompt="Q: {prompt} A: {response} Does it help?")

It is used by `--reward rewards.py:helpful`. With {response} each response gets a score. With {responses} the responses to a
prompt are ranked in one request. A question that fails gives no reward, never 0.

HTTP is the standard library's, in threads: no HTTP library is a dependency, and a judge takes far longer than a connection.
Nothing here imports torch, so that a reward worker is back in a moment.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tba.tasks.rewards.load_function import shortened

REQUESTS_AT_ONCE = 64
"""Requests that a worker has in flight at most; search.reward_workers says how many groups are judged at once."""
RETRIED = frozenset((408, 409, 425, 429, *range(500, 600)))
"""HTTP statuses after which the same request may succeed."""
SCORE_LINE = "End your answer with the line `Score: N`, where N is a number from 0 (worst) to 10 (best)."
RANKING_LINE = (
    "End your answer with a line of the numbers of all {count} responses from best to worst: `Ranking: {example}`."
)
SCORE = re.compile(r"\bscore\b[^\w-]*(-?\d+(?:\.\d+)?)", re.IGNORECASE)
BARE_SCORE = re.compile(r"\A\s*(\d+(?:\.\d+)?)(?:\s*/\s*10)?[\s.]*\Z")
"""An answer that is a number alone: 7 or 7/10."""
RANKING = re.compile(r"\branking\b[^\w\n]*((?:\d+[^\w\n]+)*\d+)", re.IGNORECASE)
BARE_RANKING = re.compile(r"\A\W*((?:\d+[^\w\n]+)*\d+)\W*\Z")


class JudgeError(RuntimeError):
    """A question to a judge that has no answer, or none that can be read."""


@dataclass(kw_only=True, eq=False)
class Judge:
    """A reward function that asks a judge. Equal questions are asked once."""

    url: str
    """Address of the endpoint up to its version: http://127.0.0.1:8000/v1"""
    model: str
    prompt: str
    """The question, with {prompt}, {response} or {responses}, and the names of further columns of the data."""
    key_env: str | None = None
    """Name of the environment variable with the API key; search.reward_environment must name it too. None = no key."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of a request: {"temperature": 0, "max_tokens": 500}"""
    timeout_seconds: float = 25.0
    """Deadline of a question with its retries. Keep it below search.reward_timeout_seconds, which kills the worker."""
    cache_file: str | Path = ":memory:"
    """SQLite file of the answers, which all workers and later runs share; by default each worker remembers its own."""
    seed: int = 0
    """Seed of the order in which responses are shown to be ranked. The order depends on it and the texts alone."""
    counts: Counter[str] = field(default_factory=Counter, init=False)
    """Requests, answers from the cache and tokens since this worker started."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url!r} of the judge is none: it begins with http:// or https://.")
        if ("{response}" in self.prompt) == ("{responses}" in self.prompt):
            raise ValueError(
                "prompt of the judge: write {response} where a response goes, to have each scored, or {responses}, to have "
                "all of a prompt ranked."
            )
        if self.key_env is not None and self.key_env not in os.environ:
            raise ValueError(f"key_env of the judge: the environment variable {self.key_env} is not set")

    @property
    def per_sample(self) -> bool:
        """Whether a reward does not depend on the other responses: they are not ranked."""
        return "{responses}" not in self.prompt

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | BaseException]:
        """Rewards in 0..1 of the responses to one prompt; an exception where a question failed."""
        values = {name: own[0] for name, own in columns.items() if isinstance(own, list)}
        values["prompt"] = text_of(prompts[0])
        texts = [text_of(own) for own in completions]
        rewards = await (self._scored if self.per_sample else self._ranked)(values, sorted(set(texts)))
        # Totals of this worker, in the rewards' log.
        requests, cached, sent, received = (self.counts[name] for name in ("requests", "cached", "sent", "received"))
        totals = f"{requests} requests, {cached} answers from the cache, {sent} + {received} tokens"
        print(f"judge {self.model}: {totals}", flush=True)
        return [rewards[text] for text in texts]

    async def _scored(self, values: Mapping[str, Any], texts: list[str]) -> dict[str, float | BaseException]:
        questions = (filled(self.prompt, {**values, "response": text}) for text in texts)
        asked = (self._answer(f"{question}\n\n{SCORE_LINE}", score_in) for question in questions)
        return dict(zip(texts, await asyncio.gather(*asked, return_exceptions=True)))

    async def _ranked(self, values: Mapping[str, Any], texts: list[str]) -> dict[str, float | BaseException]:
        """Rewards of different texts by their ranks: 1 for the best, 0 for the worst, .5 for one without others."""
        if len(texts) == 1:
            return {texts[0]: 0.5}
        # Judges prefer certain places. Seeded by the texts, the same group is the same question when it comes again.
        random.Random(f"{self.seed} {values['prompt']} {texts}").shuffle(texts)
        shown = "\n\n".join(f"[{number}]\n{text}" for number, text in enumerate(texts, 1))
        example = " > ".join(str(number) for number in range(len(texts), 0, -1))
        question = filled(self.prompt, {**values, "responses": shown})
        line = RANKING_LINE.format(count=len(texts), example=example)
        try:
            order = await self._answer(f"{question}\n\n{line}", partial(ranking_in, count=len(texts)))
        except Exception as error:  # each sample says why it has no reward
            return dict.fromkeys(texts, error)
        return {texts[number - 1]: 1.0 - rank / (len(texts) - 1) for rank, number in enumerate(order)}

    async def _answer(self, question: str, read: Callable[[str], Any]) -> Any:
        """What `read` finds in the judge's answer, from the cache where the question was asked before."""
        body = {"model": self.model, "messages": [{"role": "user", "content": question}], **self.request}
        payload = json.dumps(body).encode()
        answers, key = open_cache(str(Path(self.cache_file).expanduser())), sha256(self.url.encode() + payload).digest()
        found = answers.execute("SELECT value FROM answers WHERE question = ?", (key,)).fetchone()
        if found is not None:
            self.counts["cached"] += 1
            return json.loads(found[0])
        # Read before it is kept: an answer that cannot be read is asked for again the next time.
        value = read(await self._asked(payload))
        answers.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(value)))
        return value

    async def _asked(self, payload: bytes) -> str:
        """The text of the judge's answer. Overloads and lost connections are tried again until the deadline."""
        deadline, pause = time.monotonic() + self.timeout_seconds, 0.1
        while True:
            self.counts["requests"] += 1
            left = max(deadline - time.monotonic(), 0.001)  # a socket refuses 0
            status, wait, text = None, 0.0, "no answer"
            try:
                sent = asyncio.get_running_loop().run_in_executor(threads(), self._post, payload, left)
                # The socket's own time-out starts anew with every byte.
                status, wait, text = await asyncio.wait_for(sent, left)
            except (OSError, HTTPException, asyncio.TimeoutError) as error:
                text = str(error) or text
            if status == 200:
                break
            problem = shortened(text if status is None else f"HTTP status {status}: {text}", 200)
            if status is not None and status not in RETRIED:
                raise JudgeError(f"{self.url}: {problem}")
            # A random part, so that the questions of all workers do not come back at once.
            seconds = wait + pause * random.uniform(0.5, 1.0)
            if time.monotonic() + seconds >= deadline:
                raise JudgeError(
                    f"{self.url} did not answer within timeout_seconds={self.timeout_seconds:g}: {problem}"
                )
            await asyncio.sleep(seconds)
            pause *= 2.0
        try:
            reply = json.loads(text)
            content, finish = reply["choices"][0]["message"]["content"], reply["choices"][0].get("finish_reason")
            usage = reply.get("usage") or {}
            self.counts["sent"] += usage.get("prompt_tokens") or 0
            self.counts["received"] += usage.get("completion_tokens") or 0
        except (ValueError, LookupError, TypeError, AttributeError):
            raise JudgeError(f"{self.url} sent no chat completion: {shortened(text, 200)}") from None
        # The number in an answer that is cut off may be one of its thoughts.
        if finish == "length" or not isinstance(content, str):
            raise JudgeError(f"the judge's answer is cut off or empty (finish_reason={finish}): raise max_tokens.")
        return content

    def _post(self, payload: bytes, timeout_seconds: float) -> tuple[int, float, str]:
        """Status, seconds to wait and text of the answer to a request. Runs in a thread."""
        request = Request(f"{self.url.rstrip('/')}/chat/completions", payload, {"Content-Type": "application/json"})
        if self.key_env is not None:
            # Unredirected: the key is not for another host.
            request.add_unredirected_header("Authorization", f"Bearer {os.environ[self.key_env]}")
        try:
            with urlopen(request, timeout=timeout_seconds) as reply:
                return reply.status, 0.0, reply.read().decode(errors="replace")
        except HTTPError as error:
            wait = error.headers.get("Retry-After", "")  # seconds; a date counts as none
            seconds = float(wait) if re.fullmatch(r"\d+(\.\d+)?", wait) else 0.0
            return error.code, seconds, error.read().decode(errors="replace")


def text_of(value: Any) -> str:
    """A prompt or a completion as text; of a chat its messages, with their roles where there are several."""
    if isinstance(value, str):
        return value
    if len(value) == 1:
        return str(value[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in value)


def filled(template: str, values: Mapping[str, Any]) -> str:
    """A template with its {names} filled in, once: a response that has {prompt} in it stays as it is."""

    def value_of(name: re.Match[str]) -> str:
        if name[1] not in values:
            raise JudgeError(
                f"prompt of the judge has {name[0]}, which is no column of the data: it has {', '.join(values)}."
            )
        return str(values[name[1]])

    return re.sub(r"\{([A-Za-z_]\w*)\}", value_of, template)


def score_in(answer: str) -> float:
    """The last score of an answer, 0..10, as a reward."""
    found = SCORE.findall(answer) or BARE_SCORE.findall(answer)
    score = float(found[-1]) if found else -1.0
    if not 0.0 <= score <= 10.0:
        raise JudgeError(f"the judge's answer has no score from 0 to 10: {shortened(answer, 200)}")
    return score / 10.0


def ranking_in(answer: str, count: int) -> list[int]:
    """The last ranking of an answer: the numbers 1..count, the best first."""
    found = RANKING.findall(answer) or BARE_RANKING.findall(answer)
    order = [int(number) for number in re.findall(r"\d+", found[-1])] if found else []
    if sorted(order) != list(range(1, count + 1)):
        raise JudgeError(f"the judge's answer does not rank the {count} responses: {shortened(answer, 200)}")
    return order


@cache
def open_cache(path: str) -> sqlite3.Connection:
    """The answers of a file, or of this process alone. A connection cannot be pickled, so the judge does not hold it."""
    answers = sqlite3.connect(path, timeout=10.0, isolation_level=None)
    # What a power cut loses is asked again.
    answers.execute("PRAGMA synchronous = OFF")
    answers.execute("CREATE TABLE IF NOT EXISTS answers (question BLOB PRIMARY KEY, value TEXT) WITHOUT ROWID")
    return answers


@cache
def threads() -> ThreadPoolExecutor:
    """Threads that wait for the judges of this process."""
    return ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="judge")
