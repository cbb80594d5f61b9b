"""The base class of all sections: frozen, no unknown keys. It comes with values that several sections use, and with
schedules. A schedule is a pure function of the optimizer step, so nothing changes config at run time."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)


class Section(BaseModel):
    """One section of the config. The string under each field is its documentation."""

    # validate_default: defaults pass through the validators too, so a path or device has one form.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_slips_of_yaml(cls, value: Any, info: ValidationInfo) -> Any:
        # One level of the type: `int | None` shows its parts here.
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = {annotation, *get_args(annotation)}
        # YAML reads yes and on as true, which Pydantic would take for the number 1.
        if isinstance(value, bool) and kinds & {int, float} and not kinds & {bool, Any}:
            raise ValueError(f"a number is needed, got {str(value).lower()} (YAML reads yes, no, on and off so).")
        # No path or file can hold these two, and YAML makes them of a backslash in double quotes.
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise ValueError(
                f"{value!r} has a character that no file can hold (in double quotes YAML reads \\ as the start of one): "
                "write it in single quotes, or leave it out."
            )
        return value


OnOff = BeforeValidator(lambda value: {True: "on", False: "off"}[value] if isinstance(value, bool) else value)
"""YAML 1.1 reads on and off as true and false."""


def checked_device(name: str, *, also: str = "") -> str:
    """A device by one name only: cuda is cuda:0. `also` are names that may stand there besides."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device {name!r} is not known: write {also}cpu, cuda or cuda:1, as PyTorch names them.")
    return "cuda:0" if name == "cuda" else name


Device = Annotated[str, AfterValidator(checked_device)]
"""A device as PyTorch names it."""


def full_path(path: str) -> str:
    """A file or folder that is there by its full path: a run is evaluated and resumed from other working directories. Hub
    names, and what is not there, stay as they were written."""
    if not path:  # it would be the working directory
        raise ValueError(
            "the path is empty (a variable that is not set?): name a file or folder, or leave the setting out."
        )
    found = Path(path).expanduser()
    return str(found.absolute()) if found.exists() else path


LocalPath = Annotated[str, AfterValidator(full_path)]
"""A file or folder of this machine, or the name of something elsewhere."""


def number_or(value: Any, *, also: str) -> Any:
    """A number from text, which YAML 1.1 makes of 1e-5; other values as they are. `also` is what may stand there besides."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number: write one, for example 1e-5, or {also}.") from None


class Schedule(Section):
    """A number that changes with the step. A bare number in YAML is a constant: `beta: 0.05`."""

    kind: Literal["constant", "linear", "reciprocal", "cosine", "wsd"] = "constant"
    """Shape of the schedule: constant; linear or cosine from `start` to `end` over `steps`; reciprocal = 1 / value is
    linear, so that the weight 1 / beta of the reward grows evenly; wsd = warm-up, stable, then cosine decay to
    `end`."""
    start: float = Field(allow_inf_nan=False)
    """Value at the first step after warm-up."""
    end: float | None = Field(default=None, allow_inf_nan=False)
    """Value at the end; None = `start` for a constant schedule, 0 otherwise."""
    steps: int | None = Field(default=None, ge=1)
    """Number of optimizer steps over which the value changes, constant after them; None = to the end of the run, by
    train.max_steps or train.max_seconds."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of optimizer steps of linear warm-up from start / warmup_steps."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Number of optimizer steps of the final decay of a wsd schedule; None = a fifth of `steps`, or of the run."""
    end_from_step: int | None = Field(default=None, ge=0)
    """Optimizer step (0 is the first) from which on the value is `end`, however far it has come; None = it goes there
    evenly."""

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, value: Any) -> Any:
        value = number_or(value, also="a schedule: {kind: linear, start: 1e-4, end: 0}")
        return {"start": value} if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check(self) -> Schedule:
        if self.kind == "constant" and self.end not in (None, self.start):
            raise ValueError(
                f"a constant schedule has end={self.end} unlike start={self.start}: set kind to linear, reciprocal, "
                "cosine or wsd."
            )
        if self.kind == "reciprocal" and not (self.start > 0 and (self.end or 0) > 0):
            raise ValueError(
                f"a reciprocal schedule needs start and end above 0, got start={self.start}, end={self.end}."
            )
        if self.end_from_step is not None and (self.end is None or self.end_from_step < self.warmup_steps):
            raise ValueError(
                f"end_from_step={self.end_from_step} needs a schedule with an `end` (it is {self.end}) and must not lie in "
                f"the warm-up of {self.warmup_steps} steps: give `end`, or leave end_from_step out."
            )
        if self.steps is not None and self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} leaves nothing of steps={self.steps}: make it smaller.")
        if self.steps is not None and self.warmup_steps + (self.decay_steps or 0) > self.steps:
            raise ValueError(
                f"decay_steps={self.decay_steps} and warmup_steps={self.warmup_steps} exceed steps={self.steps}: make them "
                "smaller."
            )
        return self

    @property
    def ends(self) -> tuple[float, float]:
        """Value after warm-up and value at the end."""
        # An unset end is 0 for everything that changes.
        end = self.start if self.kind == "constant" else 0.0
        return self.start, end if self.end is None else self.end

    def at(self, step: int, *, progress: float) -> float:
        """Value for optimizer step `step` (0 is the first), before which `progress` (0 to 1) of the run is done."""
        # Before the shape: the jump holds wherever the schedule has come to.
        if self.end_from_step is not None and self.end is not None and step >= self.end_from_step:
            return self.end
        if step < self.warmup_steps:
            # step + 1: the first update would otherwise have rate 0.
            return self.start * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.start
        end = self.end or 0.0
        # Shares of `steps`, or of the run, whose number of steps need not be known.
        share, one_step = progress, progress / max(1, step)
        if self.steps is not None:
            share, one_step = step / self.steps, 1.0 / self.steps
        # Share at which the change begins; what follows is in shares too.
        first = self.warmup_steps * one_step
        if self.kind == "wsd":
            # A decay lasts one step at least.
            decay = max(0.2, one_step) if self.decay_steps is None else self.decay_steps * one_step
            first = max(first, 1.0 - decay)
        # Share of the change that is done; the maxima keep a run of one step from dividing by zero.
        done = min(1.0, max(0.0, (share - first) / max(one_step, 1.0 - first, 1e-9)))
        if self.kind == "reciprocal":
            return 1.0 / (1.0 / self.start + (1.0 / end - 1.0 / self.start) * done)
        fraction = done if self.kind == "linear" else 0.5 * (1.0 - math.cos(math.pi * done))
        return self.start + (end - self.start) * fraction
