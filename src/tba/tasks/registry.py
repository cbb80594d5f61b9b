"""task.name -> task. A new task is one file, or a folder, and one line in TASKS; or a file outside the package, named by
task.name=file.py:Class.

The task makes its own evaluator (`Task.make_evaluator`) and may have settings of its own (`Settings`, for task.settings).
A start model in the package is a line in models/paths.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from pydantic import BaseModel, ValidationError
from transformers import PreTrainedTokenizerBase

from tba.config import Config, TaskConfig
from tba.config.task import is_of_package
from tba.models.load import LoadedModel
from tba.models.weights import CANARY_TOKENS
from tba.tasks.arithmetic.problems import ArithmeticTask
from tba.tasks.custom import CustomTask
from tba.tasks.gsm8k import GSM8KTask
from tba.tasks.math.dataset import MathTask
from tba.tasks.reasoning_gym.problems import ReasoningGymTask
from tba.tasks.red_team.attacking import RedTeamTask
from tba.tasks.rewards.load_function import load_named
from tba.tasks.task import Task, TaskInputs, user_code
from tba.tasks.tldr.summarising import TLDRTask
from tba.tasks.verifiers.problems import VerifiersTask

TASKS: dict[str, Callable[[TaskInputs], Task]] = {
    "arithmetic": ArithmeticTask,
    "gsm8k": GSM8KTask,
    "custom": CustomTask,
    "math": MathTask,
    "tldr": TLDRTask,
    "red_team": RedTeamTask,
    "reasoning_gym": ReasoningGymTask,  # reasoning_gym:NAME
    "verifiers": VerifiersTask,  # verifiers:NAME
}
TASK_PARTS = [name for name in vars(Task) if not name.startswith("_")]
"""Names of the attributes and methods that every task has."""


def make_task_for(config: Config, loaded: LoadedModel, *, trains: bool = True) -> Task:
    """The task of a config for a loaded model; see TaskInputs.trains."""
    limit = max_prompt_tokens(config, loaded.context)
    device = str(loaded.model.device)
    return make_task(config.task, loaded.tokenizer, max_prompt_tokens=limit, device=device, trains=trains)


def max_prompt_tokens(config: Config, context: int) -> int:
    """Longest prompt in tokens: what the model's context leaves beside the response, or the configured limit if smaller."""
    # Every process checks published weights by the same sequence, which must fit.
    if context < CANARY_TOKENS:
        raise ValueError(
            f"the model's context of {context} tokens is too short: weights are checked by a sequence of {CANARY_TOKENS}. "
            "Raise max_position_embeddings in its config.json, or take another model."
        )
    room = context - config.generate.max_new_tokens
    if room < 1:
        raise ValueError(
            f"generate.max_new_tokens={config.generate.max_new_tokens} leaves no room for a prompt in the model's context "
            f"of {context} tokens: lower it."
        )
    return min(room, config.task.max_prompt_tokens or room)


def make_task(
    config: TaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    device: str = "auto",
    trains: bool = True,
) -> Task:
    """The task of a config for any tokenizer; no model is looked at."""
    kind: Callable[[TaskInputs], Task]
    if (registered := config.name.partition(":")[0] if is_of_package(config.name) else config.name) in TASKS:
        kind = TASKS[registered]
    elif ":" not in config.name:
        raise ValueError(
            f"task.name={config.name!r} is not known: it may be {', '.join(TASKS)}, or file.py:Class for a task of your own."
        )
    else:
        # A user's file is imported here, in every role: only rewards have processes of their own.
        kind = load_named(config.name, what=f"task.name={config.name}", kind="class", fits=inspect.isclass)
    inputs = TaskInputs(
        config=config,
        tokenizer=tokenizer,
        max_prompt_tokens=max_prompt_tokens,
        settings=_own_settings(config, getattr(kind, "Settings", None)),
        device=device,
        trains=trains,
    )
    # Called in the trainer and in each searcher: a task must make the same prompts in all of them.
    with user_code(kind, ".__init__"):
        task = kind(inputs)
    # A Protocol checks nothing at run time: a missing method would show where it is first called.
    missing = [part for part in TASK_PARTS if not hasattr(task, part)]
    if missing:
        raise ValueError(
            f"task.name={config.name}: {config.label} has no {', '.join(missing)}. A task needs {', '.join(TASK_PARTS)}: "
            "see the class Task in tba.tasks.task."
        )
    return task


def _own_settings(config: TaskConfig, kind: type[BaseModel] | None) -> BaseModel | None:
    """Settings of task.settings, checked by the task's own model; None where the task has none."""
    if kind is None:
        if config.settings:
            raise ValueError(
                f"task.settings={config.settings}: {config.label} takes no settings. Leave them out, or give the class an "
                "attribute `Settings`, a pydantic model."
            )
        return None
    try:
        return kind.model_validate(config.settings)
    except ValidationError as error:
        problems = (
            f"task.settings.{'.'.join(map(str, problem['loc']))}: {problem['msg']}, got {problem['input']!r}"
            for problem in error.errors()
        )
        allowed = f"{config.label} takes {', '.join(kind.model_fields)}."
        raise ValueError(f"{'; '.join(problems)}. {allowed}") from None
