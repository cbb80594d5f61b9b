"""Tasksets of the package verifiers (0.4): tasks as plain data, and the package's own score of a single reply.

    rows = SingleTurnTasks("gsm8k", {"split": "train"}).rows(5000)
    score = await SingleTurnTasks("gsm8k", {}).score(rows[0]["task"], "The answer is 18.")

A reply becomes a trace of the package as its own program would have left it: the prompt's messages and one of the assistant.
What takes more than a turn (tools, a sandbox, an environment of its own) is refused in words.
Nothing here imports torch or pydantic by itself: reward workers load this file.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from tba.tasks.rewards.functions import awaited
from tba.tasks.rewards.load_function import load_module

Row = Mapping[str, Any]
"""A task: `question`, its messages, and `task`, its data as JSON."""
HOOKS = ("setup", "finalize", "stage_verifier")
"""Methods of a task that prepare or read a sandbox."""


def require_verifiers() -> None:
    if importlib.util.find_spec("verifiers") is None or importlib.util.find_spec("verifiers.v1") is None:
        raise ValueError(
            "task.name=verifiers:NAME needs the package `verifiers` 0.4 or newer, which is not installed: "
            "`pip install 'verifiers>=0.4'`."
        )


class SingleTurnTasks:
    """The tasks of a taskset that is installed (`gsm8k`, `owner/name`) or lies in a file (`sums.py`)."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """`options` are the taskset's config, such as {"split": "train"}."""
        require_verifiers()
        from verifiers.v1 import Taskset, TasksetConfig
        from verifiers.v1.utils.generic import concrete_type

        self._what = f"task.name=verifiers:{name}"
        module = self._imported(name)
        found = _classes(module, Taskset)
        if len(found) != 1:
            has = f"{len(found)} of them" if found else "none"
            raise ValueError(f"{self._what}: the module must export one Taskset by `__all__`, and it has {has}.")
        kind: Any = found[0]
        try:
            config = (concrete_type(kind, TasksetConfig, origin=Taskset) or TasksetConfig)(id=name, **options)
            self._taskset = kind(config)
        except Exception as error:  # a config of pydantic, and a user's class
            raise ValueError(f"task.settings.options={dict(options)}: {self._what} refuses them ({error}).") from None
        self._module, self._kind = module, kind.task_type()

    def rows(self, most: int | None) -> list[Row]:
        """The first tasks, in the taskset's order; None = all of them. Refuses those that take more than a turn."""
        if most is None and not self._taskset.bounded:
            raise ValueError(f"{self._what} has tasks without end: set task.settings.size.")
        tasks = list(islice(self._taskset, most))
        if reason := next(self._more_than_a_turn(tasks), None):
            raise ValueError(
                f"{self._what}: {reason}. Only tasksets of one turn are scored here. The package's own program plays all "
                "others, against an engine that `tba serve` serves (docs/serve.md)."
            )
        return [{"question": _messages(task.data), "task": task.data.model_dump(mode="json")} for task in tasks]

    async def score(self, data: Mapping[str, Any], text: str) -> float:
        """The sum of the task's weighted rewards for a reply."""
        task = self._task(data)
        trace = _trace(task, text)
        await task.score(trace)
        return float(trace.reward)

    def _imported(self, name: str) -> ModuleType:
        from verifiers.v1.utils.loaders import import_taskset

        if name.endswith(".py"):
            return load_module(Path(name).resolve(), self._what)
        try:
            return import_taskset(name)
        except ModuleNotFoundError as error:
            raise ValueError(f"{self._what}: {error}") from None

    def _task(self, data: Mapping[str, Any]) -> Any:
        return self._kind(self._kind.data_type().model_validate(data), self._taskset.config.task)

    def _more_than_a_turn(self, tasks: Sequence[Any]) -> Iterator[str]:
        """Reasons why single replies cannot be scored."""
        from verifiers.v1 import Env, Harness, Task

        for base, what in ((Env, "environment"), (Harness, "program for its agent")):
            if own := _classes(self._module, base):
                yield f"it comes with an own {what}, {own[0].__name__}"
        config = self._taskset.config
        if [*type(self._taskset).toolsets(config), *self._kind.toolsets(config.task)]:
            yield "it gives its agent tools"
        if self._kind.NEEDS_CONTAINER:
            yield "its tasks run in a container"
        if own_hooks := [name for name in HOOKS if getattr(self._kind, name) is not getattr(Task, name)]:
            yield f"its tasks have the method {own_hooks[0]}, which works in a sandbox"
        if any(task.data.prompt is None for task in tasks):
            yield "a user opens its conversations: there is no prompt"
        rewards = [*tasks[0].hooks("reward"), *(judge.score for judge in tasks[0].plugged_judges())] if tasks else []
        if not rewards:
            yield "its tasks have no reward" if tasks else "it has no tasks"
        for reward in rewards:
            runtime = inspect.signature(reward).parameters.get("runtime")
            if runtime is not None and runtime.default is inspect.Parameter.empty:
                yield f"its reward {reward.__name__} reads a sandbox"


def _classes(module: ModuleType, base: type) -> list[type]:
    """Classes of a kind that a module exports, or defines where it has no `__all__`."""
    exported = getattr(module, "__all__", None)
    found = [getattr(module, name) for name in (vars(module) if exported is None else exported)]
    kinds = [own for own in found if inspect.isclass(own) and issubclass(own, base) and own is not base]
    return [own for own in kinds if exported is not None or own.__module__ == module.__name__]


def _messages(data: Any) -> list[dict[str, str]]:
    """The messages that a task's agent begins with."""
    prompt = (
        [("user", data.prompt)] if isinstance(data.prompt, str) else [(own.role, own.content) for own in data.prompt]
    )
    system = [] if data.system_prompt is None else [("system", data.system_prompt)]
    return [{"role": role, "content": _text(content)} for role, content in [*system, *prompt]]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if any(part.type != "text" for part in content):
        raise ValueError("a task of the taskset has images in its prompt: only text can be asked here.")
    return "".join(part.text for part in content)


def _trace(task: Any, text: str) -> Any:
    """The trace of a reply; what stands before </think> is its reasoning, as the package's clients have it."""
    from verifiers.v1 import AgentConfig, AgentInfo, AssistantMessage, Trace, TraceTask
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.state import state_cls

    about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    trace = Trace(task=about, agent=AgentInfo(config=AgentConfig()), state=state_cls(type(task))())
    thought, mark, reply = text.rpartition("</think>")
    reasoning = thought.removeprefix("<think>").strip() if mark else None
    said = AssistantMessage(content=reply.strip() if mark else reply, reasoning_content=reasoning)
    messages = [*_messages(task.data), said]
    for place, message in enumerate(messages):
        parent = place - 1 if place else None
        trace.nodes.append(MessageNode(parent=parent, message=message, sampled=message is said))
    trace.stop("agent_completed")
    trace.ok = True
    return trace


class Scorer:
    """The reward `score` with TRL's signature, for reward workers: Scorer("gsm8k", {})(["18"], [row]) == [1.0]"""

    per_sample = True
    """Rewards of samples are independent: where one hangs, only that one is lost."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._made_from = (name, options)
        self._tasks = SingleTurnTasks(name, options)

    def __reduce__(self) -> tuple[Any, ...]:
        # Made anew by the worker as it starts: the import of the package is not part of a call's time.
        return Scorer, self._made_from

    def __call__(self, completions: Sequence[Any], task: Sequence[Mapping[str, Any]]) -> list[Any]:
        # All at once: judges among the rewards wait for their models. A failure costs its own sample.
        texts = [own if isinstance(own, str) else own[0]["content"] for own in completions]
        return awaited([self._tasks.score(data, text) for data, text in zip(task, texts)])
