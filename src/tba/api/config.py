"""TBAConfig: the arguments of a GRPO script, in TRL's names or in ours, as the config of a run.

Only what is given counts: TRL's own defaults (beta 0, its loss, linear decay) are not taken over, and what is left out is
ours. Names that mean nothing here are told once, names that cannot be kept are refused (names.py says which is which). What
depends on the data, such as num_train_epochs, is settled when the trainer knows how many rows there are.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba.api.names import FIELDS
from tba.api.translate import SETTINGS, Tell, translated
from tba.config import Config, ConfigError, load_config

logger = logging.getLogger("tba")


class TBAConfig:
    """The arguments of a run. `TBAConfig(max_steps=200, learning_rate=1e-5, replay={"lag": "drop"})` takes TRL's names, our
    sections and our top-level keys. Both are attributes: `args.max_steps`, `args.train.max_steps`."""

    def __init__(self, output_dir: str | Path | None = None, **given: Any) -> None:
        given = {**({} if output_dir is None else {"output_dir": output_dir}), **given}
        self.given: Mapping[str, Any] = given
        """What was given, by TRL's names or ours."""
        _check_names(given)
        self.config = self.resolved(num_rows=None, tell=logger.warning)
        """The config of the run, as far as it does not depend on the data."""

    @classmethod
    def of(cls, args: TBAConfig | Config | Mapping[str, Any] | None) -> TBAConfig:
        """Whatever a trainer is given as `args`."""
        if isinstance(args, TBAConfig):
            return args
        if isinstance(args, Config):
            return cls(**args.model_dump(mode="python", exclude_unset=True) | _objects(args))
        if args is not None and not isinstance(args, Mapping):
            raise ConfigError(
                f"args is a {type(args).__name__}: give a TBAConfig (`from tba import GRPOConfig`), which takes TRL's names."
            )
        return cls(**(args or {}))

    def resolved(self, *, num_rows: int | None, tell: Tell = lambda words: None) -> Config:
        """The config for data of so many rows; None = they are not known yet."""
        return load_config(None, (), **translated(self.given, num_rows=num_rows, tell=tell))

    @property
    def run_folder(self) -> Path:
        """The folder of the run: what a script gives is a task of its own, also in the name of a run without one."""
        task = self.config.task.model_copy(update={"name": "custom"})
        return self.config.model_copy(update={"task": task}).run_folder

    def get(self, name: str, default: Any = None) -> Any:
        """What was given under one of TRL's names."""
        return self.given.get(name, default)

    def to_dict(self) -> dict[str, Any]:
        """The arguments by TRL's names, as transformers' callbacks ask for them: what was given, and what we have set."""
        return {**{name: getattr(self, name) for name in (*SETTINGS, "output_dir", "max_steps")}, **self.given}

    def to_sanitized_dict(self) -> dict[str, Any]:
        """The same with words for everything that is no number, text or truth value."""
        return {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in self.to_dict().items()
        }

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    def __getattr__(self, name: str) -> Any:
        if name in ("given", "config") or name.startswith("__"):  # a copy must not be one of the config alone
            raise AttributeError(name)
        if name == "greater_is_better":  # transformers decides it where it is not given, and callbacks ask for it
            return not self.config.evaluate.lower_is_better
        if name in self.given and name not in Config.model_fields:
            return self.given[name]
        if name in Config.model_fields or hasattr(Config, name):
            return getattr(self.config, name)
        if name == "output_dir":
            return str(self.run_folder)
        if name == "max_steps":
            return self.config.train.max_steps
        if name in SETTINGS:
            return _at(self.config, SETTINGS[name])
        if name in FIELDS:
            return None
        raise AttributeError(f"TBAConfig has no {name!r}.")

    def __repr__(self) -> str:
        return f"TBAConfig({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"


def _objects(config: Config) -> dict[str, Any]:
    """Sections that hold what plain data does not: reward functions."""
    return {"task": config.task.model_dump()}


def _check_names(given: Mapping[str, Any]) -> None:
    """Refuse what cannot be kept, say once what means nothing."""
    for name, value in given.items():
        if name in Config.model_fields:
            continue
        if name not in FIELDS:
            known = [*FIELDS, *Config.model_fields]
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            hint = (
                f"did you mean {close[0]}?" if close else "docs/from_trl.md has all of TRL's names, `tba config` ours."
            )
            raise ConfigError(f"TBAConfig has no argument {name}: {hint}")
        found = FIELDS[name]
        if any(value is off or (type(value) is type(off) and value == off) for off in found.off):
            continue
        if found.kind == "refused":
            raise ConfigError(f"{name}={value!r} cannot be kept: {found.words}.")
        if found.kind == "no meaning":
            logger.warning("%s=%r has no meaning here: %s.", name, value, found.words)


def _at(config: Any, place: str) -> Any:
    for part in place.split("."):
        config = getattr(config, part)
    return config
