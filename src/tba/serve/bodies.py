"""What clients send: the bodies of requests, checked, and made into prompts and samplings.

Fields that change nothing here are left out, such as `user`. Fields that would change the response and are not supported are
refused, unless they have the value that changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tba.serve.chat import Chat
from tba.types import Prompt, Request, Sampling

IGNORED = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id"),
        *("priority", "cache_salt", "parallel_tool_calls", "spaces_between_special_tokens", "detokenize"),
        "routed_experts_prompt_start",
    )
)
"""Fields that change no response here."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "response_format": ({"type": "text"},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "modalities": (["text"],),
}
"""Fields that are not supported, with the values that ask for nothing; null does neither."""
LEAST_TEMPERATURE = 0.01
"""Smaller temperatures than this, except 0, overflow."""
DEFAULT_TOKENS = 1024
MOST_SAMPLES = 1024


class BadRequest(ValueError):
    """A request that is answered with an error of its own, in OpenAI's shape."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status, self.headers = param, code, status, dict(headers or {})


class Body(BaseModel):
    # Strict: "1" is no number, as for OpenAI.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


AnyBody = TypeVar("AnyBody", bound=Body)
Count = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0)]


class SamplingFields(Body):
    """How to sample: the fields that the three routes have in common."""

    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: int | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool | None = None

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in stops:
            raise BadRequest("stop: an empty string would end every response before it begins.", param="stop")
        return stops

    def sampling(self, max_tokens: int) -> Sampling:
        temperature = 1.0 if self.temperature is None else self.temperature
        if 0 < temperature < LEAST_TEMPERATURE:
            raise BadRequest(
                f"temperature={temperature:g} is below {LEAST_TEMPERATURE}: use 0, which is greedy.",
                param="temperature",
            )
        if (self.min_tokens or 0) > max_tokens:
            raise BadRequest(f"min_tokens={self.min_tokens} is more than max_tokens={max_tokens}.", param="min_tokens")
        return Sampling(
            max_new_tokens=max_tokens,
            min_new_tokens=self.min_tokens or 0,
            temperature=temperature or 1.0,
            greedy=temperature == 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),  # -1 is vLLM's word for all
        )


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class OpenAIFields(SamplingFields):
    """Fields of OpenAI's two routes."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class Function(BaseModel):
    # Fields that are left out say nothing to a policy, such as `strict`.
    model_config = ConfigDict(extra="ignore", strict=True)
    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class Tool(BaseModel):
    type: Literal["function"]
    function: Function


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True)
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallOfMessage(BaseModel):
    id: str | None = None
    function: CalledFunction


class Message(BaseModel):
    # Other fields are the template's, such as names.
    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCallOfMessage] | None = None

    def plain(self) -> dict[str, Any]:
        """The message with its text in one string."""
        found: dict[str, Any] = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            if other := [part.get("type") for part in self.content if not isinstance(part.get("text"), str)]:
                raise BadRequest(
                    f"messages: content of the type {other[0]!r} is not supported: text is.", param="messages"
                )
            found["content"] = "".join(part["text"] for part in self.content)
        return found


class ChatBody(OpenAIFields):
    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(OpenAIFields):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Literal[0, 1] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class EngineSampling(SamplingFields):
    logprobs: Literal[0, 1] | None = None
    prompt_logprobs: Literal[0] | None = None


class GenerateBody(Body):
    """verifiers' route: tokens in, tokens out."""

    model: str | None = None
    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: EngineSampling = EngineSampling()
    stream: Literal[False] | None = None


class StartBody(Body):
    task_id: str | None = None


class RewardBody(Body):
    reward: float
    interaction_id: str | None = None


def parse_body(kind: type[AnyBody], fields: Any) -> AnyBody:
    """A body of this kind from JSON."""
    if not isinstance(fields, dict):
        raise BadRequest(f"the body is {type(fields).__name__} and not a JSON object.")
    fields = supported(fields)
    if isinstance(inner := fields.get("sampling_params"), dict):
        fields["sampling_params"] = supported(inner)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        found = error.errors()[0]
        # Parts of unions follow the field's name, which say nothing to a client.
        length = 2 if found["loc"][0] in ("sampling_params", "stream_options") else 1
        name = ".".join(str(part) for part in found["loc"][:length])
        what = "there is no such field" if found["type"] == "extra_forbidden" else found["msg"]
        if found["type"] not in ("extra_forbidden", "missing"):
            what += f", got {found['input']!r:.80}"
        raise BadRequest(f"{name}: {what}.", param=name) from None


def supported(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that mean something here."""
    for name, values in NEUTRAL.items():
        if fields.get(name) is not None and fields[name] not in values:
            raise BadRequest(f"{name}={fields[name]!r} is not supported: leave it out.", param=name)
    return {name: value for name, value in fields.items() if name not in IGNORED and name not in NEUTRAL}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of the model: Limits(max_length=2048, vocabulary=151936)"""

    max_length: int
    """Longest prompt and response together."""
    vocabulary: int
    default_tokens: int = DEFAULT_TOKENS
    """Most tokens of a response where a request does not say, and the context has room."""

    def check(self, prompt: list[int]) -> None:
        if not prompt:
            raise BadRequest("a prompt has no tokens: an engine needs one, such as the BOS.", param="prompt")
        if (largest := max(prompt)) >= self.vocabulary:
            raise BadRequest(f"token id {largest} is beyond the vocabulary of {self.vocabulary}.", param="prompt")


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """What a request asks the engine for, whatever its route.

    Asked(prompts=[[5, 6]], num_samples=2, sampling=Sampling(max_new_tokens=8), seed=None, stop=["\\n"], stop_ids=[])
    """

    prompts: list[list[int]]
    num_samples: int
    """Responses for each prompt."""
    sampling: Sampling
    seed: int | None
    stop: list[str]
    stop_ids: list[int]
    skips_special: bool = True
    """Whether special tokens are left out of the text."""
    chat: Chat | None = None
    """The conversation behind the one prompt; None = the prompts came as texts or tokens."""

    def requests(self, unique: str) -> list[Request]:
        """A request for each response: random numbers follow from the seed, the prompt and the sample's number. `unique` is
        part of no other request."""
        return [
            Request(prompt=prompt, first_sample=sample, sampling=self.sampling, samples=1)
            for prompt in (make_prompt(ids, self.seed, f"{unique}/{place}") for place, ids in enumerate(self.prompts))
            for sample in range(self.num_samples)
        ]


def make_prompt(token_ids: Sequence[int], seed: int | None, unique: str) -> Prompt:
    ids = np.array(token_ids, dtype=np.int32)
    name = unique if seed is None else f"seed {seed}/{blake2b(ids.tobytes(), digest_size=16).hexdigest()}"
    return Prompt(id=name, token_ids=ids, text="")


def asked(
    fields: SamplingFields,
    prompts: list[list[int]],
    *,
    limits: Limits,
    max_tokens: int | None,
    chat: Chat | None = None,
) -> Asked:
    """What a request asks for; `max_tokens` is the most tokens of a response, None = as the room allows."""
    for prompt in prompts:
        limits.check(prompt)
    longest = max(map(len, prompts), default=0)
    if longest + (max_tokens or 1) > limits.max_length:
        wanted = f"{max_tokens} of the response" if max_tokens else "one of the response"
        raise BadRequest(
            f"the prompt has {longest} tokens: with {wanted} that is beyond this model's {limits.max_length}. Shorten the "
            "prompt, or lower max_tokens.",
            param="max_tokens" if longest < limits.max_length else "prompt",
            code="context_length_exceeded",
        )
    most = max_tokens or max(min(limits.default_tokens, limits.max_length - longest), fields.min_tokens or 0)
    return Asked(
        prompts=prompts,
        num_samples=fields.n or 1,
        sampling=fields.sampling(min(most, limits.max_length - longest)),
        seed=fields.seed,
        stop=fields.stops,
        stop_ids=fields.stop_token_ids or [],
        skips_special=fields.skip_special_tokens is not False,
        chat=chat,
    )
