"""The reference of all settings as Markdown, from the schema itself: `tba config > docs/configuration.md`."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import fill, indent
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tba.config.reading import inner_section
from tba.config.root import Config
from tba.config.sections import Schedule, Section

INTRODUCTION = """# Configuration

Every setting of a run. In a YAML file settings stand under their section (`train: {max_steps: 100}`), on the command line
they are written `train.max_steps=100`; `tba train CONFIG.yaml ... --dry-run` prints what comes out. A default of None means
that the value is decided when the run starts; the text of the setting says by what, and the run's config.yaml shows it.

Made by `tba config > docs/configuration.md` from the schema in `src/tba/config`; a test keeps it current."""

NAMES: dict[Any, str] = {
    int: "int",
    float: "float",
    bool: "bool",
    str: "text",
    Path: "path",
    type(None): "None",
    Callable[..., Any]: "Python function",
    dict[str, Any]: "settings by name",
}
"""Names of plain types, as a user of YAML would say them."""
SIGNS = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}
"""Limits of numbers, as pydantic stores them."""


def reference(objectives: Mapping[str, Any]) -> str:
    """The whole document: the run's own settings, every section with its inner ones, schedules, and each objective's.

    `objectives` has their classes by name, which this layer does not know: models of their own settings, with the defaults
    of beta and of its bound."""
    parts = [INTRODUCTION]
    for key, section in _sections("", Config):
        parts += [f"## {key}" if key else "## The run", _sentence(section), _table(_rows(key, section))]
    parts += ["## Schedules", _sentence(Schedule), _table(_rows("", Schedule))]
    parts += ["## Settings of the objectives", "They are keys of `objective`, beside those above."]
    for name, kind in objectives.items():
        parts += [f"### {name}", _about(kind), _table(_rows("objective", kind))]
    return "\n\n".join(filter(None, parts)) + "\n"


def search(objectives: Mapping[str, Any], word: str) -> list[str]:
    """A paragraph for each setting of a section, or with a word in its name or text, those with it in their name first."""
    sections: list[tuple[str, type[BaseModel]]] = [*_sections("", Config), ("", Schedule)]
    rows: dict[Row, list[str]] = {row: [] for key, section in sections for row in _rows(key, section)}
    """The objectives that have a setting, by its row; [] = it is none of theirs."""
    for name, kind in objectives.items():
        for row in _rows("objective", kind):
            rows.setdefault(row, []).append(name)
    inside = [row for row in rows if row.key.startswith(f"{word}.")]
    named = [row for row in rows if word.lower() in row.key.lower()]
    told = [row for row in rows if word.lower() in row.text.lower()]
    paragraphs = []
    for row in inside or dict.fromkeys([*named, *told]):
        kind = row.kind.replace("`", "").replace("[schedule](#schedules)", "schedule")
        of = f"; {', '.join(rows[row])}" if rows[row] else ""
        default = row.default.strip("`")
        paragraphs.append(f"{row.key}={default}  ({kind}{of})\n{indent(fill(row.text, 96), '    ')}")
    return paragraphs


class Row(NamedTuple):
    """The text about a setting, as Markdown."""

    key: str
    kind: str
    default: str
    text: str


def _sections(key: str, section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """A section and those within it, each with its key."""
    yield key, section
    for name, info in section.model_fields.items():
        # A schedule is written in a setting's place, so it is described once and not under each.
        if (inner := inner_section(info.annotation)) not in (None, Schedule):
            yield from _sections(f"{key}.{name}" if key else name, inner)


def _rows(key: str, section: type[BaseModel]) -> Iterator[Row]:
    """Its settings; inner sections have headings of their own, and stand here only where there may be none."""
    for name, info in section.model_fields.items():
        # A section that may be missing (model.lora) is a setting itself: None or {}.
        empty = not info.is_required() and info.get_default(call_default_factory=True) in (None, (), {})
        if inner_section(info.annotation) in (None, Schedule) or empty:
            yield Row(f"{key}.{name}" if key else name, type_text(info), default_text(info), _flat(info.description))


def _table(rows: Iterable[Row]) -> str:
    """One line for each setting; empty for none."""
    cells = [(f"`{row.key}`", row.kind, row.default, row.text) for row in rows]
    # A bar in a cell would end it: Markdown wants a backslash (92) before it.
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in own)} |" for own in cells]
    head = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *lines]) if lines else ""


def _about(kind: Any) -> str:
    """An objective in a sentence, with the defaults of beta and of the reference."""
    beta, tokens, every = f"{kind.default_beta:g}", kind.default_beta_tokens, kind.default_reset_every
    if tokens is not None:
        beta += f", or {kind.default_beta * tokens:g} / `generate.max_new_tokens` where that is above {tokens},"
    if kind.default_max_kl_penalty is not None:
        beta = f"{beta.removesuffix(',')}, `objective.max_kl_penalty` {kind.default_max_kl_penalty:g}"
    reset = f"reset every {every} optimizer steps" if every else "never reset"
    return f"{_sentence(kind)} By default `objective.beta` is {beta} and the reference is {reset}.".strip()


def type_text(info: FieldInfo) -> str:
    """The type of a field with its limits: `int >= 1 or None`."""
    # Pydantic keeps limits as objects with one field of their own name: Ge(ge=1) is `>= 1`.
    found = [(type(limit), limit) for limit in info.metadata if type(limit) in SIGNS]
    limits = [f"{SIGNS[kind]} {getattr(limit, kind.__name__.lower()):g}" for kind, limit in found]
    number, none, _ = _type(info.annotation).partition(" or None")
    # The limits are those of the number, not of the None beside it.
    return f"{number} {', '.join(limits)}".strip() + none


def default_text(info: FieldInfo) -> str:
    """The default as it would be written in YAML."""
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True)
    if isinstance(default, tuple):
        return f"`[{', '.join(map(str, default))}]`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default}`"


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Schedule:
        return "float or [schedule](#schedules)"
    if annotation in NAMES:
        return NAMES[annotation]
    if origin is Annotated:
        return _type(arguments[0])
    if origin is dict:
        return f"{_type(arguments[1])}, by name"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_type, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {_type(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(map(_type, arguments))}]"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return str(annotation)


def _sentence(section: type[BaseModel]) -> str:
    return _flat((section.__doc__ or "").split("\n\n")[0])


def _flat(text: str | None) -> str:
    return " ".join((text or "").split())
