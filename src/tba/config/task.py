"""The `task` section: what is to be learned, from which data, judged by what."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator, field_validator, model_validator

from tba.config.sections import LocalPath, Section, full_path


def code_name(code: str | Callable[..., Any]) -> str:
    """The name of a function or class: of `path/to/file.py:name` what follows the colon."""
    if isinstance(code, str):
        return code.rpartition(":")[2]
    return str(getattr(code, "__name__", type(code).__name__))


def _checked_code(code: Any) -> str | Callable[..., Any]:
    if not isinstance(code, str) and not callable(code):
        raise ValueError(f"{code!r} is neither `file.py:name` nor a Python object that can be called.")
    if isinstance(code, str):
        # In full: a resume or an evaluation may have another working directory.
        path, colon, name = code.rpartition(":")
        return f"{full_path(path)}:{name}" if colon else code
    return code


def _named_code(code: str | Callable[..., Any]) -> str:
    # `_split` in load_function.py knows "<python>" and says that the code must be named again.
    return code if isinstance(code, str) else f"<python>:{code_name(code)}"


Code = Annotated[
    str | Callable[..., Any], PlainValidator(_checked_code), PlainSerializer(_named_code, when_used="json")
]
"""Place of a user's function or class, `path/to/file.py:name`; in Python also the object itself, of which config.yaml keeps
the name only."""


class RewardConfig(Section):
    """A reward function and its weight. Text alone is the function: `rewards: [rewards.py:score]`."""

    function: Code
    """Place of the function, `path/to/file.py:name`; it has TRL's signature f(prompts, completions, **columns) -> list[float
    | None]. In Python also the function itself; config.yaml then keeps its name only."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor in the sum of rewards; 0 = measured in evaluations, never trained on."""
    name: str | None = None
    """Name in metrics and stored data; None = the function's own name."""

    @model_validator(mode="before")
    @classmethod
    def _from_function(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @property
    def label(self) -> str:
        """Name in metrics and stored data; the function's file is not imported for it."""
        return code_name(self.function) if self.name is None else self.name


class EnvironmentConfig(Section):
    """What the policy talks to, turn by turn (docs/environments.md). Text alone is the environment:
    `environment: game.py:Guess`."""

    classes: dict[str, Code] = Field(default_factory=dict)
    """Environments, `file.py:Class`, by name. Where there are several, the column `environment` of a row names its own.
    Their public methods are tools (TRL's contract), or they have `reset` and `step`."""
    tools: tuple[Code, ...] = ()
    """Functions without state that the policy may call, `file.py:function`."""
    agent: Code | None = None
    """Agent, `file.py:function`, in the place of classes and tools: it gets base_url, api_key, seed, prompt, messages and
    the columns of a row, plays an episode by calls to the served policy, and returns its reward, or None where rewards
    are given. The extra `web` is needed."""
    max_turns: int | None = Field(default=None, ge=0)
    """Largest number of answers of the environment in an episode (TRL's max_tool_calling_iterations); None = as many as
    generate.max_new_tokens leaves room for, which counts the whole conversation."""
    timeout_seconds: float = Field(default=30.0, gt=0.0)
    """Longest that one answer of an environment may take, or an agent may work without waiting for the policy. A slower one
    is ended, and its episode is lost and counted."""

    @model_validator(mode="before")
    @classmethod
    def _from_class(cls, value: Any) -> Any:
        return {"classes": {code_name(value): value}} if isinstance(value, str) or callable(value) else value

    @model_validator(mode="after")
    def _check(self) -> EnvironmentConfig:
        if self.agent is not None and (self.classes or self.tools):
            raise ValueError(
                "task.environment.agent plays whole episodes, with tools of its own: leave out classes and tools."
            )
        return self

    @property
    def is_there(self) -> bool:
        return bool(self.code)

    @property
    def code(self) -> tuple[str | Callable[..., Any], ...]:
        """All code of the user that an episode runs."""
        return (*self.players, *self.tools)

    @property
    def players(self) -> tuple[str | Callable[..., Any], ...]:
        """Environments or the agent: they may give a reward of weight 1, and know what to do where a row has no prompt."""
        return tuple(self.classes.values()) if self.agent is None else (self.agent,)


class TLDRConfig(Section):
    """Scores of the summaries of tldr. Without models it is the embedded edition, with the reward model that is shipped
    and a hidden gold rule."""

    reward_model: LocalPath | None = None
    """Folder or hub name of the model whose score is the reward; None = the embedded edition's. `tba prepare
    reward_model` trains one."""
    gold_model: LocalPath | None = None
    """Folder or hub name of the model that judges in evaluations, which the policy never sees; None = the embedded
    edition's rule."""


class RedTeamConfig(Section):
    """Whom red_team attacks and who judges. Without models it is the embedded edition, with a victim and a judge made of
    rules."""

    prompt: str | None = None
    """The one prompt of the attacker; None = the edition's own."""
    victim: LocalPath | None = None
    """Folder or hub name of the model that is attacked; None = the embedded edition's."""
    victim_template: str = "{attack}"
    """Prompt of the victim, with {attack} where the attack goes; a victim with a chat template gets it as a user's
    message."""
    num_replies: int = Field(default=5, ge=1)
    """Number of replies of the victim to one attack, over which the judge's scores are averaged; the embedded victim has
    one."""
    reply_tokens: int = Field(default=64, ge=1)
    """Length of the longest reply, in tokens."""
    judge: LocalPath | None = None
    """Folder or hub name of a classifier of replies; None = the embedded edition's."""
    judge_label: str = "toxic"
    """Label of the classifier whose probability is the score."""
    score: Literal["probability", "log_probability"] = "probability"
    """Reward: the mean over the replies of the judge's probability, or of its logarithm (GFNOrg/red-teaming)."""
    min_attack_tokens: int = Field(default=0, ge=0)
    """Length of the shortest attack that is judged, in tokens; a shorter one is rewarded by -25, the paper's -500
    in the log of the reward at its beta of 0.05."""
    embedder: LocalPath | None = None
    """Folder or hub name of the sentence encoder behind the diversity metrics; None = counts of words."""
    world: int = Field(default=0, ge=0, le=5)
    """Which of six sets of 48 weaknesses the victim of the embedded edition has: what was tuned on one may be reported on
    others."""

    @model_validator(mode="after")
    def _check(self) -> RedTeamConfig:
        if "{attack}" not in self.victim_template:
            raise ValueError(
                f"task.red_team.victim_template={self.victim_template!r} has no {{attack}}: write it where the attack goes."
            )
        if self.world and self.victim is not None:
            raise ValueError(
                f"task.red_team.world={self.world} is for the embedded edition, but task.red_team.victim={self.victim} is "
                "attacked: leave one of them out."
            )
        return self


HUB_NAMES = {"gsm8k": "openai/gsm8k", "math": "DigitalLearningGmbH/MATH-lighteval"}
"""Hub names of the data of tasks that come without it."""


def is_of_package(name: str) -> bool:
    """Whether a task's name is `reasoning_gym:NAME` or `verifiers:NAME`."""
    return name.startswith(("reasoning_gym:", "verifiers:"))


class TaskConfig(Section):
    """The task: what is to be learned, from which data, judged by what. Texts name the tasks that a setting is for."""

    name: str = "arithmetic"
    """Name of a registered task, `custom` for your own data and reward functions, `reasoning_gym:NAME` for a generator of
    that package, `verifiers:NAME` or `verifiers:path/to/file.py` for a taskset of that one, or `path/to/file.py:Class` for a
    task of your own (docs/tasks.md); a path is relative to the working directory, and config.yaml has it in full."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of reasoning_gym:NAME and verifiers:NAME (docs/tasks.md) or of a task of your own, checked by the class
    attribute `Settings` of the task."""
    data: LocalPath | None = None
    """Where the data is. custom: JSONL file with a `prompt` column (text or chat messages); other columns go to the
    reward; None = the environment's reset says all there is to say. gsm8k, math: folder with train.jsonl and test.jsonl,
    one JSONL file with the train rows, or a hub name (openai/gsm8k). tldr: the same, with validation.jsonl; None = the
    embedded posts. Files may be .gz."""
    eval_data: LocalPath | None = None
    """Where the held-out data is, a JSONL file; gsm8k, math: also a folder or hub name, for its test rows. None = custom:
    `eval_fraction` of the data, chosen by a hash of the prompt; gsm8k, math: the test rows of `data`."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """What happens with bad rows: stop = an error with file, line and reason of the first and
    the number of the others; skip = leave them out, with one warning that counts them. A row is bad with broken UTF-8
    or JSON, a column that is missing or of a wrong type, an empty or over-long prompt, an id that occurs twice, or no answer
    to compare with. There is no `data` section: settings of the data are here."""
    eval_fraction: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of the prompts of custom that is held out when there is no eval_data; 0 = no evaluation."""
    rewards: tuple[RewardConfig, ...] = ()
    """Reward functions of custom, at least one; those given by `--reward file.py:f` have weight 1, and stand in for a
    config file's."""
    environment: EnvironmentConfig = EnvironmentConfig()
    num_train_prompts: int = Field(default=20_000, ge=1)
    """Number of training problems of arithmetic, embedded tldr and environments without data, the same ones whatever the
    run's seed."""
    num_validation_prompts: int = Field(default=500, ge=0)
    """Number of train rows of gsm8k, math and tldr that are kept for tuning, chosen by a hash of the question; 0 = all are
    trained on."""
    prompt_template: str | None = None
    """Prompt of gsm8k and math, with {question} where the question goes; with chat the text of the user's message. None =
    the task's own."""
    chat: bool | Literal["auto"] = "auto"
    """Whether gsm8k and math ask by a user's message in the tokenizer's chat template; auto = where it has one."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template besides the messages, such as {enable_thinking: false}."""
    cut_off_is_wrong: bool = True
    """Whether a response of gsm8k and math that is cut off at generate.max_new_tokens has reward 0; false = it is scored by
    its text alone."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Length of the longest prompt, in tokens; None = what the model's context leaves beside generate.max_new_tokens."""
    tldr: TLDRConfig = TLDRConfig()
    red_team: RedTeamConfig = RedTeamConfig()

    @property
    def is_own_file(self) -> bool:
        """Whether the task is a class in a file of the user's, `path/to/file.py:Class`."""
        return ":" in self.name and not is_of_package(self.name)

    @property
    def label(self) -> str:
        """Name of the task in metrics and summaries: of a task from a file, the name of its class."""
        # verifiers:owner/name and verifiers:path/to/sums.py too.
        return self.name.rpartition(":")[2].rpartition("/")[2].removesuffix(".py")

    @property
    def folder_label(self) -> str:
        """Beginning of the name of a run folder: of custom its data, environments and rewards (prompts-score), else the
        task's name."""
        if self.name != "custom":
            return self.label
        parts = [] if self.data is None else [Path(self.data).name.partition(".")[0]]
        parts += [*map(code_name, self.environment.players), *(reward.label for reward in self.rewards)]
        return re.sub(r"\W+", "-", "-".join(parts)).strip("-")[:60] or self.label

    def __hash__(self) -> int:
        # Pydantic's own hash fails on the dict of `settings`.
        return hash(self.model_dump_json())

    @field_validator("name")
    @classmethod
    def _full_path(cls, name: str) -> str:
        """The path of a task's file in full: a run is evaluated later from another working directory."""
        path, colon, kind = name.rpartition(":")
        if is_of_package(name):
            return f"{path}:{full_path(kind)}" if kind.endswith(".py") else name
        if is_of_package(meant := f"{path.replace('-', '_').lower()}:{kind}"):
            raise ValueError(f"task.name={name} is spelled {meant}.")
        return f"{Path(path).expanduser().absolute()}:{kind}" if colon and path else name

    @model_validator(mode="after")
    def _check(self) -> TaskConfig:
        if self.name == "custom" and self.data is None and not self.environment.players:
            raise ValueError(
                "task.data is needed for task.name=custom: pass --data prompts.jsonl (or task.data=prompts.jsonl)."
            )
        if self.environment.is_there and self.name != "custom":
            raise ValueError(
                f"task.environment is for task.name=custom, and task.name={self.name} has responses of one "
                "turn: leave it out."
            )
        if self.name == "custom" and not self.rewards and not self.environment.players:
            raise ValueError(
                "task.rewards is empty for task.name=custom: pass --reward file.py:function (or "
                "task.rewards=[{function: file.py:function}])."
            )
        # The rewards of environments have weight 1.
        if self.rewards and not self.environment.players and not any(reward.weight for reward in self.rewards):
            raise ValueError(
                "task.rewards: every weight is 0, so that nothing can be learned: give one of them another."
            )
        if self.name in HUB_NAMES and self.data is None:
            raise ValueError(
                f"task.data is needed for task.name={self.name}: a folder with train.jsonl and test.jsonl, or "
                f"{HUB_NAMES[self.name]}."
            )
        if self.prompt_template is not None and ":" not in self.name and self.name not in HUB_NAMES:
            raise ValueError(
                f"task.prompt_template is for {' and '.join(HUB_NAMES)}, and task.name={self.name} asks by its own prompts: "
                "leave it out, or write its text into the `prompt` column."
            )
        if self.prompt_template is not None and "{question}" not in self.prompt_template:
            raise ValueError(
                f"task.prompt_template={self.prompt_template!r} has no {{question}}: write it where the question goes."
            )
        return self
