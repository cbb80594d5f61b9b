"""docs/configuration.md: made from the schema, complete, and current."""

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field
from typer.testing import CliRunner

from tba.cli import app
from tba.config import Config, ConfigError, Schedule, TrainConfig
from tba.config.reading import inner_section
from tba.config.sections import Section
from tba.config.settings_page import default_text, reference, type_text

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def all_fields(section=Config, prefix=""):
    """(key, field) of every setting, by a walk of its own."""
    for name, info in section.model_fields.items():
        inner = inner_section(info.annotation)
        if inner in (None, Schedule):
            yield f"{prefix}{name}", info
        else:
            yield from all_fields(inner, f"{prefix}{name}.")


def test_the_document_is_what_the_schema_says_now():
    result = CliRunner().invoke(app, ["config"])
    assert result.exit_code == 0
    assert DOCUMENT.read_text(encoding="utf-8") == result.stdout, "run `tba config > docs/configuration.md`"


@pytest.mark.parametrize(("key", "info"), list(all_fields()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_setting_is_explained_and_a_default_of_none_says_what_it_means(key, info):
    assert info.description, f"{key} has no text under it"
    assert f"`{key}`" in DOCUMENT.read_text(encoding="utf-8")
    if not info.is_required() and info.default is None:
        assert "None" in info.description, key


class Example(Section):
    """Settings for the tests below."""

    count: int | None = Field(default=None, ge=1)
    """Number of things; None = as many as there are."""
    share: float = Field(default=0.5, ge=0.0, lt=1.0)
    """Share | of things."""
    rate: Schedule | None = None
    """Rate; None = by itself."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Two numbers."""
    names: tuple[str, ...] = ()
    """Names."""
    fast: bool = False
    """Whether it is fast."""


def test_types_and_defaults_are_written_as_a_user_would():
    found = {name: (type_text(info), default_text(info)) for name, info in Example.model_fields.items()}
    assert found == {
        "count": ("int >= 1 or None", "`None`"),
        "share": ("float >= 0, < 1", "`0.5`"),
        "rate": ("float or [schedule](#schedules) or None", "`None`"),
        "betas": ("[float, float]", "`[0.9, 0.999]`"),
        "names": ("list of text", "`[]`"),
        "fast": ("bool", "`false`"),
    }


class Objective(Example):
    """Settings for the tests below."""

    default_beta: ClassVar = 0.25
    default_beta_tokens: ClassVar = None
    default_max_kl_penalty: ClassVar = None
    default_reset_every: ClassVar = 50


class Longer(Objective):
    default_beta_tokens: ClassVar = 64
    default_reset_every: ClassVar = 0


class Bounded(Objective):
    default_max_kl_penalty: ClassVar = 0.5
    default_reset_every: ClassVar = 0


def test_an_objectives_own_settings_and_defaults_are_listed():
    text = reference({"example": Objective})
    assert (
        "Settings for the tests below. By default `objective.beta` is 0.25 and the reference is reset every 50" in text
    )
    assert "| `objective.share` | float >= 0, < 1 | `0.5` | Share \\| of things. |" in text
    text = reference({"example": Longer})
    assert "`objective.beta` is 0.25, or 16 / `generate.max_new_tokens` where that is above 64, and the" in text
    text = reference({"example": Bounded})
    assert "`objective.beta` is 0.25, `objective.max_kl_penalty` 0.5 and the reference is never reset." in text


def found_by(word: str) -> list[str]:
    result = CliRunner().invoke(app, ["config", word], catch_exceptions=False)
    return [line.partition("=")[0] for line in result.stdout.splitlines() if not line.startswith(" ")]


def test_settings_are_found_by_their_section_or_by_a_word():
    assert found_by("train") == [f"train.{name}" for name in TrainConfig.model_fields]
    assert found_by("max_steps")[0] == "train.max_steps"
    assert {"generate.max_new_tokens", "objective.normal_length"} <= set(found_by("Length"))
    share = CliRunner().invoke(app, ["config", "top_entropy"]).stdout.splitlines()
    assert share[0] == "objective.top_entropy=1.0  (float >= 0, <= 1; grpo, dr_grpo)"
    with pytest.raises(ConfigError, match="no setting has 'frobnicate' in its name or text"):
        found_by("frobnicate")
