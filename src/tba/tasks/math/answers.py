r"""Answers of competition mathematics: the content of the last `\boxed{...}`, and its normal form.

The normal form leaves out what does not matter: spaces, sizes of brackets, `x =`, and units (signs for per cent, degrees and
dollars are units too). Scale words are no units: `5 million` is 5000000.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from tba.tasks.gsm8k import LONGEST_NUMBER, Number

LONGEST_ANSWER = 400
"""Longest answer in characters of its normal form. Longer ones are babble and equal nothing; MATH's longest is 159."""

PUNCTUATION = ".,;: "
"""Nothing that an answer may end with."""

BOX = re.compile(r"\\boxed\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""Braces, and what a backslash escapes: the `\\}` of a set closes no box."""

_TEXT_COMMAND = r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|operatorname)\s*\{"
_TEXT = rf"{_TEXT_COMMAND}([^{{}}]*)\}}"
_SHORT_UNITS = "cm|mm|km|ft|mi|yd|kg|lb|lbs|mg|ml|hr|hrs"
_BOUND = r"(?:more|less|fewer|least|most|not|than)\b"
"""`5\\text{ or more}` is not 5."""

NUMBER_WITH_COMMAS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
PLAIN_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?:(?P<decimal>\d+(?:\.\d+)?|\.\d+)|(?P<whole>\d*)\\frac\{(?P<top>-?\d+)\}\{(?P<bottom>\d+)\})"
)
"""7, -0.5, \\frac{3}{4}, and 2\\frac{1}{3}, which in an answer is a mixed number and no product."""
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SCALED = re.compile(
    rf"(?<![\d,.])(\d[\d,]*(?:\.\d+)?)((?:\s|\\[ ,;])*(?:{_TEXT_COMMAND}\s*)?)({'|'.join(SCALES)})s?(?![a-z])"
)
NAME = re.compile(
    r"(?P<name>(?:\\angle ?)?(?:[a-zA-Z]+|\\(?:alpha|beta|gamma|theta|phi|lambda|mu|sigma|omega)|[a-zA-Z]\^\{-1\})"
    r"(?:_\{?\w+\}?)?'*(?:\([\w,]+\))?|\([a-zA-Z](?:,[a-zA-Z])+\)|\[[A-Z]+\]|\\vec\{\w+\})(?:=|\\in(?![a-zA-Z]))(?=[^=]*$)"
)
"""Names that an answer may have: x=5, f(x)=2x, x\\in[0,1], (x,y)=(1,2), \\angle ABC=30, but not x^2=5."""
WORD = re.compile(rf"{_TEXT_COMMAND}[^{{}}]*[a-zA-Z]{{2}}|(?<![\\a-zA-Z])[A-Z]{{2,}}(?![a-zA-Z])")
"""Text, or several capitals in a row: a word and no product."""

SIGNS = {"percent": r"%", "degree": r"\\circ|\\degree|°", "dollar": r"\\\$", "euro": "€"}
MEASURES = {
    "percent": "percent",
    "degree": "degrees?",
    "dollar": "dollars?|usd",
    "euro": "euros?",
    "cent": r"cents?",
    "millimetre": r"mm|millimet(?:er|re)s?",
    "centimetre": r"cm|centimet(?:er|re)s?",
    "metre": r"m|met(?:er|re)s?",
    "kilometre": r"km|kilomet(?:er|re)s?",
    "inch": r"in|inch(?:es)?",
    "foot": r"ft|foot|feet",
    "yard": r"yd|yards?",
    "mile": r"mi|miles?",
    "second": r"s|secs?|seconds?",
    "minute": r"mins?|minutes?",
    "hour": r"hrs?|hours?",
    "day": r"days?",
    "week": r"weeks?",
    "month": r"months?",
    "year": r"years?",
    "gram": r"gm?|grams?",
    "kilogram": r"kg|kilograms?",
    "pound": r"lbs?|pounds?",
}
"""Units that must be equal where both answers have one. Whatever else is counted (ways, points) may have any name."""
SIGN, MEASURE = (
    re.compile("|".join(rf"(?P<{name}>{before}(?:{words}){after})" for name, words in table.items()))
    for table, before, after in ((SIGNS, "", ""), (MEASURES, "(?<![a-z])", "(?![a-z])"))
)

Rewrite = tuple[re.Pattern[str], str]
SPELLINGS: tuple[Rewrite, ...] = tuple(
    (re.compile(pattern), into)
    for pattern, into in (
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])\.?", ""),
        (r"\{,\}|,\\!", ","),
        (r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\?\$|\\?%|\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|°", ""),
        (r"\\leq(?![a-zA-Z])|≤", r"\\le "),
        (r"\\geq(?![a-zA-Z])|≥", r"\\ge "),
        (r"\\neq(?![a-zA-Z])|≠", r"\\ne "),
        (r"\\times(?![a-zA-Z])|\\ast(?![a-zA-Z])|[×·*]", r"\\cdot "),
        (r"\\div(?![a-zA-Z])|÷", "/"),
        (r"−", "-"),
        (r"π", r"\\pi "),
        (r"∞", r"\\infty "),
        (r"√", r"\\sqrt "),
        (r"±", r"\\pm "),
        (r",?\s*(?:\\(?:text|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*", ","),
        # 8:34 PM, \\text{8:34 p.m.}
        (rf"^(?:{_TEXT_COMMAND})?([\d:! ]*\d)\s*(?:{_TEXT_COMMAND})?\s*[aA]\.?[mM]\.?\s*\}}?\W*$", r"\1am"),
        (rf"^(?:{_TEXT_COMMAND})?([\d:! ]*\d)\s*(?:{_TEXT_COMMAND})?\s*[pP]\.?[mM]\.?\s*\}}?\W*$", r"\1pm"),
    )
)
"""Ways to write the same, applied while spaces still separate words."""
UNITS: tuple[re.Pattern[str], ...] = (
    re.compile(rf"(?<=[\d)}}\]i])\s*(?!\\\w+\s*\{{[^}}]*\b{_BOUND}){_TEXT}(?:\^\{{?\d\}}?)?$"),  # 5\\text{ cm}^2
    re.compile(rf"(?<=[\d}}])(?:\s+(?!{_BOUND})(?:[a-zA-Z]{{3,}}|{_SHORT_UNITS})(?![a-zA-Z]))+(?:\^\{{?\d\}}?)?$"),
)
COMPACT: tuple[Rewrite, ...] = tuple(
    (re.compile(pattern), into)
    for pattern, into in (
        (_TEXT, r"\1"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", "\\1\x00"),  # the space of `\\pi r` stays
        (r"(?<=\d)\s+(?=\d{3}(?!\d))", ""),  # 10 000
        (r"(?<=\d)\s+(?=[\d.])", "\x00"),  # `5 6` is not 56
        (r"\s+", ""),
        ("\x00", " "),
        (r"\\frac(\d)\{", r"\\frac{\1}{"),
        (r"\\frac\{([^{}]*)\}(\d)", r"\\frac{\1}{\2}"),
        (r"^([-+]?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
        (r"\\sqrt ?(\d|[a-zA-Z])", r"\\sqrt{\1}"),
        (r"([\^_])\{(\w)\}", r"\1\2"),
        (r"(?<=[\d)}])\\cdot ?(?=[a-zA-Z]|\\(?:sqrt|pi))|(?<=\))\\cdot(?=\()", ""),
        (r"(?<![\d_^{.])(\d+)\((?=-?(?:\d|\\frac))", r"\1\\cdot("),  # 2(3) is 6; math-verify takes it for 2 + 3
        (r"(?<![\d.])\.(?=\d)", "0."),
        (r"(?<=[(\[,])\+(?=\\infty)", ""),
        (r"^\(([A-Z])\)$", r"\1"),  # a choice
    )
)
"""Spellings that hold once the spaces are gone."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    r"""An answer that was read: `x = 5\text{ cm}` is Answer(form="5", name="x", measure="centimetre", has_words=False)"""

    form: str
    """Normal form, without the name."""
    name: str
    """Name before the equals sign; empty where there is none."""
    measure: str | None
    """Unit of the answer, where it is one of MEASURES."""
    has_words: bool
    """Whether the answer is made of words, which only text can compare."""


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`; None without one, or where the text ends before its brace closes.

    last_boxed(r"so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    """
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    start, depth = boxes[-1].end(), 1
    # An escaped brace counts 0, see BRACE.
    for brace in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : brace.start()].strip()
    return None


@lru_cache(maxsize=20_000)
def read_answer(text: str) -> Answer:
    """The parts of an answer that are compared."""

    def scaled(found: re.Match[str]) -> str:
        # Fraction of a babbled number would cost time and be refused later anyway.
        if len(found[1]) > LONGEST_NUMBER:
            return found.group()
        size = Fraction(found[1].replace(",", "")) * SCALES[found[3]]
        return f"{size if size.denominator == 1 else float(size)}{found[2]}"

    # Before the spellings, which remove signs of per cent, degrees and dollars.
    measure = SIGN.search(text)
    # Before units are cut off: a scale word would go with them, and 5 million would be 5.
    text = SCALED.sub(scaled, " ".join(text.split()))
    for pattern, into in SPELLINGS:
        text = pattern.sub(into, text)
    text = text.strip().rstrip(PUNCTUATION)
    for unit in UNITS:
        # A unit in words wins over a sign.
        if found := unit.search(text):
            text, measure = text[: found.start()], MEASURE.search(found.group().lower()) or measure
    # After units, which are words too, and before COMPACT, which takes words out of \text.
    has_words, text = WORD.search(text) is not None, text.strip().rstrip(PUNCTUATION)
    for pattern, into in COMPACT:
        text = pattern.sub(into, text)
    text = text.strip().rstrip(PUNCTUATION)
    # On the compact form: `x = 5` and `x=5` have the same name.
    name = NAME.match(text)
    form = re.sub(r"^([-+]?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text[name.end() :] if name else text)
    # Commas go only where they group thousands: 1,2 is a list.
    if NUMBER_WITH_COMMAS.fullmatch(form):
        form = form.replace(",", "")
    elif form.isalpha() and len(form) > 1:
        form = form.casefold()
    return Answer(
        form=form,
        name=name["name"] if name else "",
        measure=measure.lastgroup if measure else None,
        has_words=has_words and not (name and WORD.search(form) is None),
    )


def normal_form(answer: str) -> str:
    r"""An answer without what does not matter: spaces, sizes of brackets, units, `x =`.

    normal_form(r"x = \dfrac12 \text{ cm}") == r"\frac{1}{2}"
    """
    return read_answer(answer).form


def plain_number(form: str) -> Number | None:
    """A normal form that is a whole number, a decimal, a fraction or a mixed number; None for all others."""
    # Python refuses to read numbers of thousands of digits.
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
