r"""Other ways to grade MATH that are in use, to compare ours with: written from what is known of them, in our own words.

`math_verify_alone` asks math-verify about the two boxes as they are, in the worker that kills what takes too long (with the
worker's own check of tiny numbers; plain numbers are compared here, to save time). `hendrycks` is the string comparison
that came with the dataset, `minerva` the one of the Minerva paper without its sympy step. None sees the question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tba.tasks.gsm8k import equal_answers
from tba.tasks.math.answers import plain_number
from tba.tasks.math.symbolic import symbolic_equality

Grader = Callable[[str, str, str], bool]
"""(question, stored answer, content of the response's last box) -> right"""

MINERVA_DROPPED = re.compile(
    r"square|ways|integers|dollars|mph|inches|ft|hours|km|units|\\ldots|points|feet|minutes|digits|cents|degrees|cm|gm|pounds"
    r"|meters|meals|edges|students|multiples|\\mathrm\{th\}|\^\{?\\circ\}?|\\;|,\\!|\{,\}|\"|\\dots|\\text\{[s.\s]*\}(?:\^[23])?"
)


def math_verify_alone(question: str, wanted: str, given: str) -> bool:
    numbers = plain_number(given), plain_number(wanted)
    if numbers[0] is not None and numbers[1] is not None:
        return equal_answers(numbers[0], numbers[1])
    return symbolic_equality().equal(given, wanted)


def hendrycks(question: str, wanted: str, given: str) -> bool:
    return _hendrycks_form(given) == _hendrycks_form(wanted)


def minerva(question: str, wanted: str, given: str) -> bool:
    return _minerva_form(given) == _minerva_form(wanted)


GRADERS: Mapping[str, Grader] = {
    "Hendrycks": hendrycks,
    "Minerva": minerva,
    "math-verify alone": math_verify_alone,
}


def _hendrycks_form(text: str) -> str:
    r"""Without sizes of brackets, signs of degrees, dollars and per cent, a unit in `\text` and `k =`."""
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\left|\\right|\^\{\\circ\}|\^\\circ|\\\$|\\%", "", text)
    text = text.split("\\text{ ")[0] if text.count("\\text{ ") == 1 else text
    text = re.sub(r"(?:^|(?<=[ {]))\.", "0.", text)
    left, equals, right = text.partition("=")
    text = right if equals and "=" not in right and len(left.strip()) <= 2 else text
    return _fractions(re.sub(r"\\sqrt ?(\w)", r"\\sqrt{\1}", text).replace(" ", ""))


def _fractions(text: str) -> str:
    text = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\w)\{", r"\\frac{\1}{", text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def _minerva_form(text: str) -> str:
    """What follows the last equals sign, without articles, spaces, units and text commands; fractions are written out."""
    text = text.split("=")[-1]
    text = re.sub(r"\ban? |\\\$|\\ | ", "", text.replace(".$", "$").replace("mbox", "text"))
    text = re.sub(r",?\\text\{and\}", ",", text)
    text = MINERVA_DROPPED.sub("", text)
    text = re.sub(r"^.*\$(.+?)\$.*$", r"\1", text)
    text = re.sub(r"\\(?:text|textbf|overline|boxed)\{(.*?)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{\[])", r"sqrt{\1}", text).replace("$", "")
    return text.replace(",", "") if text.replace(",", "").isdigit() else text
