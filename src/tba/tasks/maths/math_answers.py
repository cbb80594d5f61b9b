r"""Reading and comparing the answers of competition mathematics: what stands in the last `\boxed{...}`.

Two answers are equal when their normal forms are the same text or the same number, or else when `symbolic` says so, which
is slow and decides what text cannot: `\frac{\sqrt{2}}{2}` is `\frac{1}{\sqrt{2}}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from tba.tasks.maths.answers import LONGEST_NUMBER, Number, equal_answers

LONGEST_ANSWER = 400
"""Characters, in normal form. Longer ones are babble and equal nothing; MATH's longest is 159."""

PUNCTUATION = ".,;: "
"""Nothing that an answer may end with."""

BOX = re.compile(r"\\boxed\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""Braces, and what a backslash escapes: the `\\}` of a set closes no box."""

_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}"
_SHORT_UNITS = "cm|mm|km|ft|mi|yd|kg|lb|lbs|mg|ml|hr|hrs"

NUMBER_WITH_COMMAS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
PLAIN_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?:(?P<decimal>\d+(?:\.\d+)?|\.\d+)|(?P<whole>\d*)\\frac\{(?P<top>-?\d+)\}\{(?P<bottom>\d+)\})"
)
"""7, -0.5, \\frac{3}{4}, and 2\\frac{1}{3}, which in an answer is a mixed number and no product."""

Rewrite = tuple[re.Pattern[str], str]
SPELLINGS: tuple[Rewrite, ...] = tuple(
    (re.compile(pattern), into)
    for pattern, into in (
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])\.?", ""),
        (r"\{,\}", ","),
        (r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\?\$|\\?%|\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|°", ""),
        (r"\\leq(?![a-zA-Z])|≤", r"\\le"),
        (r"\\geq(?![a-zA-Z])|≥", r"\\ge"),
        (r"\\neq(?![a-zA-Z])|≠", r"\\ne"),
        (r"\\times(?![a-zA-Z])|\\ast(?![a-zA-Z])", r"\\cdot"),
        (r"−", "-"),
        (r"π", r"\\pi"),
        (r"∞", r"\\infty"),
        (r"√", r"\\sqrt"),
        (r",?\s*(?:\\(?:text|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*", ","),
    )
)
"""Ways to write the same, while spaces still tell words apart."""
UNITS: tuple[Rewrite, ...] = (
    # 5\text{ cm}^2, but neither 8:34\text{ p.m.} nor the whole of \text{odd}
    (re.compile(rf"(?<=[\d)}}\]i])\s*(?!\\text\s*\{{\s*[ap]\.?m){_TEXT}(?:\^\{{?\d\}}?)?$"), ""),
    (re.compile(rf"(?<=[\d}}])(?:\s+(?:[a-zA-Z]{{3,}}|{_SHORT_UNITS})(?![a-zA-Z]))+(?:\^\{{?\d\}}?)?$"), ""),
)
COMPACT: tuple[Rewrite, ...] = tuple(
    (re.compile(pattern), into)
    for pattern, into in (
        (_TEXT, r"\1"),
        (r"\s+", ""),
        (r"^(?:[a-zA-Z]{1,2}|[a-zA-Z]\([a-zA-Z]\))(?:=|\\in(?![a-zA-Z]))(?=[^=]*$)", ""),  # x=5, f(x)=2x, x\in[0,1]
        (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac(\d)\{", r"\\frac{\1}{"),
        (r"\\frac\{([^{}]*)\}(\d)", r"\\frac{\1}{\2}"),
        (r"^([-+]?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
        (r"\\sqrt(\d|[a-zA-Z])", r"\\sqrt{\1}"),
        (r"([\^_])\{(\w)\}", r"\1\2"),
        (r"(?<![\d.])\.(?=\d)", "0."),
        (r"(?<=[(\[,])\+(?=\\infty)", ""),
        (r"^\(([A-Z])\)$", r"\1"),  # a choice
    )
)
"""Spellings that hold once the spaces are gone."""


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}`; None without one, or where the text ends before its brace closes.

    last_boxed(r"so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    """
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    start, depth = boxes[-1].end(), 1
    for brace in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : brace.start()].strip()
    return None


def same_answer(given: str | None, wanted: str, *, symbolic: Callable[[str, str], bool]) -> bool:
    """Whether an answer is the one that is wanted; None equals nothing."""
    if given is None or len(given) > 4 * LONGEST_ANSWER:
        return False
    given_form, wanted_form = normal_form(given), normal_form(wanted)
    if not given_form or len(given_form) > LONGEST_ANSWER:
        return False
    if given_form == wanted_form:
        return True
    given_number, wanted_number = plain_number(given_form), plain_number(wanted_form)
    if given_number is not None and wanted_number is not None:
        return equal_answers(given_number, wanted_number)
    return symbolic(given.rstrip(PUNCTUATION), wanted.rstrip(PUNCTUATION))


def normal_form(answer: str) -> str:
    r"""An answer without what does not matter: spaces, sizes of brackets, units, `x =`.

    normal_form(r"x = \dfrac12 \text{ cm}") == r"\frac{1}{2}"
    """
    text = answer
    for rewrites in (SPELLINGS, UNITS, COMPACT):
        for pattern, into in rewrites:
            text = pattern.sub(into, text)
        text = text.strip().rstrip(PUNCTUATION)
    if NUMBER_WITH_COMMAS.fullmatch(text):
        return text.replace(",", "")
    return text.casefold() if text.isalpha() and len(text) > 1 else text


def plain_number(form: str) -> Number | None:
    """A normal form that is a whole number, a decimal, a fraction or a mixed number; None for all others."""
    found = PLAIN_NUMBER.fullmatch(form) if len(form) <= LONGEST_NUMBER else None
    if found is None:
        return None
    if found["decimal"] is not None:
        size = Fraction(found["decimal"])
    elif int(found["bottom"]) == 0 or (found["whole"] and found["top"].startswith("-")):
        return None
    else:
        size = int(found["whole"] or 0) + Fraction(int(found["top"]), int(found["bottom"]))
    return Number(-size if found["sign"] == "-" else size, is_decimal="." in (found["decimal"] or ""))
