"""Episodes: an engine whose responses are conversations with an environment.

A rollout begins with the reset of K environments. Then each response goes on turn by turn: the engine generates until the
end of the turn, the environment answers, and the answer's tokens are appended with a mask of zeros. The next turn is a
request with all tokens so far as its prefix, so what was generated is never tokenised again, and random numbers go on by
the number of the token.

The engine drives it all, as without environments: it reads requests when it has free slots. Turns that may go on come
first, then new rollouts, so an episode that waits for its environment gives its slot to another. A finished episode passes
through the engine once more, as a request whose prefix is complete, and the engine hands it out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.config import Config
from tba.config.task import code_name
from tba.engine.contract import Engine
from tba.runtime.channels import POLL_SECONDS
from tba.tasks.environments.chat_format import ChatFormat, PlainFormat, Reply
from tba.tasks.environments.host import Answer, EnvironmentSpec, EpisodeKey
from tba.tasks.environments.playground import Finished
from tba.tasks.environments.workers import Environments
from tba.tasks.rewards.pool import RewardUnusable
from tba.types import Completion, Episode, Finish, Prompt, Request, Sampling

OPEN_PER_SLOT = 2
"""Episodes that may be open for each slot of the engine: as many wait for their environments as are generated."""

Message = dict[str, Any]
NOTHING = Finished({}, None)
"""What is left of an episode whose environment is gone."""


def with_environments(engine: Engine, config: Config, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """The engine, with the environments of the config if it has some."""
    environment = config.task.environment
    if not environment.is_there:
        return engine
    spec = EnvironmentSpec(
        classes=environment.classes,
        rewards={name: code_name(code) for name, code in environment.classes.items()},
        tools=environment.tools,
        timeout_seconds=environment.timeout_seconds,
        copies=bool(config.task.rewards),
    )
    log, passed_on = config.run_folder / "logs" / "environments.log", config.search.reward_environment
    episodes = EpisodeEngine(
        engine,
        lambda: Environments(spec, log=log, passed_on=passed_on),
        tokenizer,
        seed=config.seed,
        max_turns=environment.max_turns,
        template=config.task.chat_template_kwargs,
    )
    return cast(Engine, episodes)


class EpisodeEngine:
    """An engine with environments: `generate` yields whole episodes. All else is the engine's own."""

    def __init__(
        self,
        engine: Engine,
        make_environments: Callable[[], Environments],
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        max_turns: int | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        """`template` is what the chat template gets besides messages and tools."""
        self.engine = engine
        self.options: dict[str, Any] = {"seed": seed, "max_turns": max_turns, "template": template}
        """What a clone is made with."""
        self.environments = make_environments()
        self.tokenizer, self.seed, self.max_turns = tokenizer, seed, max_turns
        self._make_environments, self.template = make_environments, template or {}
        self._formats: dict[str, ChatFormat | PlainFormat] = {}
        self._sibling: EpisodeEngine | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def close(self) -> None:
        """End the environments, with those of the clone."""
        self.environments.close()
        if self._sibling is not None:
            self._sibling.close()

    def clone_for_evaluation(self) -> EpisodeEngine:
        """An engine with environments of its own: an evaluation goes on in the middle of a search."""
        if self._sibling is None:
            clone = self.engine.clone_for_evaluation()
            self._sibling = type(self)(clone, self._make_environments, self.tokenizer, **self.options)
        else:
            self._sibling.engine = self.engine.clone_for_evaluation()
        return self._sibling

    def generate(
        self,
        requests: Iterable[Request | None],
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """Yield episodes as they finish; see Engine.generate. `sampling.max_new_tokens` counts the whole conversation."""
        # A host that cannot start is found before anything is read.
        _ = self.environments.ready
        turns = self._turns(iter(requests), samples_per_prompt, sampling, between_steps)
        try:
            for completion in self.engine.generate(
                turns, samples_per_prompt=samples_per_prompt, sampling=sampling, between_steps=turns.between_steps
            ):
                episode = turns.received(completion)
                if episode is not None:
                    yield episode
        finally:
            turns.give_up()

    def _turns(self, *given: Any) -> Turns:
        return Turns(self, *given)

    def format_of(self, kind: str) -> ChatFormat | PlainFormat:
        """How conversations with an environment become tokens."""
        if kind not in self._formats:
            ready = self.environments.ready
            try:
                if self.tokenizer.chat_template is None:
                    self._formats[kind] = PlainFormat(self.tokenizer, ready.tools[kind])
                else:
                    form = self._formats[kind] = ChatFormat(self.tokenizer, ready.tools[kind], self.template)
                    form.check_stops(self.engine.stop_ids, role="user" if kind in ready.steps else "tool")
            except ValueError as error:  # a new searcher would meet it again
                raise RewardUnusable(str(error)) from error
        return self._formats[kind]

    def kind_of(self, prompt: Prompt) -> str:
        """The environment of a prompt: the only one, or the one that its column `environment` names."""
        known = [*self.environments.ready.tools]
        kind = known[0] if len(known) == 1 else prompt.columns.get("environment")
        if kind not in known:
            raise RewardUnusable(
                f"prompt {prompt.id!r} has environment={kind!r} in its row: it must be one of {', '.join(known)}."
            )
        return str(kind)


@dataclass(kw_only=True, eq=False)
class Running:
    """An episode that is not finished."""

    request: Request
    """The rollout that it belongs to."""
    sample_index: int
    kind: str
    prompt: Prompt
    tokens: list[np.ndarray] = field(default_factory=list)
    behaviour: list[np.ndarray] = field(default_factory=list)
    policy: list[np.ndarray] = field(default_factory=list)
    chosen: list[np.ndarray] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turns: int = 0
    """Answers of the environment so far."""
    trains: bool = True
    """Whether the turn that is generated now is trained on."""
    tool_calls: int = 0
    tool_errors: int = 0
    finish: Finish = "stop"
    ended: bool = False
    """Whether the last turn has its end-of-turn token."""
    result: Episode | None = None
    """Set at the end."""

    @property
    def key(self) -> EpisodeKey:
        return self.request.prompt.id, self.sample_index

    @property
    def token_ids(self) -> np.ndarray:
        return np.concatenate([*self.tokens, np.zeros(0, np.int32)]).astype(np.int32)

    @property
    def length(self) -> int:
        return sum(map(len, self.tokens))

    def add_turn(self, completion: Completion) -> np.ndarray:
        """Append what the policy generated after the prefix -> its tokens."""
        own = slice(self.length, None)
        # Spans count from the response's start, so those of later turns follow on.
        self.spans += [span for span in completion.version_spans if not self.spans or span[1] != self.spans[-1][1]]
        columns = completion.token_ids, completion.behaviour_log_probs, completion.policy_log_probs
        self._append(*(column[own] for column in columns), chosen=self.trains)
        return self.tokens[-1]

    def add_answer(self, token_ids: np.ndarray) -> None:
        """Append what the environment and the template wrote. Its log-probs are 0: it is no choice of the policy."""
        zeros = np.zeros(len(token_ids), np.float32)
        self._append(token_ids, zeros, zeros, chosen=False)

    def _append(self, ids: np.ndarray, behaviour: np.ndarray, policy: np.ndarray, *, chosen: bool = True) -> None:
        self.tokens.append(ids)
        self.behaviour.append(behaviour)
        self.policy.append(policy)
        self.chosen.append(np.full(len(ids), chosen))

    def completion(self) -> Completion:
        """The whole episode."""
        assert self.result is not None
        empty = np.zeros(0, np.float32)
        return Completion(
            prompt_id=self.request.prompt.id,
            sample_index=self.sample_index,
            token_ids=self.token_ids,
            behaviour_log_probs=np.concatenate([*self.behaviour, empty]),
            policy_log_probs=np.concatenate([*self.policy, empty]),
            version_spans=tuple(self.spans),
            finish=self.finish,
            episode=self.result,
        )


class Turns:
    """The requests that the engine reads during one call: next turns, finished episodes and new rollouts."""

    def __init__(
        self,
        engine: EpisodeEngine,
        requests: Iterator[Request | None],
        samples_per_prompt: int,
        sampling: Sampling,
        between_steps: Callable[[], None] | None,
    ) -> None:
        self._engine, self._environments = engine, engine.environments
        self._requests, self._samples, self._sampling = requests, samples_per_prompt, sampling
        self.between_steps = between_steps or (lambda: None)
        self._episodes: dict[EpisodeKey, Running] = {}
        self._resetting: dict[tuple[str, int], dict[int, Answer]] = {}
        """First answers of the environments of each rollout that has not begun, by sample."""
        self._ready: deque[Request] = deque()
        self._in_engine = 0
        """Responses that the engine has, finished episodes included."""
        self._exhausted = False

    def __iter__(self) -> Iterator[Request | None]:
        return self

    def __next__(self) -> Request | None:
        while True:
            self._take_answers(0.0)
            if self._ready:
                return self._handed(self._ready.popleft())
            if not self._exhausted and self._may_open() and self._open():
                continue
            if self._in_engine:
                return None
            if not self._environments.waiting:
                if self._exhausted:
                    raise StopIteration
                return None
            # Nothing is generated: wait for the environments, with signs of life.
            self.between_steps()
            self._take_answers(POLL_SECONDS)

    def received(self, completion: Completion) -> Completion | None:
        """Take note of a turn that the engine has finished -> its episode, if that is finished too."""
        self._in_engine -= 1
        running = self._episodes[completion.prompt_id, completion.sample_index]
        if running.result is not None:
            return self._episodes.pop(running.key).completion()
        self._end_turn(running, running.add_turn(completion), completion.finish)
        return None

    def give_up(self) -> None:
        """Forget all episodes that run."""
        self._environments.give_up()

    # Rollouts

    def _may_open(self) -> bool:
        """Whether one more rollout may be begun; one always may where there is none."""
        return not self._episodes or len(self._episodes) + self._samples <= OPEN_PER_SLOT * self._engine.slots

    def _open(self) -> bool:
        """Read a rollout and start it -> whether there was one."""
        try:
            request = next(self._requests)
        except StopIteration:
            self._exhausted = True
            return False
        if request is not None:
            self._start(request, range(request.first_sample, request.first_sample + (request.samples or self._samples)))
        return request is not None

    def _start(self, request: Request, samples: range) -> None:
        """Reset the environments of a rollout."""
        kind, prompt = self._engine.kind_of(request.prompt), request.prompt
        columns = {"prompt": prompt.text, **prompt.columns}
        if len(self._environments.ready.tools) > 1:
            columns.pop("environment")  # it has done its part: TRL's environments do not get it
        for sample in samples:
            running = Running(request=request, sample_index=sample, kind=kind, prompt=prompt)
            self._episodes[running.key] = running
            self._environments.ask(running.key, "start", kind, columns, seed_of(self._engine.seed, prompt))
        self._resetting[prompt.id, request.first_sample] = {}

    def _take_answers(self, wait_seconds: float) -> None:
        for key, answer in self._environments.answers(wait_seconds):
            running = self._episodes[key]
            rollout = running.request.prompt.id, running.request.first_sample
            if rollout in self._resetting:
                self._resetting[rollout][running.sample_index] = answer
                if len(self._resetting[rollout]) == (running.request.samples or self._samples):
                    self._begin(running.request, self._resetting.pop(rollout))
            elif answer.error:
                self._close(running, failure=answer.error)
            elif isinstance(answer.value, Finished):
                self._close(running, answer.value)
            else:
                self._continue(running, answer.value)

    def _begin(self, request: Request, answers: Mapping[int, Answer]) -> None:
        """All environments of a rollout have answered: its responses start from one prompt."""
        told = next((answer.value.observation for answer in answers.values() if not answer.error), None)
        prompt, starting = self._prompt(request.prompt, told), list[int]()
        for sample, answer in sorted(answers.items()):
            running = self._episodes[request.prompt.id, sample]
            running.prompt = prompt
            if not answer.error and answer.value.observation != told:
                # The responses of a group have one prompt: without it they could not be compared.
                answer = Answer(
                    error="the environment's reset told this response something else than the others of its prompt: "
                    "draw at random from `random` or `numpy.random`, which are seeded for each prompt"
                )
            if answer.error:
                self._close(running, failure=answer.error)
            else:
                running.trains = answer.value.trains
                starting.append(sample)
        whole = len(starting) == len(answers)
        for sample in starting[:1] if whole else starting:
            # Together where all start: their prompt is computed once.
            count = len(starting) if whole else 1
            self._ready.append(replace(request, prompt=prompt, first_sample=sample, samples=count, goes_on=True))

    def _prompt(self, prompt: Prompt, told: str | None) -> Prompt:
        """The prompt with the tools, and with what the environment told at its reset."""
        kind = self._engine.kind_of(prompt)
        told = None if told is None else self._engine.format_of(kind).harmless(told)
        messages = with_observation(prompt.text, told)
        ids = self._engine.format_of(kind).prompt_ids(messages)
        if len(ids) + self._sampling.max_new_tokens > self._engine.max_length:
            raise ValueError(
                f"prompt {prompt.id!r}, with the tools and first words of its environment, has {len(ids)} tokens, and the "
                f"episode up to {self._sampling.max_new_tokens} more: together more than the model's context of "
                f"{self._engine.max_length}. Shorten the tools' docstrings, or lower generate.max_new_tokens."
            )
        text = messages[0]["content"] if isinstance(prompt.text, str) else messages
        return replace(prompt, token_ids=ids, text=text)

    # Turns

    def _end_turn(self, running: Running, token_ids: np.ndarray, finish: Finish) -> None:
        """The policy's turn is over: the environment gets it, or the episode ends."""
        running.finish, running.ended = finish, finish == "stop"
        reply = self._engine.format_of(running.kind).reply(token_ids)
        running.messages.append(reply.message)
        running.tool_calls += len(reply.calls)
        running.tool_errors += bool(reply.error)
        steps = running.kind in self._environments.ready.steps
        most = self._engine.max_turns
        goes_on = running.ended and (most is None or running.turns < most)
        if goes_on and steps:
            self._environments.ask(running.key, "step", reply.said)
        elif goes_on and (reply.calls or reply.error):
            self._call(running, reply)
        else:
            self._environments.ask(running.key, "finish")

    def _call(self, running: Running, reply: Reply) -> None:
        if reply.error:  # no tool was named that could be called
            self._continue(running, [reply.error])
        else:
            self._environments.ask(running.key, "call", [(call.name, call.arguments) for call in reply.calls])

    def _continue(self, running: Running, value: Any) -> None:
        """The environment has answered a turn: the next one begins, unless the episode ends here."""
        running.turns += 1
        steps = running.kind in self._environments.ready.steps
        if steps and value.done:
            self._environments.ask(running.key, "finish")
            return
        running.trains = value.trains if steps else True
        form = self._engine.format_of(running.kind)
        said = [form.harmless(text) for text in ([value.observation] if steps else value)]
        answers = answer_messages(running.messages[-1], said, steps=steps)
        ids = form.next_turn_ids(answers, ended=running.ended)
        limit = (running.request.sampling or self._sampling).max_new_tokens
        if running.length + len(ids) >= limit:
            # As in TRL: an answer that leaves no room is dropped, and the response ends before it.
            running.finish = "length"
            self._environments.ask(running.key, "finish")
            return
        running.messages += answers
        running.add_answer(ids)
        self._ready.append(self._request_of(running))

    def _request_of(self, running: Running) -> Request:
        request = running.request
        return replace(
            request,
            prompt=running.prompt,
            first_sample=running.sample_index,
            samples=1,
            prefix_ids=running.token_ids,
            goes_on=True,
        )

    def _close(self, running: Running, finished: Finished = NOTHING, *, failure: str = "") -> None:
        """The episode is finished: it passes through the engine as a response that is complete."""
        chosen = np.concatenate([*running.chosen, np.zeros(0, np.bool_)])
        running.spans = running.spans or [(0, self._engine.version)]
        running.result = Episode(
            prompt=running.prompt,
            chosen=chosen,
            messages=running.messages,
            rewards=finished.rewards,
            environment=finished.copy,
            tool_calls=running.tool_calls,
            tool_errors=running.tool_errors + finished.tool_errors,
            failure=failure,
        )
        # A limit of as many tokens as there are: nothing is left to generate, however it ended.
        sampling = replace(running.request.sampling or self._sampling, max_new_tokens=running.length)
        self._ready.append(replace(self._request_of(running), sampling=sampling))

    def _handed(self, request: Request) -> Request:
        self._in_engine += request.samples or self._samples
        return request


def answer_messages(turn: Message, values: Sequence[str], *, steps: bool) -> list[Message]:
    """An environment's answer as messages: of the user for an observation, of the tools for their results."""
    if steps:
        return [{"role": "user", "content": values[0]}]
    names = [call["function"]["name"] for call in turn.get("tool_calls", [])] or ["tool"]
    return [{"role": "tool", "name": name, "content": value} for name, value in zip(names, values)]


def with_observation(text: str | Sequence[Mapping[str, str]], told: str | None) -> list[Message]:
    """The prompt's messages; what the environment told is appended to the user's last one."""
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else [dict(own) for own in text]
    if told is None:
        return messages
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": told}]
    messages[-1]["content"] += told
    return messages


def seed_of(seed: int, prompt: Prompt) -> int:
    """Seed of the environments of a prompt: its K episodes meet the same luck, and differ by their actions alone."""
    return int.from_bytes(blake2b(f"{seed}/environment/{prompt.id}".encode(), digest_size=4).digest(), "little")
