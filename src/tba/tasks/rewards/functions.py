"""A user's reward functions: loaded from `file.py:name`, called with TRL's or verl's signature, in a process of their own.

TRL:   f(prompts, completions, completion_ids, **columns) -> list[float | None]      (sync or async)
verl:  compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float or {"score": ...}

For chat prompts a completion is [{"role": "assistant", "content": text}], as in TRL. Nothing here imports torch, so that the
worker process of `reward_worker`, when it was killed, is back in a moment.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba.config import RewardConfig
from tba.runtime.channels import Link
from tba.tasks.base import Outcome, RewardFailed

PromptText = str | list[dict[str, str]]
Columns = Mapping[str, Any]
VERL_ARGUMENTS = {"data_source", "solution_str", "ground_truth"}
READY = "ready"
"""First word of a worker: its functions are loaded, the clock of its first call starts."""


class RewardSet:
    """All reward functions of a task."""

    def __init__(self, configs: Sequence[RewardConfig]) -> None:
        self._rewards = [
            RewardFunction(load_reward_function(reward.function), name=reward.name, weight=reward.weight)
            for reward in configs
        ]
        names = [reward.name for reward in self._rewards]
        if len(set(names)) != len(names):
            raise ValueError(f"task.rewards have the same name: {', '.join(names)}. Give them task.rewards[].name.")

    @property
    def weights(self) -> dict[str, float]:
        return {reward.name: reward.weight for reward in self._rewards}

    def score(
        self, prompt: PromptText, columns: Columns, texts: Sequence[str], completion_ids: Sequence[list[int]]
    ) -> list[Outcome]:
        """Components of each sample of one prompt, or why it has none."""
        by_reward = {reward.name: reward(prompt, columns, texts, completion_ids) for reward in self._rewards}
        outcomes: list[Outcome] = []
        for sample in range(len(texts)):
            values: dict[str, float | None] = {}
            failed: RewardFailed | None = None
            for name, own in by_reward.items():
                value = own[sample]
                if isinstance(value, RewardFailed):
                    failed = value
                else:
                    values[name] = value
            outcomes.append(values if failed is None else failed)
        return outcomes


class RewardFunction:
    """One reward: its name, its weight, and how to call it for the samples of one prompt."""

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, weight: float = 1.0) -> None:
        self.function = function
        self.name: str = name or str(getattr(function, "__name__", type(function).__name__))
        self.weight = weight
        self._parameters = inspect.signature(function).parameters
        self._is_verl = set(self._parameters) >= VERL_ARGUMENTS

    def __call__(
        self, prompt: PromptText, columns: Columns, texts: Sequence[str], completion_ids: Sequence[list[int]]
    ) -> list[float | RewardFailed | None]:
        """One value per sample. A failure of the whole call is narrowed down to the samples that cause it."""
        try:
            return list(self._values(prompt, columns, texts, completion_ids))
        except Exception as error:  # a user's code: anything may come; told with file and line, dropped, counted
            if len(texts) == 1:
                return [RewardFailed(f"{self.name} {self._where(error)}")]
        singles = (self(prompt, columns, [text], [ids]) for text, ids in zip(texts, completion_ids))
        return [values[0] for values in singles]

    def _values(
        self, prompt: PromptText, columns: Columns, texts: Sequence[str], ids: Sequence[list[int]]
    ) -> list[float | None]:
        values = self._call_verl(columns, texts) if self._is_verl else self._call_trl(prompt, columns, texts, ids)
        if len(values) != len(texts):
            raise ValueError(f"returned {len(values)} values for {len(texts)} completions")
        return [_checked(value) for value in values]

    def _where(self, error: Exception) -> str:
        """`failed at rewards.py:12: KeyError: 'answer'`: the innermost line of the reward's own file."""
        file = inspect.getsourcefile(inspect.unwrap(self.function)) if inspect.isfunction(self.function) else None
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        place = f"at {own[-1].filename}:{own[-1].lineno}: " if own else f"({file}): " if file else ""
        return f"failed {place}{type(error).__name__}: {error}"

    def _call_trl(
        self, prompt: PromptText, columns: Columns, texts: Sequence[str], ids: Sequence[list[int]]
    ) -> list[Any]:
        count = len(texts)
        chat = not isinstance(prompt, str)
        arguments = {
            **{name: [value] * count for name, value in columns.items()},
            "prompts": [prompt] * count,
            "completions": [[{"role": "assistant", "content": text}] for text in texts] if chat else list(texts),
            "completion_ids": [list(own) for own in ids],
        }
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._parameters.values())
        if not takes_all:
            arguments = {name: value for name, value in arguments.items() if name in self._parameters}
        result = self.function(**arguments)
        return list(asyncio.run(result) if inspect.iscoroutine(result) else result)

    def _call_verl(self, columns: Columns, texts: Sequence[str]) -> list[Any]:
        truth = columns.get("ground_truth", columns.get("reward_model", {}).get("ground_truth"))
        known = {
            "data_source": columns.get("data_source"),
            "ground_truth": truth,
            "extra_info": columns.get("extra_info"),
        }
        known = {name: value for name, value in known.items() if name in self._parameters}
        scores = [self.function(solution_str=text, **known) for text in texts]
        return [score["score"] if isinstance(score, dict) else score for score in scores]


def reward_worker(link: Link, *, configs: Sequence[RewardConfig]) -> None:
    """Scores what it is sent until its parent is gone."""
    rewards = RewardSet(configs)
    link.send(READY)
    while (job := link.receive(timeout_seconds=None)) is not None:
        link.send(rewards.score(*job))


def load_reward_function(specification: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function that `path/to/file.py:name` names; a function given as a Python object is returned as it is."""
    if not isinstance(specification, str):
        return specification
    path, _, name = specification.rpartition(":")
    if path == "<python>":
        raise ValueError(
            f"reward {name!r} was a Python function given to TBATrainer, which the config cannot hold: name it again with "
            "task.rewards=[{function: file.py:name}]."
        )
    return load_named(specification, what=f"reward {specification!r}", kind="function", fits=callable)


def load_named(specification: str, *, what: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    """The function or class that `path/to/file.py:name` names. `what` begins the error messages, `kind` says what is looked
    for, `fits` whether an object is one."""
    path, colon, name = specification.rpartition(":")
    file = Path(path).expanduser()
    if not colon or not name:
        raise ValueError(f"{what}: write file.py:{kind}.")
    if not file.is_file():
        raise ValueError(
            f"{what}: file {path} does not exist. Give a Python file, relative to {Path.cwd()} or in full."
        )
    module = _load_module(file.resolve(), what)
    if not fits(getattr(module, name, None)):
        # Those that the file imports from elsewhere are not meant.
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        own = [key for key in own if fits(getattr(module, key))]
        close = difflib.get_close_matches(name, own, n=3, cutoff=0.4) or own
        raise ValueError(f"{what}: {path} has no {kind} {name!r}; it has {', '.join(close) or 'none'}.")
    return getattr(module, name)


def _load_module(file: Path, what: str) -> Any:
    """Import a file under a name of its own; its folder is on the path, so that it may import its neighbours."""
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"tba_file_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{what}: {file} cannot be imported: it must be a .py file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _checked(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}")
    return number
