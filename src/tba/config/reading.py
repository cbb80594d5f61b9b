"""Config files: read YAML, apply `section.key=value` overrides, explain what is wrong, print what was resolved."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from tba.config.root import Config

RENAMED = {
    "objective.off_policy": "objective.trust_region",
    "replay.max_trained_per_generated": "replay.max_replay_ratio",
}
"""New names of settings: {"old": "new"}."""


class ConfigError(ValueError):
    """The config cannot be used; the message says what, the value, what is allowed and what to change, a line a problem."""

    unknown: tuple[str, ...] = ()
    """Keys that there are not; their lines begin with `unknown key KEY:`."""


class OneValueLoader(yaml.SafeLoader):
    """YAML's safe loader; a key that stands twice in a mapping is an error, where YAML's own keeps the last silently."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: tuple[bool, bool]) -> str:
        # Only plain scalars are guessed at; text in quotes never comes here as an int.
        tag = super().resolve(kind, value, implicit)
        # Whole numbers as YAML 1.2 has them: YAML 1.1 reads 0100 as 64 and 1:30 as 90.
        whole = re.fullmatch(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)", str(value))
        return "tag:yaml.org,2002:str" if tag == "tag:yaml.org,2002:int" and not whole else tag

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # `<<` puts the keys of a mapping further up in front, and those may be given again.
        own = [key for key, _ in node.value if key.start_mark.index >= node.start_mark.index]
        lines: dict[Any, int] = {}
        # A list or mapping as a key is refused by the reader.
        for key in (key for key in own if isinstance(key, yaml.ScalarNode)):
            if key.value in lines:
                problem = f"the key {key.value} is given twice, first in line {lines[key.value]}: keep one of them"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[str(key.value)] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def read_yaml(text: str | bytes) -> Any:
    """The value that a YAML text holds."""
    try:
        return yaml.load(text, OneValueLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


def load_config(path: Path | str | None = None, overrides: Iterable[str] = (), **values: Any) -> Config:
    """Resolve a config: defaults, then file, then `values` (merged section by section), then dotted `overrides`."""
    given = _read_yaml(path)
    # JSON form, so that a default looks like what YAML would have given in its place.
    defaults = Config().model_dump(mode="json")
    defaults["train"]["max_steps"] = None  # what it is depends on whether train.max_seconds is given
    # Layer by layer, unchecked: what one of them leaves out another gives, and only the whole has to fit.
    data = merge(merge(defaults, _without_empty(given, defaults)), _without_empty(values, defaults))
    for override in overrides:
        key, value = _parse_override(override)
        if len(key) == 1 and isinstance(value, Mapping):
            # `train={max_steps: 5}` leaves the other train settings as the file has them.
            data = merge(data, {key[0]: value})
        else:
            # A dotted key sets this value whole: a mapping replaces what stood there.
            _set(data, key, value)
    try:
        return make_config(data)
    except ConfigError as error:
        if any(f"{leaf}.".startswith(f"{key}.") for key in error.unknown for leaf, _ in _leaves(given)):
            error.args = (f"{error}\nIt stands in {path}: correct it there, or use the version of tba that wrote it.",)
        raise


def _without_empty(layer: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A layer without its sections and lists that hold nothing: all that stood below `train:` may be commented out."""
    found = {}
    for key, value in layer.items():
        # An empty `train:` is None in YAML, and means the defaults; None of a plain setting is a value.
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            found[key] = _without_empty(value, default)
        elif value is not None or not isinstance(default, (Mapping, list)):
            found[key] = value
    return found


def refuse_two_values(overrides: Iterable[str], options: Mapping[str, tuple[str, Any]]) -> None:
    """Refuse a setting to which a command line gives two values; `options` has name and value of a command's options by the
    setting that they stand for, None = not given."""
    given = {key: (f"{name} {value}", value) for key, (name, value) in options.items() if value is not None}
    for override in overrides:
        parts, whole = _parse_override(override)
        for key, value in _leaves({".".join(parts): whole}):
            message, before = given.setdefault(key, (override, value))
            if before is not value and before != value:  # NaN differs from itself
                raise ConfigError(
                    f"{key} is given two values on the command line: {message} and {override}. Keep one of them."
                )


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that a mapping gives: {"train": {"max_steps": 5}} gives train.max_steps."""
    for key, value in values.items():
        inner = {f"{key}.{name}": own for name, own in value.items()} if isinstance(value, Mapping) else {}
        yield from _leaves(inner) if inner else [(key, value)]


def is_given(key: str, path: Path | str | None, overrides: Iterable[str] = (), **values: Any) -> bool:
    """Whether any source of `load_config` sets a key of a section ("task.name"), which is not left at its default then."""
    section, _, name = key.partition(".")
    data = merge(_read_yaml(path), values)
    # A key given with its default value counts too: asked is whether the user wrote it.
    set_above = isinstance(data.get(section), Mapping) and name in data[section]
    return set_above or any(override.partition("=")[0] in (section, key) for override in overrides)


def make_config(data: Mapping[str, Any]) -> Config:
    """Check a plain mapping; every problem is listed with its full key."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        found = ConfigError("\n".join(_explain(problem) for problem in error.errors()))
        # Kept beside the text: `with_trl_names` in cli/usage.py rewrites the lines of these keys.
        extra = [problem["loc"] for problem in error.errors() if problem["type"] == "extra_forbidden"]
        found.unknown = tuple(".".join(map(str, location)) for location in extra)
        raise found from None


def dump_config(config: Config) -> str:
    """The resolved config as YAML that `load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_yaml(path: Path | str | None) -> dict[str, Any]:
    if path is None:
        return {}
    path = Path(path)
    if path.is_dir():
        run = path.parent.parent if path.parent.name == "checkpoints" else path  # or one of its checkpoints
        is_run = (run / "config.yaml").is_file()
        advice = f"`tba train {path} --resume` goes on with this run" if is_run else "give a YAML file"
        raise ConfigError(f"{path} is a folder, not a config file: {advice}.")
    if not path.is_file():
        what = "is no regular file" if path.exists() else "does not exist"
        raise ConfigError(f"config file {path} {what}: give a YAML file, for example configs/arithmetic.yaml.")
    try:
        data = read_yaml(path.read_bytes())  # as bytes, of which YAML reads UTF-16 too
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {yaml_message(error)}") from None
    if not isinstance(data, dict | None):
        raise ConfigError(f"config file {path} holds a {type(data).__name__}; expected sections such as `train:`.")
    return data or {}


def yaml_message(error: Exception) -> str:
    """An error of the YAML reader in one line: line 2, column 7: expected ',' or ']', but got '<stream end>'."""
    if isinstance(error, yaml.reader.ReaderError):  # whose own text leaves out the encoding
        return f"character {error.position} is not {error.encoding}: {error.reason}."
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    message = problem or " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {message}." if mark is not None else f"{message}."


def merge(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Both as one, section by section; `extra` wins, neither is changed."""
    merged = dict(base)
    for key, value in extra.items():
        inner = merged.get(key)
        merged[key] = merge(inner, value) if isinstance(value, Mapping) and isinstance(inner, Mapping) else value
    return merged


def _parse_override(override: str) -> tuple[list[str], Any]:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"override {override!r} has no value: write section.key=value, for example train.max_steps=100."
        )
    try:
        value = read_yaml(text) if text else None
    except yaml.YAMLError as error:
        shown = override if len(override) <= 200 else f"{override[:200]}..."
        raise ConfigError(f"override {shown!r}: the value is not valid YAML: {yaml_message(error)}") from None
    # YAML 1.1 reads `1e-5` as text; users mean the number.
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        value = float(value)
    return key.split("."), value


def _set(data: dict[str, Any], key: list[str], value: Any) -> None:
    first, is_known = data.get(key[0]), key[0] in Config.model_fields
    if is_known and len(key) > 1 and _section_at(key[:1]) is not None and not isinstance(first, dict):
        raise ConfigError(_section_needed(key[:1], first))  # a file has it, and it would be lost
    for name in key[:-1]:
        inner = data.get(name)
        if not isinstance(inner, dict):
            # `beta: 0.05` in the file, `objective.beta.end=0.01` on the command line. None or text becomes a section too.
            inner = {"start": inner} if isinstance(inner, (int, float)) and not isinstance(inner, bool) else {}
        data[name] = inner
        data = inner
    data[key[-1]] = value


def _explain(problem: Mapping[str, Any]) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        return unknown_key(location)
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error":
        # Some validators of ours name the key themselves: it must not stand there twice.
        names_its_key = f"{location[0]}." in message if location else True
        return message if names_its_key else f"{key}: {message}"
    if problem["type"] == "tuple_type":
        return f"{key}: a list is needed, got {problem['input']!r}: write {key}=[{problem['input']}]."
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return _section_needed(location, problem["input"])
    if problem["type"] == "string_type" and isinstance(problem["input"], (int, float, date)):
        kind = type(problem["input"]).__name__
        return f"""{key}: text is needed, and YAML reads {problem["input"]} as a {kind}: put it in quotes, {key}="'...'"."""
    return f"{key}: {message}, got {problem['input']!r}."


def _section_needed(location: list[str], value: Any) -> str:
    """How what was meant by a value is written as a section: `objective.name=grpo, or objective: {name: grpo} in a file`."""
    key, section, setting, meant = ".".join(location), _section_at(location), "SETTING", "VALUE"
    if isinstance(value, str) and section is not None:
        # What a section is of stands first: objective.name, task.name, model.path, generate.engine, runtime.kind.
        first, field = next(iter(section.model_fields.items()))
        if isinstance(field.default, str):
            setting, meant = first, value
    written = f"{key}.{setting}={meant}, or {location[-1]}: {{{setting}: {meant}}} in a file"
    if isinstance(value, bool):  # only a section that may be missing, such as model.lora, is switched on and off
        whole = "{}" if value else "null"
        written = f"{key}={whole}, or {location[-1]}: {whole} in a file"
    if location[-1].isdecimal():  # of a list, whose members have no keys of their own
        written = f"{'.'.join(location[:-1])}=[{{SETTING: VALUE}}]"
    return f"{key}: a section is needed, got {value!r}: write {written}."


def unknown_key(location: list[str]) -> str:
    """The message about an unknown key: the settings that may be meant, or all there are."""
    *above, name = location
    key, section = ".".join(location), _section_at(above)
    if key in RENAMED:
        return f"unknown key {key}: it is called {RENAMED[key]} now."
    known = list(section.model_fields) if section is not None else []
    first, dot, rest = name.partition(".")
    if dot and first in known:
        return f"unknown key {key}: in a file sections are nested, write {first}: {{{rest}: VALUE}}."
    # Inside of a value, such as a schedule, nothing but its own keys can be meant.
    settings = settings_by_name() if len(location) < 3 else {}
    elsewhere = difflib.get_close_matches(name, settings, n=1, cutoff=0.7)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close and name not in elsewhere:
        return f"unknown key {key}: did you mean {'.'.join([*above, close[0]])}?"
    meant = elsewhere or [setting for setting in settings if abbreviates(name, setting)][:3]
    if meant:  # `max_steps` at the top level means train.max_steps
        return f"unknown key {key}: did you mean {' or '.join(settings[setting] for setting in meant)}?"
    where = ".".join(above) or "the config"
    return f"unknown key {key}: {where} takes {', '.join(known)}. `tba config WORD` finds settings by a word."


def abbreviates(short: str, name: str) -> bool:
    """Whether a name is shortened to this: lr, learning_rate; temp, temperature; batch_size, per_device_batch_size."""
    # `rest` is used up from left to right, so words must stand in the name's order.
    parts, rest = name.split("_"), iter(name.split("_"))
    return (len(parts) > 1 and short == "".join(part[:1] for part in parts)) or all(
        any(part == word or (len(word) > 2 and part.startswith(word)) for part in rest) for word in short.split("_")
    )


def _section_at(location: list[str]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = Config
    for name in location:
        # The first part that is no section: a list's index, a schedule's key, an unknown name.
        if section is None or name not in section.model_fields:
            break
        section = inner_section(section.model_fields[name].annotation)
    return section


def inner_section(annotation: Any) -> type[BaseModel] | None:
    """The section or schedule that a field holds, alone, in a list or as one that may be None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(inner_section, get_args(annotation)) if found is not None), None)


def settings_by_name() -> dict[str, str]:
    """Full key of every setting by its last part: {"seed": "seed", "max_steps": "train.max_steps", ...}

    Of several settings with one last part it is the first: `name` means the run's, not task.name.
    """
    sections = {name: inner_section(info.annotation) for name, info in Config.model_fields.items()}
    # Top-level keys first, so that setdefault leaves them: `name`, `seed` and `output` mean the run's.
    keys = {name: name for name, section in sections.items() if section is None}
    for name, section in sections.items():
        for field in section.model_fields if section is not None else ():
            keys.setdefault(field, f"{name}.{field}")
    return keys
