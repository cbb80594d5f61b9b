"""TBAConfig: the arguments of a GRPO script, in TRL's names or in ours, as the config of a run.

It is a dataclass with the fields of TRL's GRPOConfig, so that HfArgumentParser and TRL's TrlParser make it. Only what is
given counts: TRL's own defaults (beta 0, its loss, linear decay) are shown and not taken over, and what is left out is ours.
What depends on the data, such as num_train_epochs, is decided when the trainer knows how many rows there are.

`translated` makes sections of ours of a script's arguments, with one function for each part. It refuses values that cannot
be kept. Names that mean nothing beside the others are added to `ignored`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel
from transformers import TrainingArguments

from tba.config import DEFAULT_STEPS, Config, ConfigError, TrainConfig, load_config
from tba.config.reading import merge
from tba.config.trl_names import DIRECT, GRPO_DEFAULTS, GRPO_UNSET, REFUSED, SETTINGS, with_python_messages
from tba.objectives.registry import make_objective

logger = logging.getLogger("tba")
OURS = TrainConfig()

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}
LOSSES: dict[str, dict[str, Any]] = {
    "bnpo": {"name": "grpo", "aggregate": "tokens"},
    "dapo": {"name": "grpo", "aggregate": "tokens"},
    **{name: {"name": "grpo", "aggregate": "tokens", "surrogate": name} for name in ("cispo", "vespo")},
    "sapo": {"name": "grpo", "surrogate": "sapo"},
    "luspo": {"name": "dr_grpo", "ratio": "sequence", "normal_length": 1, "scale_rewards": True},
}
"""TRL's losses that are settings of ours; other names are those of our objectives."""
RATIOS = {
    "delta": "max_ratio",
    "importance_sampling_level": "ratio",
    "off_policy_mask_threshold": "off_policy_mask",
    "top_entropy_quantile": "top_entropy",
    "scale_rewards": "scale_rewards",
}
"""TRL's names for settings of grpo and dr_grpo."""
OFF = {"importance_sampling_level": "token", "top_entropy_quantile": 1.0}
"""Values of these that ask for nothing."""
CLIPS: dict[str, dict[str, str]] = {
    **{name: {"epsilon": "clip", "epsilon_high": "clip_high"} for name in ("grpo", "dr_grpo")},
    **{name: {"epsilon": "clip"} for name in ("proximal_rloo", "ppo", "vineppo")},
    "cispo": {"epsilon_high": "clip_high"},
}
"""Settings that epsilon and epsilon_high are, by objective or surrogate."""
SINKS = ("tensorboard", "wandb")
ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")


@dataclasses.dataclass(eq=False)
class Unset:
    """Default of a field that was not given; it is shown as TRL's default."""

    shown: Any

    def __repr__(self) -> str:
        return str(self.shown)


@dataclasses.dataclass(eq=False)
class _Setting:
    """An attribute that is read from the run where it was not given."""

    place: str

    def __get__(self, args: TBAConfig | None, owner: type) -> Any:
        if args is None:
            return self
        return str(args.run_folder) if self.place == "output_dir" else attrgetter(self.place)(args.config)


class _Section(_Setting):
    """A section of ours. It is given as a mapping and read as it stands in the config of the run."""

    def __set__(self, args: TBAConfig, value: Any) -> None:
        args.__dict__[self.place] = value


# From the installed transformers: its defaults change between versions.
_of_transformers = {field.name: field for field in dataclasses.fields(TrainingArguments)}
DEFAULTS: dict[str, Any] = {
    **{n: f.default_factory() if callable(f.default_factory) else f.default for n, f in _of_transformers.items()},
    **dict.fromkeys(GRPO_UNSET),
    **GRPO_DEFAULTS,
}
"""TRL's default of every field."""
TRUE = {name for name, default in DEFAULTS.items() if default is True} - {"gradient_checkpointing"}
"""Names of what is True in TRL and here, or ignored: a parser has --no_NAME for a field whose default is True itself."""
TYPES: dict[str, Any] = {
    **{name: type(value) for name, value in GRPO_DEFAULTS.items()},
    **GRPO_UNSET,
    **get_type_hints(TrainingArguments),
}
"""Type of every field."""
_fields = []
for _name, _default in DEFAULTS.items():
    # A parser gives the default itself where nothing was given: Unset marks it, a plain value could not.
    _shown = _default if _default is None or _name in TRUE else Unset(_default)
    _own = _of_transformers.get(_name)
    _help = {"help": (_own and _own.metadata.get("help")) or SETTINGS.get(_name, "Ignored.")}
    _fields.append((_name, TYPES[_name], dataclasses.field(default=_shown, metadata=_help)))
# TBAConfig has an __init__ of its own: that of TrainingArguments would set up devices.
_Arguments: Any = dataclasses.make_dataclass(
    "_Arguments", _fields, bases=(TrainingArguments,), init=False, repr=False, eq=False
)
for _name, _default in DEFAULTS.items():
    # make_dataclass has put the Unset defaults there: reading an attribute must give a real value.
    setattr(_Arguments, _name, _Setting(DIRECT[_name]) if _name in DIRECT else _default)
for _name in Config.model_fields.keys() - DEFAULTS.keys():
    # _Section has __set__, so it wins over the instance's dict, in which the given mapping lies.
    setattr(_Arguments, _name, _Section(_name))
_Arguments.output_dir = _Setting("output_dir")


class TBAConfig(_Arguments):
    """The arguments of a run. `TBAConfig(max_steps=200, learning_rate=1e-5, replay={"max_lag": 3})` takes TRL's names, our
    sections and our top-level keys. Both are attributes: `args.max_steps`, `args.train.max_steps`."""

    def __init__(self, output_dir: str | Path | None = None, **given: Any) -> None:
        self._ignored: list[str] = []
        """The settings that were last reported as ignored."""
        given = {"output_dir": output_dir, **given}
        known = [*DEFAULTS, *Config.model_fields]
        if unknown := next((name for name in given if name not in known), None):
            close = difflib.get_close_matches(unknown, known, n=1, cutoff=0.8)
            hint = f"did you mean {close[0]}?" if close else "docs/from_trl.md has TRL's names, `tba config` ours."
            raise ConfigError(f"TBAConfig has no argument {unknown}: {hint}")
        # dataclasses.replace and copies pass every field as it reads: what was given can no longer be told.
        is_copy = given.keys() >= DEFAULTS.keys() and not any(isinstance(value, Unset) for value in given.values())
        if is_copy:
            message = "all fields are given, as by dataclasses.replace: those with TRL's default count as left out."
            logger.warning(message)
        for name, value in given.items():
            value = _checked(name, value)
            is_default = (is_copy or name in TRUE) and value == DEFAULTS.get(name)
            if value is not None and not isinstance(value, Unset) and not is_default:
                # Past the descriptors: `given` reads from __dict__ what was set.
                self.__dict__[name] = value
        metric = self.metric_for_best_model
        if metric is not None and self.greater_is_better is None:  # as transformers decides it
            self.__dict__["greater_is_better"] = not metric.endswith("loss")
        with with_python_messages():
            make_objective(self.config)  # refuses what is wrong now, not when the run starts

    @classmethod
    def of(cls, args: TBAConfig | Config | Mapping[str, Any] | None) -> TBAConfig:
        """Whatever a trainer is given as `args`."""
        if isinstance(args, TBAConfig):
            return args
        if isinstance(args, Config):
            given = args.model_dump(mode="python", exclude_unset=True)
            # Without save_total_limit all checkpoints would be kept, as in TRL: a Config says how many.
            return cls(**given | {"task": args.task.model_dump(), "save_total_limit": args.train.keep_checkpoints})
        if args is not None and not isinstance(args, Mapping):
            raise ConfigError(
                f"args is a {type(args).__module__}.{type(args).__name__}: give a TBAConfig (`from tba import GRPOConfig`), "
                "which takes TRL's names."
            )
        return cls(**(args or {}))

    @property
    def given(self) -> dict[str, Any]:
        """Arguments that were given or assigned, by TRL's names or ours."""
        return {n: v for n, v in vars(self).items() if v is not None and (n in DEFAULTS or n in Config.model_fields)}

    @property
    def config(self) -> Config:
        """The config of the run, as far as it does not depend on the data."""
        return self.resolved(num_rows=None)

    def resolved(self, *, num_rows: int | None) -> Config:
        """The config for data of so many rows; None = they are not known yet."""
        given = self.given
        with with_python_messages():
            for name, reason in REFUSED.items():
                value = given.get(name, DEFAULTS[name])
                # For the others 0, False, None and "no" ask for nothing; sapo_ and vespo_ are numbers, and 0 is a wish.
                asks = value != DEFAULTS[name] if name.startswith(("sapo_", "vespo_")) else value and value != "no"
                if asks and value != DEFAULTS[name]:
                    raise ConfigError(f"{name}={value!r} cannot be kept: {reason}.")
            others = DEFAULTS.keys() - SETTINGS.keys() - REFUSED.keys()
            ignored = [name for name in given if name in others and given[name] != DEFAULTS[name]]
            config = load_config(None, (), **translated(given, num_rows=num_rows, ignored=ignored))
        # Resolved many times (attributes are read from it): the warning comes once for each list.
        if ignored and ignored != self._ignored:
            self._ignored = ignored
            names, name = ", ".join(ignored), config.objective.name
            message = (
                "ignored: %s. They concern TRL's own loop, or mean nothing for the objective %s (docs/from_trl.md)."
            )
            logger.warning(message, names, name)
        return config

    @property
    def run_folder(self) -> Path:
        """The folder of the run: what a script gives is a task of its own, also in the name of a run without one."""
        config = self.config
        return config.model_copy(update={"task": config.task.model_copy(update={"name": "custom"})}).run_folder

    def __repr__(self) -> str:
        return f"TBAConfig({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    __str__ = __repr__


def _checked(name: str, value: Any) -> Any:
    """A value as it is meant: a mapping or a number may be given as text, as from a command line."""
    if value is None or isinstance(value, Unset):
        return value
    default, field = DEFAULTS.get(name), Config.model_fields.get(name)
    kind = None if field is None or name in DEFAULTS else field.annotation
    if isinstance(value, str) and value.startswith("{"):
        # HfArgumentParser passes dicts as JSON text.
        with suppress(ValueError):  # a text may begin so too
            value = json.loads(value)
    if isinstance(kind, type) and issubclass(kind, BaseModel) and not isinstance(value, (Mapping, BaseModel)):
        raise ConfigError(f'{name}={value!r} is no section: give its settings, {name}={{"SETTING": VALUE}}.')
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    if name.endswith("_kwargs") and not isinstance(value, Mapping):
        raise ConfigError(f'{name}={value!r} is no mapping: give a dict, {name}={{"NAME": VALUE}}.')
    if isinstance(value, str) and (isinstance(default, bool) or name == "bf16"):
        raise ConfigError(f"{name}={value!r} is a text: give True or False.")
    kinds = {*get_args(TYPES.get(name)), TYPES.get(name)} & {int, float, str, bool}
    if isinstance(value, str) and kinds and kinds <= {int, float} and value != "auto":
        try:
            return int(value) if isinstance(default, int) or float not in kinds else float(value)
        except ValueError:
            raise ConfigError(f"{name}={value!r} is no number: write one, such as {name}={default or 8}.") from None
    return value


def translated(given: Mapping[str, Any], *, num_rows: int | None, ignored: list[str]) -> dict[str, Any]:
    """TRL's names as sections of ours, which win where both are given."""
    try:
        # All arithmetic on a script's values is in there, so wrong types show as errors of it.
        return _sections(given, num_rows=num_rows, ignored=ignored)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:  # a text, a list or nothing where a number is needed
        load_config(None, (), **{name: value for name, value in given.items() if name in Config.model_fields})
        wrong = []
        # The one without which the others can be used, where there is one, is named alone.
        for name in given:
            with suppress(TypeError, ValueError, ArithmeticError):
                others = {other: value for other, value in given.items() if other != name}
                _sections(others, num_rows=num_rows, ignored=[])
                wrong.append(name)
        values = " or ".join(f"{name}={given[name]!r:.80}" for name in wrong or given)
        raise ConfigError(f"{values} cannot be used ({error}): docs/from_trl.md says what each name sets.") from error


def _sections(given: Mapping[str, Any], *, num_rows: int | None, ignored: list[str]) -> dict[str, Any]:
    of_trl = {name: value for name, value in given.items() if name not in Config.model_fields and value is not None}
    own = {name: value for name, value in given.items() if name in Config.model_fields}
    steps = Steps(of_trl, own, num_rows)
    # Dotted places until the end; later parts overwrite earlier ones.
    settings = {place: of_trl[name] for name, place in DIRECT.items() if name in of_trl}
    settings |= _run(of_trl, ignored) | _objective(of_trl, own, ignored) | steps.settings()
    settings |= _optimizer(of_trl, steps, ignored) | _reports(of_trl, steps, ignored)
    found: dict[str, Any] = {}
    for place, value in settings.items():
        for part in reversed(place.split(".")):
            value = {part: value}
        found = merge(found, value)
    # Our sections last: what is given in our names wins over TRL's.
    return merge(found, own)


def _known(name: str, options: Mapping[str, Any], known: Sequence[str]) -> Mapping[str, Any]:
    """Refuse options of an argument that are not known here."""
    for option, value in options.items():
        if option not in known:
            raise ConfigError(f"{name}: {option}={value!r} cannot be kept: it takes {', '.join(known) or 'none'}.")
    return options


def _run(given: Mapping[str, Any], ignored: list[str]) -> dict[str, Any]:
    """The folder, the model and how it generates. `run_name` names the folder only where no `output_dir` is given."""
    name, folder = given.get("run_name"), given.get("output_dir")
    found: dict[str, Any] = {}
    if folder is not None:
        # output_dir is the run folder itself, which here is output/name.
        found |= {"output": str(Path(folder).parent), "name": Path(folder).name}
    if name is not None:
        found["name" if folder is None else "observe.label"] = name
    if given.get("bf16") is not None:
        found["model.dtype"] = "bfloat16" if given["bf16"] else "float32"
    if given.get("use_cpu"):
        found["model.device"] = "cpu"
    for option, value in (given.get("model_init_kwargs") or {}).items():
        if option in ("dtype", "torch_dtype") and value is not None:
            found["model.dtype"] = str(value).removeprefix("torch.")
        elif option == "trust_remote_code":
            found["model.trust_remote_code"] = value
        elif option in ("attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage"):
            ignored += [] if value is None else [f"model_init_kwargs[{option!r}]"]  # trainer and engine have their own
        elif value is not None and (option, value) != ("revision", "main"):
            raise ConfigError(
                f"model_init_kwargs: {option}={value!r} cannot be kept: load the model yourself and give it as `model`."
            )
    if given.get("use_vllm"):
        found["generate.engine"] = "vllm"
    known = ("temperature", "top_p", "top_k", "max_new_tokens", "min_new_tokens")
    options = _known("generation_kwargs", given.get("generation_kwargs") or {}, known)
    return found | {f"generate.{option}": value for option, value in options.items()}


def _objective(given: Mapping[str, Any], own: Mapping[str, Any], ignored: list[str]) -> dict[str, Any]:
    """The loss, what belongs to its ratio, and its reference."""
    loss = given.get("loss_type")
    objective = {} if loss is None else dict(LOSSES.get(loss, {"name": loss}))
    # The objective decides what epsilon and its kin are called, or whether they mean anything.
    name = (own.get("objective") or {}).get("name", objective.get("name", "tb"))
    ours = CLIPS.get(objective.get("surrogate", name), {}) | (RATIOS if name in ("grpo", "dr_grpo") else {})
    values = dict(given)
    if "epsilon" in given and "epsilon" in ours:
        # In TRL epsilon is the upper bound too, unless epsilon_high is given.
        values.setdefault("epsilon_high", given["epsilon"])
    if (scale := given.get("scale_rewards")) not in (None, True, False, "group", "none"):
        raise ConfigError(f'scale_rewards="{scale}" cannot be kept: use "group" or "none".')
    if scale is not None:
        values["scale_rewards"] = scale in (True, "group")
    objective |= {ours[trl]: values[trl] for trl in ours if trl in values}
    of_ratio = ("epsilon", "epsilon_high", *RATIOS)
    ignored += [trl for trl in of_ratio if trl not in ours and given.get(trl, OFF.get(trl)) != OFF.get(trl)]
    if name in ("tb", "tb_learned_z") and given.get("beta") == 0:
        raise ConfigError(
            f"beta=0 cannot be kept for {name}: its target is the reference times exp(reward / beta). Leave beta out, or "
            'use loss_type="dr_grpo", which needs no reference.'
        )
    found = {f"objective.{setting}": value for setting, value in objective.items()}
    if given.get("mask_truncated_completions"):
        found["train.truncated"] = "drop"
    if given.get("sync_ref_model"):
        # 512 is TRL's default, which counts here because sync_ref_model asks for resets.
        found["reference.reset_every"] = given.get("ref_model_sync_steps", 512)
        if given.get("ref_model_mixup_alpha", 1.0) != 1.0:
            raise ConfigError(
                f"ref_model_mixup_alpha={given['ref_model_mixup_alpha']} cannot be kept: at a reset the policy becomes the "
                "reference as it is. Set it to 1."
            )
    return found


class Steps:
    """Number of responses in a step, of steps in the run, and of steps in an epoch."""

    def __init__(self, given: Mapping[str, Any], own: Mapping[str, Any], num_rows: int | None) -> None:
        train = own.get("train") or {}
        self._given = given
        self.samples = int(train.get("samples_per_prompt", given.get("num_generations", OURS.samples_per_prompt)))
        if self.samples < 1:
            raise ConfigError(
                f"num_generations={self.samples}: a prompt needs 1 response at least, and most objectives 2."
            )
        self.responses = self._responses(int(train.get("ranks", 1)))
        if self.responses is None and "num_generations" in given:
            # Our 128 need not be a multiple of the group size that was given: the nearest number that is one.
            self.responses = self.samples * max(1, round(OURS.responses_per_step / self.samples))
        responses = int(train.get("responses_per_step", self.responses or OURS.responses_per_step))
        prompts = max(1, responses // self.samples)
        updates = int(train.get("updates_per_batch", given.get("num_iterations", OURS.updates_per_batch)))
        # Each batch of prompts is trained `updates` times, and each time is a step.
        self.per_epoch = None if num_rows is None else max(1, math.ceil(num_rows / prompts)) * updates
        """Optimizer steps that draw every row once; None = not known yet."""
        asked, epochs = given.get("max_steps", -1), given.get("num_train_epochs")
        self.is_timed = train.get("max_seconds") is not None
        # Order as in transformers: max_steps wins over num_train_epochs; -1 = not given.
        self.max_steps: int | None = train.get("max_steps") or (asked if asked and asked > 0 else None)
        if epochs is not None and not 0 < epochs < math.inf:
            raise ConfigError(f"num_train_epochs={epochs} is no number above 0: write one, such as 1, or max_steps.")
        if self.max_steps is None and epochs is not None and self.per_epoch is not None:
            self.max_steps = max(1, math.ceil(epochs * self.per_epoch))

    def _responses(self, ranks: int) -> int | None:
        """Responses in a step; None = no batch size was given."""
        # TRL's defaults count as soon as one of the two is given.
        sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
        if self._given.keys().isdisjoint(sizes):
            return self._given.get("generation_batch_size")
        sizes = {name: self._given.get(name, default) for name, default in sizes.items()}
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"{name}={value} leaves no response to train on: write 1 or more.")
        responses = math.prod(sizes.values()) * ranks
        if responses % self.samples:
            raise ConfigError(
                f"per_device_train_batch_size x gradient_accumulation_steps = {responses} responses of a step do not hold "
                f"whole groups of num_generations={self.samples}: make it a multiple."
            )
        return responses

    @property
    def length(self) -> int:
        """Number of steps of the run, for shares of it."""
        if self.max_steps is None and self.is_timed:
            raise ConfigError(
                "train.max_seconds leaves the number of steps open, and save_steps, eval_steps or warm-up is "
                "a share of it: give a number of steps there, or max_steps."
            )
        return self.max_steps or DEFAULT_STEPS

    def of(self, name: str, value: float) -> int:
        """A number of steps; below 1 it is a share of the run."""
        if not value > 0 or (value > 1 and value != int(value)):
            raise ConfigError(
                f"{name}={value} is no number of steps: write a whole one, or a share of the run, 0 to 1."
            )
        return int(value) if value >= 1 else max(1, math.ceil(value * self.length))

    def every(self, what: str, *, default: float) -> int | None:
        """Steps between two events, `save` or `eval`: by their strategy `no` = None, `epoch` or `steps`."""
        strategy, steps = _strategy(self._given, f"{what}_strategy"), self._given.get(f"{what}_steps")
        if strategy == "no":
            return None
        if strategy == "epoch":
            return self.per_epoch or self.of(f"{what}_steps", default)
        return self.of(f"{what}_steps", steps if steps is not None else default)

    def settings(self) -> dict[str, Any]:
        found = {"train.responses_per_step": self.responses, "train.max_steps": self.max_steps}
        return {place: value for place, value in found.items() if value is not None}


def _optimizer(given: Mapping[str, Any], steps: Steps, ignored: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    name, kind = _word(given.get("optim", "adamw")), _word(given.get("lr_scheduler_type", "constant"))
    if name not in ADAMW:
        raise ConfigError(f"optim={name!r} cannot be kept: the optimizer is AdamW. Use one of {', '.join(ADAMW)}.")
    if kind not in SCHEDULES:
        raise ConfigError(f"lr_scheduler_type={kind!r} cannot be kept: use one of {', '.join(SCHEDULES)}.")
    if "adam_beta1" in given or "adam_beta2" in given:
        found["train.adam_betas"] = (given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999))
    if "max_grad_norm" in given:
        # transformers says 0 for no clipping, and we say None.
        found["train.max_grad_norm"] = given["max_grad_norm"] or None
    if not 0 <= (given.get("warmup_ratio") or 0) <= 1:
        raise ConfigError(f"warmup_ratio={given['warmup_ratio']} is no share of the run: write one from 0 to 1.")
    warmup, rate = given.get("warmup_steps") or given.get("warmup_ratio") or 0, given.get("learning_rate")
    if not isinstance(rate, (int, float)):  # it finds itself, and falls to zero at the end
        of_schedule = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio")
        ignored += [name for name in of_schedule if given.get(name)]
        if rate is not None:
            found["train.learning_rate"] = rate
    else:
        known = [] if SCHEDULES[kind] == "constant" else ["min_lr", "min_lr_rate"]
        known += ["num_decay_steps"] if kind == "warmup_stable_decay" else []
        options = _known(f"lr_scheduler_kwargs of {kind}", given.get("lr_scheduler_kwargs") or {}, known)
        schedule: dict[str, Any] = {"kind": SCHEDULES[kind], "start": rate}
        schedule["warmup_steps"] = steps.of("warmup_steps", warmup) if warmup else 0
        if SCHEDULES[kind] != "constant":
            # min_lr is a rate, min_lr_rate a share of the highest one.
            schedule["end"] = options.get("min_lr", options.get("min_lr_rate", 0.0) * rate)
        if "num_decay_steps" in options:
            schedule["decay_steps"] = options["num_decay_steps"]
        found["train.learning_rate"] = schedule
    return found


def _reports(given: Mapping[str, Any], steps: Steps, ignored: list[str]) -> dict[str, Any]:
    """Checkpoints, evaluations, logs."""
    limit = given.get("save_total_limit", 0)
    log_every = 500 if given.get("logging_steps") is None else steps.of("logging_steps", given["logging_steps"])
    # As many as can be; a timed run has no number of steps.
    most = steps.max_steps or (sys.maxsize if steps.is_timed else DEFAULT_STEPS)
    found: dict[str, Any] = {"train.keep_checkpoints": limit if limit > 0 else most}
    if "save_strategy" in given or "save_steps" in given:
        # The best checkpoint is kept by every run, so `best` needs no interval.
        is_best = _strategy(given, "save_strategy") == "best"
        found["train.checkpoint_every"] = None if is_best else steps.every("save", default=500)
    if "eval_strategy" in given or "eval_steps" in given:
        # eval_steps falls back to logging_steps, as in transformers; 0 = both ends only.
        found["evaluate.every"] = steps.every("eval", default=log_every) or 0
    if "metric_for_best_model" in given:
        name = str(given["metric_for_best_model"]).removeprefix("eval_")
        found["evaluate.best_metric"] = f"-{name}" if given.get("greater_is_better") is False else name
    _strategy(given, "logging_strategy")  # refuses what is no strategy; every step has a line
    if given.get("disable_tqdm") is not None:
        found["observe.progress"] = not given["disable_tqdm"]
    if "report_to" in given:
        wanted = [given["report_to"]] if isinstance(given["report_to"], str) else list(given["report_to"])
        ignored += [f"report_to={name!r}" for name in wanted if name not in (*SINKS, "all", "none")]
        installed = [name for name in SINKS if importlib.util.find_spec(name) is not None]
        found["observe.sinks"] = installed if "all" in wanted else [name for name in SINKS if name in wanted]
    return found


def _strategy(given: Mapping[str, Any], name: str) -> str:
    """When something happens: the value of `save_strategy`, `eval_strategy` or `logging_strategy`."""
    known = ("no", "steps", "epoch", *(("best",) if name == "save_strategy" else ()))
    if (strategy := _word(given.get(name, "steps"))) not in known:
        raise ConfigError(f"{name}={strategy!r} is none of {', '.join(known)}: write one of them.")
    return strategy


def _word(value: Any) -> str:
    """One of transformers' enumerations, or the text that stands for it."""
    return str(getattr(value, "value", value))
