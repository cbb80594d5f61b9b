r"""Reading the answer out of a worked solution.

`final_number` is strict: nothing counts but the number after the last `####`. `given_answer` is for models that were not
taught one format: the number after `####`, or in `\boxed{}`, or else the last one in the text.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

MARKER = "####"
BOX = r"\boxed{"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
DECIMAL_TOLERANCE = Fraction(1, 10**6)
"""Numbers written with a decimal point may be rounded this much."""
LONGEST_NUMBER = 100
"""Digits. Longer ones are babble, and Python refuses to read numbers of more than 4,300 digits."""

DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9A-Za-z.])\.[0-9]+)"
"""72, 1,080, 1,00,000, 3.50 or .5; a comma counts inside a number only where three digits end it."""
QUANTITY = re.compile(
    r"(?P<minus>(?<![0-9A-Za-z)\]}%])-)?"  # the minus of "48-24" is no sign
    r"(?:\\?[$€£¥₹])?"  # "-$5"
    rf"(?:(?P<whole>[0-9]+) +(?=[0-9]+/[0-9]))?(?P<top>{DIGITS})(?:/(?P<bottom>{DIGITS}))?"
)
"""A number as people write it, fractions and mixed fractions included."""
RIGHT_AFTER = re.compile(rf"(?:\\boxed|\W)*?{QUANTITY.pattern}")
"""A number with nothing but signs before it: ` **$72** per day`, but not ` Step 2: add them`."""
FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
EXPONENT = re.compile(r"\^(?:\{[^{}]*\}|[-+]?[0-9]+)")
"""The 2 of m^2 is part of the unit."""


class Number(NamedTuple):
    """Number(value=Fraction(3, 4), is_decimal=True) was written as 0.75, with is_decimal=False as 3/4."""

    value: Fraction
    is_decimal: bool


def final_number(text: str) -> str | None:
    """The number after the last `####`, commas removed; None where there is none.

    final_number("7*4=28\\n#### 1,028") == "1028"
    """
    _, marker, tail = text.rpartition(MARKER)
    found = NUMBER.match(tail.strip().removeprefix("$")) if marker else None
    return found.group().replace(",", "") if found else None


def same_number(given: str | None, wanted: str) -> bool:
    """Equal as numbers: "28.0" is "28"; None equals nothing."""
    return given is not None and float(given) == float(wanted.replace(",", ""))


def given_answer(text: str) -> Number | None:
    """The number right after the last `####`, else the one in the last `\\boxed{}`, else the last one; None without any.

    given_answer("Half of 48 is 24, so 48 + 24 = **$72.00**.") == Number(Fraction(72), is_decimal=True)
    """
    text = _plain(text)
    for read in (_marked, _boxed, _last):
        if (number := read(text)) is not None:
            return number
    return None


def marked_answer(text: str) -> Number | None:
    """The number right after the last `####`; None where there is none."""
    return _marked(_plain(text))


def equal_answers(given: Number | None, wanted: Number) -> bool:
    """Equal as numbers: exactly, or within 1e-6 where one was written as a decimal; None equals nothing."""
    if given is None:
        return False
    tolerance = DECIMAL_TOLERANCE if given.is_decimal or wanted.is_decimal else 0
    return abs(given.value - wanted.value) <= tolerance


def _plain(text: str) -> str:
    """LaTeX's ways to write a number, as people write it: `1{,}000`, `\\frac{3}{4}`, `5\\text{ m}^2`."""
    for mark, plain in (("−", "-"), ("{,}", ","), ("\\,", ""), ("\\!", "")):
        text = text.replace(mark, plain)
    return EXPONENT.sub("", FRACTION.sub(r" \1/\2", text))


def _marked(text: str) -> Number | None:
    _, marker, tail = text.rpartition(MARKER)
    found = RIGHT_AFTER.match(tail) if marker else None
    return _number(found) if found else None


def _boxed(text: str) -> Number | None:
    """The first number in the last box: what follows it is its unit."""
    _, box, tail = text.rpartition(BOX)
    found = QUANTITY.search(tail[: _closing_brace(tail)]) if box else None
    return _number(found) if found else None


def _last(text: str) -> Number | None:
    every = list(QUANTITY.finditer(text))
    return _number(every[-1]) if every else None


def _closing_brace(tail: str) -> int:
    """Where the brace closes that was opened before `tail`; its end where none does."""
    depth = 1
    for position, character in enumerate(tail):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return position
    return len(tail)


def _number(found: re.Match[str]) -> Number | None:
    """None where no number can be meant: a division by zero, or hundreds of digits."""
    whole, top, bottom = ((found[part] or "").replace(",", "") for part in ("whole", "top", "bottom"))
    if max(len(whole), len(top), len(bottom)) > LONGEST_NUMBER or (bottom and Fraction(bottom) == 0):
        return None
    size = Fraction(whole or 0) + Fraction(top) / Fraction(bottom or 1)
    return Number(-size if found["minus"] else size, is_decimal="." in top + bottom)
