"""The routes of a served engine.

GET  /health                    whether the server runs (no token needed)
GET  /v1/models                 the model, with `max_model_len`
POST /v1/chat/completions       OpenAI's routes, also as streams
POST /v1/completions
POST /inference/v1/generate     tokens in, tokens out (verifiers' TrainClient, vLLM)
POST /rl/start_session          a key: calls with it belong to one episode (AReaL's convention)
POST /rl/set_reward             with that key: the reward of the episode, or of one call
POST /rl/end_session            with that key: the episode's trajectories
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as WebRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from tba.serve.answers import Answer, Answers
from tba.serve.bodies import (
    Asked,
    BadRequest,
    ChatBody,
    CompletionBody,
    GenerateBody,
    Limits,
    OpenAIFields,
    RewardBody,
    StartBody,
    asked,
    parse_body,
)
from tba.serve.chat import Call, Chat, template_messages
from tba.serve.driver import DriverClosed, EngineFailed, JobQueue, QueueFull
from tba.serve.sessions import KEY_PREFIX, Session, Sessions, TooManySessions
from tba.serve.shapes import Shape, error_body, generated
from tba.tasks.data.make_prompt import PromptRefused, encode
from tba.tasks.environments.chat_format import ChatFormat

MOST_BYTES = 2**25
"""Longest body of a request."""
CLIENT_GONE = 499
"""Status, which nobody reads, of a request whose client left."""
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""Kinds of errors by status; others are invalid_request_error, from 500 on server_error."""

FAILURES: dict[type[Exception], dict[str, Any]] = {
    QueueFull: {"status": 429, "code": "queue_full", "headers": {"Retry-After": "1"}},
    TooManySessions: {"status": 429, "code": "too_many_sessions", "headers": {"Retry-After": "10"}},
    EngineFailed: {"status": 500, "code": "engine_failed"},
    DriverClosed: {"status": 503, "code": "shutting_down"},
}
"""Answers to what may happen to a good request."""


class Caller(NamedTuple):
    """Who asks: the key of a session with the session, or neither."""

    key: str | None
    session: Session | None


Handler = Callable[[WebRequest, Any, Caller], Awaitable[Response]]


class Service:
    """Answers requests with one driver."""

    def __init__(
        self,
        driver: JobQueue,
        tokenizer: PreTrainedTokenizerBase,
        sessions: Sessions,
        *,
        name: str | None,
        token: str | None = None,
        template: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
    ) -> None:
        """`name` is the model's, None = clients may use any; `token` is demanded of every client, None = of none; `template`
        are arguments of the chat template where a request gives no others; `limits` None = those of the model."""
        self.driver, self.tokenizer, self.sessions = driver, tokenizer, sessions
        self.name, self.token, self.template = name, token, template or {}
        engine = driver.engine
        self.limits = limits or Limits(max_length=engine.max_length, vocabulary=engine.vocabulary)
        self.created = int(time.time())
        # Random numbers are keyed by prompt ids: those of another start of the server must not come again.
        self._start, self._numbers = secrets.token_hex(8), itertools.count()
        self._token_text = lru_cache(maxsize=None)(lambda token: tokenizer.decode([token]))
        self._form = lru_cache(maxsize=64)(self._make_form)
        # A client's own template would be a program of its own; the others are not arguments of a template.
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)

    def app(self) -> Starlette:
        routes = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completions,
            "/inference/v1/generate": self._generate,
            "/rl/start_session": self._start_session,
            "/rl/set_reward": self._set_reward,
            "/rl/end_session": self._end_session,
        }
        return Starlette(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                Route("/v1/models", self._models, methods=["GET"]),
                *(Route(path, partial(self._post, handler), methods=["POST"]) for path, handler in routes.items()),
            ],
            exception_handlers={BadRequest: _bad_request, HTTPException: _http_error, Exception: _server_error},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self.driver.close)

    # --- who asks, and what -----------------------------------------------------------------------------------------

    def _caller(self, request: WebRequest) -> Caller:
        """Who asks; a key of a session stands for the token."""
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if key.startswith(KEY_PREFIX):
            if (session := self.sessions.find(key)) is None:
                raise BadRequest("this session has ended, or was never started.", status=401, code="invalid_api_key")
            return Caller(key, session)
        if self.token is not None and not hmac.compare_digest(key.encode(), self.token.encode()):
            raise BadRequest(
                "the server's token is needed: Authorization: Bearer TOKEN.", status=401, code="invalid_api_key"
            )
        return Caller(None, None)

    async def _post(self, handler: Handler, request: WebRequest) -> Response:
        caller = self._caller(request)
        fields = await _json_of(request)
        try:
            return await handler(request, fields, caller)
        except tuple(FAILURES) as error:
            raise BadRequest(str(error), **FAILURES[type(error)]) from None

    def _check_model(self, model: str | None) -> None:
        if None not in (model, self.name) and model != self.name:
            raise BadRequest(
                f"the model {model!r} is not served here: {self.name!r} is.",
                status=404,
                param="model",
                code="model_not_found",
            )

    # --- plain routes -----------------------------------------------------------------------------------------------

    async def _health(self, request: WebRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: WebRequest) -> Response:
        self._caller(request)
        model = {"id": self.name or "policy", "object": "model", "created": self.created, "owned_by": "tba"}
        model |= {"max_model_len": self.driver.engine.max_length, "tba": {"version": self.driver.version}}
        return JSONResponse({"object": "list", "data": [model]})

    # --- responses --------------------------------------------------------------------------------------------------

    async def _chat(self, request: WebRequest, fields: Any, caller: Caller) -> Response:
        body = parse_body(ChatBody, fields)
        chat = self._chat_of(body)
        try:
            prompt = chat.prompt_ids(caller.session.calls if caller.session else (), self.driver.engine.stop_ids)
        except PromptRefused as error:
            raise BadRequest(f"messages: {error}", param="messages") from None
        most = body.max_completion_tokens or body.max_tokens
        wanted = asked(body, [prompt], limits=self.limits, max_tokens=most, chat=chat)
        return await self._answer(request, body, wanted, caller, is_chat=True, with_log_probs=bool(body.logprobs))

    def _chat_of(self, body: ChatBody) -> Chat:
        if self.tokenizer.chat_template is None:
            raise BadRequest("this model has no chat template: use /v1/completions.", param="messages")
        given = body.chat_template_kwargs or {}
        if reserved := sorted(self._reserved & given.keys()):
            raise BadRequest(
                f"chat_template_kwargs: {reserved[0]} is not for the template.", param="chat_template_kwargs"
            )
        tools = [] if body.tool_choice == "none" else [tool.model_dump() for tool in body.tools or ()]
        kind = json.dumps([tools, {**self.template, **given}])
        messages = template_messages([message.plain() for message in body.messages])
        return Chat(kind=kind, form=self._form(kind), messages=messages)

    def _make_form(self, kind: str) -> ChatFormat:
        tools, template = json.loads(kind)
        try:
            return ChatFormat(self.tokenizer, tools, template)
        except ValueError as error:
            raise BadRequest(str(error), param="tools" if tools else "messages") from None

    async def _completions(self, request: WebRequest, fields: Any, caller: Caller) -> Response:
        body = parse_body(CompletionBody, fields)
        try:
            prompts = [encode(text, self.tokenizer) if isinstance(text, str) else text for text in body.prompts]
        except PromptRefused as error:
            raise BadRequest(f"prompt: it {error}", param="prompt") from None
        # 16, as for OpenAI: clients of this route count on it.
        wanted = asked(body, prompts, limits=self.limits, max_tokens=body.max_tokens or 16)
        with_log_probs = body.logprobs is not None
        return await self._answer(request, body, wanted, caller, is_chat=False, with_log_probs=with_log_probs)

    async def _answer(
        self,
        request: WebRequest,
        body: OpenAIFields,
        wanted: Asked,
        caller: Caller,
        *,
        is_chat: bool,
        with_log_probs: bool,
    ) -> Response:
        self._check_model(body.model)
        shape = Shape(
            id=self._new_id("chatcmpl" if is_chat else "cmpl"),
            created=int(time.time()),
            model=self.name or body.model or "policy",
            is_chat=is_chat,
            asked=wanted,
            with_log_probs=with_log_probs,
            with_token_ids=bool(body.return_token_ids),
            token_text=self._token_text,
        )
        # With tools nothing is told before the end, so nobody looks at running responses.
        answers = self._ask(wanted, caller, shape.id, streams=bool(body.stream) and not shape.has_tools)
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return StreamingResponse(
                self._stream(answers, shape, caller, with_usage=with_usage), media_type="text/event-stream"
            )
        found = await unless_gone(request, answers.all())
        if found is None:
            return Response(status_code=CLIENT_GONE)
        self._note(caller, shape.id, wanted, found)
        return _json(shape.whole(found))

    async def _stream(
        self, answers: Answers, shape: Shape, caller: Caller, *, with_usage: bool
    ) -> AsyncIterator[bytes]:
        found: list[Answer] = []
        try:
            async for piece in answers.pieces():
                # Noted first: the client may go on from it as soon as it has the last chunk.
                if piece.answer is not None:
                    found.append(piece.answer)
                    self._note(caller, shape.id, shape.asked, [piece.answer])
                if (chunk := shape.chunk(piece)) is not None:
                    yield _event(chunk)
        except (EngineFailed, DriverClosed) as error:  # the status is sent already: an event says it
            yield _event(error_body(str(error), "server_error"))
            return
        if with_usage:
            yield _event(shape.last_chunk(found))
        yield b"data: [DONE]\n\n"

    async def _generate(self, request: WebRequest, fields: Any, caller: Caller) -> Response:
        body = parse_body(GenerateBody, fields)
        self._check_model(body.model)
        sampling = body.sampling_params
        wanted = asked(sampling, [body.token_ids], limits=self.limits, max_tokens=sampling.max_tokens)
        name = self._new_id("gen")
        found = await unless_gone(request, self._ask(wanted, caller, name, streams=False).all())
        if found is None:
            return Response(status_code=CLIENT_GONE)
        self._note(caller, name, wanted, found)
        return _json(generated(name, wanted, found, with_log_probs=sampling.logprobs is not None))

    def _ask(self, wanted: Asked, caller: Caller, name: str, *, streams: bool) -> Answers:
        count = len(wanted.prompts) * wanted.num_samples
        if count > self.driver.most_open:
            raise BadRequest(
                f"the request asks for {count} responses, and this server holds {self.driver.most_open}.", param="n"
            )
        decode = partial(self.tokenizer.decode, skip_special_tokens=wanted.skips_special)
        requests = wanted.requests(name) if caller.session is None else caller.session.requests(wanted, name)
        return Answers(self.driver, requests, wanted, decode, name=name, streams=streams)

    def _new_id(self, kind: str) -> str:
        return f"{kind}-{self._start}-{next(self._numbers)}"

    def _note(self, caller: Caller, name: str, wanted: Asked, answers: list[Answer]) -> None:
        """Keep answers in the session of the caller."""
        if caller.session is not None:
            # A response for which there was no room is no part of the episode.
            kept = [answer for answer in answers if len(answer.completion.token_ids)]
            caller.session.calls += [call_of(name, wanted, answer) for answer in kept]

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def _start_session(self, request: WebRequest, fields: Any, caller: Caller) -> Response:
        body = parse_body(StartBody, fields)
        key, session = self.sessions.start(body.task_id)
        return JSONResponse({"session_id": session.id, "api_key": key})

    async def _set_reward(self, request: WebRequest, fields: Any, caller: Caller) -> Response:
        body = parse_body(RewardBody, fields)
        _, session = _of_session(caller)
        try:
            session.set_reward(body.reward, body.interaction_id)
        except KeyError as error:
            raise BadRequest(error.args[0], param="interaction_id") from None
        return JSONResponse({"message": "success", "interaction_count": len(session.calls)})

    async def _end_session(self, request: WebRequest, fields: Any, caller: Caller) -> Response:
        key, session = _of_session(caller)
        self.sessions.end(key)
        return _json(session.as_json())


def _of_session(caller: Caller) -> tuple[str, Session]:
    if caller.key is None or caller.session is None:
        raise BadRequest(
            "this route needs the key of a session, which /rl/start_session gives.", status=401, code="invalid_api_key"
        )
    return caller.key, caller.session


def call_of(name: str, wanted: Asked, answer: Answer) -> Call:
    completion = answer.completion
    return Call(
        id=name,
        prompt_ids=np.array(wanted.prompts[answer.index // wanted.num_samples], dtype=np.int32),
        token_ids=completion.token_ids,
        policy_log_probs=completion.policy_log_probs,
        behaviour_log_probs=completion.behaviour_log_probs,
        version_spans=completion.version_spans,
        finish=completion.finish,
        chat=wanted.chat,
        message=template_messages([answer.message])[0],
    )


async def unless_gone(request: WebRequest, work: Coroutine[Any, Any, list[Answer]]) -> list[Answer] | None:
    """The result of some work, which is cancelled when the client leaves: then None."""

    async def wait_until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(wait_until_gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _json_of(request: WebRequest) -> Any:
    """The body as JSON; none at all is {}."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise BadRequest(f"the body has more than {MOST_BYTES} bytes.", status=413)
    # A page in a browser may send other kinds of bodies to any address without asking.
    if body and request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise BadRequest("the body must be JSON, with Content-Type: application/json.", status=415)
    try:
        return json.loads(body) if body else {}
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}.") from None


def _json(value: dict[str, Any]) -> Response:
    return Response(_dumped(value), media_type="application/json")


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _dumped(value) + b"\n\n"


def _dumped(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


async def _bad_request(request: WebRequest, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    kind = KINDS.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    body = error_body(str(error), kind, param=error.param, code=error.code)
    return JSONResponse(body, status_code=error.status, headers=error.headers)


async def _http_error(request: WebRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_body(
        f"{request.method} {request.url.path}: {error.detail}.",
        KINDS[404] if error.status_code == 404 else "invalid_request_error",
    )
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _server_error(request: WebRequest, error: Exception) -> Response:
    return JSONResponse(error_body(f"{type(error).__name__}: {error}", "server_error"), status_code=500)
