r"""GSM8K: grade-school word problems (github openai/grade-school-math), the paper's first experiment.

    {"question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. ...",
     "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold ... altogether.\n#### 72"}

The data is read from where it lies and never shipped:

    tba train configs/gsm8k_one_gpu.yaml model.path=MODEL task.data=FOLDER     train.jsonl and test.jsonl, or .jsonl.gz
    tba evaluate MODEL --task gsm8k task.data=openai/gsm8k                     from the hub, with `datasets` installed

An answer is one number of the response. `final_number` is strict: nothing counts but the number after the last `####`.
`given_answer` is for models that were not taught one format. It looks in the first of these places that has a number:

1. the line of the last `####` (the next line where nothing else stands on it): of an equation the last side that is worked
   out; else what stands right after the marker;
2. the last `\boxed{}`, in the same way, with words before the number allowed;
3. the whole text.

In the first two, the first number is the answer, for what follows it is its unit or a remark (`72 (48 + 24)`); in the
whole text it is the last number. A sum, difference or product that is not worked out, as in `#### 48 + 24`, is no answer. A
power of a number (`10^2`), a fraction, a mixed number, `5 \times 10^3` and `3 dollars and 50 cents` are one number each; the
power of a unit (`m^2`) is no number. A minus counts as a sign where nothing stands before it that it could be taken from.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from tba.tasks.data.make_prompt import Source
from tba.tasks.data.rows import BadRow, DataRow, prompt_column, require_object, text_column
from tba.tasks.questions import QuestionTask


def read_problem(row: DataRow) -> tuple[str, str]:
    require_object(row, columns="a `question` and an `answer`")
    question, answer = prompt_column(row, "question"), text_column(row, "answer")
    if marked_answer(answer) is None:
        raise BadRow("no answer", f"{row.place}: `answer` has no number after `####`; it ends with {answer[-40:]!r}.")
    return question, answer


class GSM8KTask(QuestionTask):
    source = Source(hub_subset="main", read=read_problem)  # another subset has Socratic sub-questions
    template = "[MATH_TASK] Problem:\n{question}\n\nSolution:"  # what the paper's SFT model was taught
    instruction = (
        "Reason step by step, and end with the final answer as a number after four hash signs, for example: #### 42"
    )

    def is_right(self, text: str, *, question: str, answer: str) -> bool:
        wanted = marked_answer(answer)
        assert wanted is not None, "rows are checked when they are read"
        return equal_answers(given_answer(text), wanted)


MARKER = "####"
BOX = r"\boxed{"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
DECIMAL_TOLERANCE = Fraction(1, 10**6)
"""Largest difference of equal numbers where one is written with a decimal point, and perhaps rounded."""
LONGEST_NUMBER = 100
"""Longest number in digits. Longer ones are babble, and Python refuses to read numbers of more than 4,300 digits."""

DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9A-Za-z.])\.[0-9]+)"
"""72, 1,080, 1,00,000, 3.50 or .5; a comma counts inside a number only where three digits end it."""
POWER, SCALE = (rf"\^(?:\{{ *(?P<{name}>[-+]?[0-9]+) *\}}|(?P<{name}_bare>[-+]?[0-9]+))" for name in ("power", "scale"))
CURRENCY = r"\\?[$€£¥₹]"
QUANTITY = re.compile(
    # "48-24" and "48 apples - 24" have no sign, "= - 5" and "$-5$" have one
    rf"(?:(?P<minus>(?<![0-9A-Za-z)\]}}%])-)|(?:(?<=[=:({{$])|(?<=[=:({{$] ))(?P<wide_minus>- +))?(?:{CURRENCY} ?)?"
    rf"(?:(?P<whole>[0-9]+) +(?=[0-9]+/[0-9]))?(?P<top>{DIGITS})(?:{POWER})?(?:/(?P<bottom>{DIGITS}))?"
    rf"(?: *(?:\*|×|\\times|\\cdot) *10{SCALE})?"
)
"""A number as people write it: fractions, mixed fractions, powers and scientific notation included."""
RIGHT_AFTER = re.compile(rf"(?:\\boxed|\W)*?{QUANTITY.pattern}")
"""A number with nothing but signs before it: ` **$72** per day`, but not ` Step 2: add them`."""
NOT_WORKED_OUT = re.compile(
    rf"(?:\\?[%)}}$])* *(?:[+*×÷·]|-(?! )|- (?={CURRENCY}?[0-9(])|/(?=[ 0-9(])|\\(?:times|cdot|div|pm)|x(?= ?[0-9]))"
    rf" *(?:[-($]|\\\$)*[0-9]"
)
"""Text after a number that is only the first one of a sum or product."""
MARKDOWN = re.compile(r"\*\*+|__+|`")
FRACTION = re.compile(r"(?P<before>[0-9] *)?\\[dtc]?frac *(?:\{ *([^{}]*?) *\}|([0-9])) *(?:\{ *([^{}]*?) *\}|([0-9]))")
UNIT_POWER = re.compile(r"(?<=[A-Za-z}])\^(?:\{[^{}]*\}|[-+]?[0-9]+)")
"""Power of a unit: the 2 of m^2 is no number."""
DOLLARS_AND_CENTS = re.compile(r"([0-9]) dollars?,? and ([0-9]{1,2}) cents?\b")
MARKS = (("−", "-"), ("–", "-"), ("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\ ", " "), ("~", " "), ("\\left", ""))


class Number(NamedTuple):
    """Number(value=Fraction(3, 4), is_decimal=True) was written as 0.75, with is_decimal=False as 3/4."""

    value: Fraction
    is_decimal: bool


def final_number(text: str) -> str | None:
    """The number after the last `####`, commas removed; None where there is none.

    final_number("7*4=28\\n#### 1,028") == "1028"
    """
    # The last marker: a policy that writes several is judged by what it ends with.
    _, marker, tail = text.rpartition(MARKER)
    found = NUMBER.match(tail.strip().removeprefix("$")) if marker else None
    return found.group().replace(",", "") if found else None


def same_number(given: str | None, wanted: str) -> bool:
    """Whether two texts are equal as numbers: "28.0" is "28"; None equals nothing."""
    return given is not None and float(given) == float(wanted.replace(",", ""))


def given_answer(text: str) -> Number | None:
    """The number that a response gives as its answer, by the rule above; None without one.

    given_answer("Half of 48 is 24, so 48 + 24 = **$72.00**.") == Number(Fraction(72), is_decimal=True)
    """
    text = _plain(text)
    # The rule of the module's docstring, places 1 and 2; the whole text follows.
    for place, find in ((_marked(text), RIGHT_AFTER.match), (_boxed(text), QUANTITY.search)):
        # Each side with its equals sign, so that "- 5" has a sign.
        sides = [found for side in reversed(place.split("=")) if (found := find(f"={side}")) is not None]
        if sides:
            # The last side that is worked out; a place with numbers and no such side is no answer at all.
            return next((_number(side) for side in sides if not NOT_WORKED_OUT.match(side.string, side.end())), None)
    for line in reversed(text.splitlines()):
        # From the last line back, for a response may be long and most answers stand at its end.
        if every := list(QUANTITY.finditer(line)):
            return _number(every[-1])
    return None


def marked_answer(text: str) -> Number | None:
    """The number right after the last `####`; None where there is none."""
    found = RIGHT_AFTER.match(_marked(_plain(text)))
    return _number(found) if found else None


def equal_answers(given: Number | None, wanted: Number) -> bool:
    """Whether two numbers are equal: exactly, or within 1e-6 where one was written as a decimal; None equals nothing."""
    if given is None:
        return False
    tolerance = DECIMAL_TOLERANCE if given.is_decimal or wanted.is_decimal else 0
    return abs(given.value - wanted.value) <= tolerance


def _plain(text: str) -> str:
    """LaTeX's and markdown's ways to write a number, as people write it: `1{,}000`, `\\frac{3}{4}`, `5\\text{ m}^2`."""

    def fraction(found: re.Match[str]) -> str:
        before = f"{found['before'].strip()} " if found["before"] else ""  # of a mixed number
        return f"{before}{found[2] or found[3] or ''}/{found[4] or found[5] or ''}"

    # Order matters: marks and markdown first, because the patterns below expect plain digits.
    for mark, plain in MARKS:
        text = text.replace(mark, plain)
    text = MARKDOWN.sub("", text)
    if "\\" in text or "^" in text:
        # Both need a backslash or a power sign: most texts have none, and the patterns cost time.
        text = UNIT_POWER.sub("", FRACTION.sub(fraction, text))
    return DOLLARS_AND_CENTS.sub(lambda found: f"{found[1]}.{found[2]:0>2}", text) if "cent" in text else text


def _marked(text: str) -> str:
    """The line of the last marker, or the one after it; empty without any."""
    return (text.rpartition(MARKER)[2].lstrip().splitlines() or [""])[0] if MARKER in text else ""


def _boxed(text: str) -> str:
    """Content of the last box, or what follows where it does not close; empty without any."""
    _, box, tail = text.rpartition(BOX)
    depth = 1
    # Boxes hold braces of their own (\frac{1}{2}), so a pattern cannot find the end.
    for position, character in enumerate(tail if box else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return tail[:position]
    return tail if box else ""


def _number(found: re.Match[str]) -> Number | None:
    """Number that a match means; None where no number can be meant: a division by zero, or hundreds of digits."""
    whole, top, bottom = ((found[part] or "").replace(",", "") for part in ("whole", "top", "bottom"))
    # Five characters are enough to see that an exponent is beyond LONGEST_NUMBER.
    power, scale = (
        int((found[part] or found[f"{part}_bare"] or default)[:5]) for part, default in (("power", "1"), ("scale", "0"))
    )
    # Bounded before anything is computed: 9^99999 would take the searcher's time.
    longest = max(len(whole), len(top) * max(1, abs(power)), len(bottom), abs(scale))
    if longest > LONGEST_NUMBER or (bottom and Fraction(bottom) == 0) or (power < 0 and Fraction(top) == 0):
        return None
    size = Fraction(whole or 0) + Fraction(top) ** power / Fraction(bottom or 1)
    size *= Fraction(10) ** scale
    minus = found["minus"] or found["wide_minus"]
    return Number(-size if minus else size, is_decimal="." in top + bottom)
