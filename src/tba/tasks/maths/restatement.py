r"""Formulas of a question, and whether an answer is one of them written again.

"Compute $\sin 60^\circ$" is not answered by `\boxed{\sin 60^\circ}`, which symbols would find equal to the stored answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tba.tasks.maths.math_answers import LONGEST_ANSWER, normal_form, plain_number

PICTURE = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
SPAN = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)"
    r"|\\begin\{(?:align|equation|gather|eqnarray)\*?\}(.+?)\\end\{(?:align|equation|gather|eqnarray)",
    re.DOTALL,
)
WRAPPER = re.compile(r"\\(?:begin|end)\{(?:align|aligned|equation|gather|gathered|eqnarray|array|cases|split)\*?\}")
RELATION = re.compile(r"=|<|>|\\(?:leq?|geq?|neq?|approx|equiv|to|mapsto|in|implies|iff)(?![a-zA-Z])")
ROW = re.compile(r"\\\\(?![a-zA-Z])(?:\[[^\]]*\])?")
ASKED = re.compile(r"(?:\\(?:text|mbox)\{[^{}]*\}|[?\s.,;:!&]|\\[ ,;:!]|\\q?quad(?![a-zA-Z]))+$")
"""What may follow a formula: `= ?`, `\text{ for } x`."""
TOKEN = re.compile(r"\\(?:begin|end)\{\w*\}|\\[a-zA-Z]+|\\\\|\d+(?:\.\d+)?|[a-zA-Z]|[-^/!|<>=,:_&%]")
NO_LEAF = re.compile(r"\\(?:frac|sqrt|cdot|begin.*|end.*|\\)|[-^/!|<>=,:_&%]")
LONG_NUMBER = re.compile(r"^0+(?=\d)|(?<=\d)\.0+$|(?<=\.\d)0+$")
"""The zeros of 08, 8.0 and 0.50."""
IGNORED = {"\\cdot"}
NEUTRAL = re.compile(r"^(?:0\+|1\\cdot ?)+|(?:\+0|-0|\\cdot1|/1)+$")
"""Additions of nothing that turn no formula into an answer."""


@dataclass(frozen=True, kw_only=True)
class Formulas:
    """The formulas of one question, in normal form."""

    spans: frozenset[str]
    """Whole formulas, as they stand between dollar signs."""
    forms: tuple[str, ...]
    """Whole formulas and their parts around relations, rows and commas; each once."""
    bags: frozenset[tuple[str, ...]]
    """Tokens of those forms that are no plain numbers, without order, brackets and dots."""

    def has(self, form: str, *, wanted: str) -> bool:
        """Whether an answer that is not the stored one restates one of these: in any order of its terms and factors."""
        form = NEUTRAL.sub("", form)
        key = _key(form)
        if key == _key(wanted):
            return False
        if any(key == _key(own) for own in self.forms):
            return True
        return plain_number(form) is None and _bag(form) in self.bags and _bag(form) != _bag(wanted)


@lru_cache(maxsize=2_000)
def formulas_of(question: str) -> Formulas:
    """The formulas of a question: one question is asked for with each of its samples."""
    spans = [span for span in _spans(question) if span.strip()]
    parts = dict.fromkeys(form for span in spans for part in _parts(span) if (form := _form(part)))
    return Formulas(
        spans=frozenset(filter(None, map(_form, spans))),
        forms=tuple(parts),
        bags=frozenset(_bag(form) for form in parts if plain_number(form) is None),
    )


def leaves(form: str) -> Counter[str]:
    """Numbers and letters of an expression, with how often they occur."""
    return Counter(token for token in _tokens(form) if not NO_LEAF.fullmatch(token))


def _tokens(form: str) -> list[str]:
    return [LONG_NUMBER.sub("", token) for token in TOKEN.findall(form)]


def _spans(question: str) -> Iterator[str]:
    for found in SPAN.finditer(PICTURE.sub("", question)):
        yield WRAPPER.sub("", next(group for group in found.groups() if group is not None))


def _parts(span: str) -> Iterator[str]:
    yield span
    for row in ROW.split(span) if "matrix" not in span else [span]:
        yield row.replace("&", " ") if "matrix" not in row else row
        for side in RELATION.split(row):
            yield side
            yield from side.split(",")


def _form(part: str) -> str:
    part = ASKED.sub("", part.replace("&", " ") if "matrix" not in part else part)
    form = normal_form(part) if len(part) <= 4 * LONGEST_ANSWER else ""
    return form if len(form) <= LONGEST_ANSWER else ""


def _key(form: str) -> str:
    """A form, without brackets around a number and the zeros that end a decimal: (0.50) restates 0.5."""
    form = bare if plain_number(bare := form.strip("()")) is not None else form
    return form.rstrip("0").rstrip(".") if re.fullmatch(r"-?\d+\.\d+", form) else form


def _bag(form: str) -> tuple[str, ...]:
    tokens = ("/" if token == "\\frac" else token for token in _tokens(form) if token not in IGNORED)
    return tuple(sorted(tokens))
