"""TBAConfig: the arguments of a GRPO script, in TRL's names or in ours, as the config of a run.

It is a dataclass with the fields of TRL's GRPOConfig, so that HfArgumentParser and TRL's TrlParser make it. Only what is
given counts: TRL's own defaults (beta 0, its loss, linear decay) are shown and not taken over, and what is left out is ours.
What depends on the data, such as num_train_epochs, is decided when the trainer knows how many rows there are.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel
from transformers import TrainingArguments

from tba.config import Config, ConfigError, load_config
from tba.config.trl_names import DIRECT, GRPO_DEFAULTS, GRPO_UNSET, REFUSED, SETTINGS, with_python_messages
from tba.objectives.registry import make_objective
from tba.trl.translate import translated

logger = logging.getLogger("tba")


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
