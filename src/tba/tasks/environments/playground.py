"""A user's environment behind one interface, in the process that hosts it: reset, tool calls or steps, rewards, a copy.

Two kinds are known by their methods alone. An environment with tools (TRL's contract) has public methods that the policy
calls. A step environment (gymnasium, gem, TextArena, skyrl-gym) has `step`, which takes the policy's whole turn as text and
gives back the next observation.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle

from tba.tasks.environments.schemas import NOT_TOOLS, tool_schema, tools_of
from tba.tasks.rewards.load_function import describe

NO_TOOLS = ""
"""Name of the environment where there are only tools."""


class StepResult(NamedTuple):
    """StepResult(observation="too low", done=False): what the environment says at its reset, or to a turn."""

    observation: str | None
    done: bool = False
    trains: bool = True
    """Whether the turn that follows is trained on; False = the policy plays another side in it."""


class Finished(NamedTuple):
    """Finished(rewards={"Countdown": 1.0}, copy=None): what is left of an environment after its episode."""

    rewards: dict[str, float]
    copy: bytes | None
    tool_errors: int = 0
    """Calls that gave an error."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of environment, as its host has loaded it: Kind(name="Countdown", make=Countdown, tools={}, steps=False)"""

    name: str
    make: Callable[[], Any] | None
    """Makes one without arguments; None = there are only tools."""
    tools: Mapping[str, Mapping[str, Any]]
    """Schemas of the tools that are its methods."""
    steps: bool
    """Whether it takes whole turns by `step`."""
    rewards: bool = False
    """Whether it gives a reward."""

    @classmethod
    def of(cls, name: str, make: Callable[[], Any]) -> Kind:
        needed = []
        with suppress(ValueError):  # a class in C may hide its parameters
            own = inspect.signature(make).parameters.values()
            needed = [p.name for p in own if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if needed:
            raise ValueError(
                f"environment {name} asks for {', '.join(needed)} to be made, and it gets no arguments: give defaults, or "
                "let its `reset` take them, which gets the columns of a row."
            )
        kind = make if inspect.isclass(make) else type(make())
        if is_step_environment(kind):
            return cls(name=name, make=make, tools={}, steps=True, rewards=True)
        return cls(name=name, make=make, tools=tools_of(kind), steps=False, rewards=hasattr(kind, "get_reward"))


def is_step_environment(kind: type) -> bool:
    """Whether the class has a `step` that takes text; a `step` with a tool's docstring is a tool."""
    step = getattr(kind, "step", None)
    if step is None:
        return False
    with suppress(ValueError):
        if [*tool_schema(step)["function"]["parameters"]["properties"]]:
            return False
    return True


class Playground:
    """The environments of one process: one instance of each kind, used for one episode after another."""

    def __init__(
        self,
        kinds: Mapping[str, Kind],
        functions: Mapping[str, Callable[..., Any]],
        *,
        copies: bool,
        agent: Callable[..., Any] | None = None,
    ) -> None:
        """`functions` are tools without state; `copies` says that rewards ask for the environments; `agent` plays whole
        episodes."""
        self._kinds, self._functions, self._copies, self._agent = kinds, functions, copies, agent
        self._instances: dict[str, Any] = {}
        self._kind = Kind(name=NO_TOOLS, make=None, tools={}, steps=False)
        self._rewards: list[float] = []
        self._tool_errors = 0

    @property
    def _environment(self) -> Any:
        return self._instances.get(self._kind.name)

    def start(self, kind: str, columns: Mapping[str, Any], seed: int) -> StepResult:
        """Begin an episode -> what the environment says first."""
        self._kind, self._rewards, self._tool_errors = self._kinds[kind], [], 0
        _seed_all(seed)
        if self._kind.make is None:
            return StepResult(None)
        if self._kind.name not in self._instances:
            self._instances[self._kind.name] = self._kind.make()
        return self._said(self._reset(columns, seed))

    def call(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Results of tool calls, in order; an error is a result too."""
        return [self._called(name, arguments) for name, arguments in calls]

    def step(self, text: str) -> StepResult:
        """The environment's answer to a turn of the policy."""
        result = _awaited(self._environment.step(text))
        if hasattr(self._environment, "get_observation"):  # TextArena: (done, info), and rewards at its close
            done = bool(result[0])
            return self._said("" if done else _text(self._environment.get_observation()[1]), done)
        if isinstance(result, tuple):  # gymnasium and gem: terminated and truncated, or done alone
            observation, reward, *ends, _ = result
            done = any(map(bool, ends))
        else:  # skyrl-gym
            get = result.get if isinstance(result, Mapping) else lambda name: getattr(result, name, None)
            observation, reward, done = get("observations"), get("reward"), bool(get("done"))
        self._rewards.append(float(reward or 0.0))
        return self._said(_text(observation), done)

    def run(self, given: Mapping[str, Any], seed: int) -> float | None:
        """A whole episode of the agent -> its reward; None = it gives none."""
        assert self._agent is not None
        _seed_all(seed)
        result = _awaited(self._agent(**_known(self._agent, {**given, "seed": seed})))
        if isinstance(result, Mapping):
            return float(sum(result.values()))
        return None if result is None else float(result)

    def finish(self) -> Finished:
        """Rewards at the end, under the name of the environment's class, and a copy for rewards that ask for it."""
        environment = self._environment
        if environment is None:
            return Finished({}, None, self._tool_errors)
        if hasattr(environment, "get_observation"):
            rewards, _ = environment.close()
            self._rewards.append(float(sum(rewards.values()) if isinstance(rewards, Mapping) else rewards or 0.0))
        if hasattr(environment, "get_reward"):
            reward = _awaited(environment.get_reward())
            if reward is None or isinstance(reward, str):
                raise ValueError(f"get_reward returned {reward!r:.80}, which is no number")
            self._rewards.append(float(reward))
        # An episode without a step has a reward of 0; tools alone give none.
        found = {self._kind.name: sum(self._rewards)} if self._rewards or self._kind.steps else {}
        return Finished(found, _copy(environment) if self._copies else None, self._tool_errors)

    def _said(self, observation: str | None, done: bool = False) -> StepResult:
        return StepResult(observation, done, bool(getattr(self._environment, "trains", True)))

    def _reset(self, columns: Mapping[str, Any], seed: int) -> str | None:
        environment = self._environment
        if hasattr(environment, "init"):  # skyrl-gym
            prompt, _ = environment.init(columns.get("prompt"))
            return None if prompt == columns.get("prompt") else _text(prompt)
        given = {**columns, "seed": seed, **({"num_players": 1} if hasattr(environment, "get_observation") else {})}
        # `seed` goes only to those that name it: TRL's reset(**columns) knows columns alone.
        named = {name: given[name] for name in given if name in inspect.signature(environment.reset).parameters}
        result = _awaited(environment.reset(**{**_known(environment.reset, columns), **named}))
        if hasattr(environment, "get_observation"):
            result = environment.get_observation()[1]
        if self._kind.steps and isinstance(result, tuple):  # gymnasium: (observation, info)
            result = result[0]
        return None if result is None else _text(result)

    def _called(self, name: str, arguments: Mapping[str, Any]) -> str:
        own = getattr(self._environment, name, None) if name in self._kind.tools else self._functions.get(name)
        if own is None:
            known = ", ".join([*self._kind.tools, *self._functions])
            return self._error(f"there is no tool {name!r}; there is {known}")
        try:
            return _text(_awaited(own(**arguments)))
        except Exception as error:  # the policy's arguments may be wrong: it reads why
            return self._error(describe(error))

    def _error(self, message: str) -> str:
        self._tool_errors += 1
        return json.dumps({"error": message})


def _seed_all(seed: int) -> None:
    """The K episodes of a prompt have one seed: random numbers of the standard library and of NumPy repeat."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def _known(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(own.kind is inspect.Parameter.VAR_KEYWORD for own in parameters.values())
    return {name: value for name, value in given.items() if takes_all or name in parameters}


def _text(value: Any) -> str:
    """A value as the policy reads it: text as it is, chat messages by their contents, all else as JSON or as printed."""
    if isinstance(value, str):
        return value
    if (
        isinstance(value, (list, tuple))
        and value
        and all(isinstance(own, Mapping) and "content" in own for own in value)
    ):
        return "\n".join(str(own["content"]) for own in value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def _copy(environment: Any) -> bytes | None:
    """The environment for rewards, pickled, without attributes that cannot be: locks, files, the client of a server."""
    if (whole := _pickled(environment)) is not None:
        return whole
    with suppress(Exception):  # a class in C, or without a __dict__: rewards then get None
        rest = object.__new__(type(environment))
        vars(rest).update({name: value for name, value in vars(environment).items() if _pickled(value) is not None})
        return _pickled(rest)
    return None


def _pickled(value: Any) -> bytes | None:
    with suppress(Exception):  # whatever a user's object raises
        return bytes(cloudpickle.dumps(value))
    return None


def _awaited(value: Any) -> Any:
    return asyncio.run(value) if inspect.iscoroutine(value) else value


__all__ = ["NOT_TOOLS", "NO_TOOLS", "Finished", "Kind", "Playground", "StepResult"]
