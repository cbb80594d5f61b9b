r"""The rules by which an answer to a question of competition mathematics is right.

Text decides first, for it is fast and cannot be fooled; `symbolic`, which is slow, decides what is left. In this order:

1. The same normal form as the stored answer is right, unless the two have different names (`y = 5` for `x = 5`) or units.
2. An answer that restates a formula of the question is wrong, also with its terms in another order.
3. An equation stands for its last side, where each other side is a name, a formula of the question or equal to the answer:
   `x = 2 + 3 = 5` is 5, but `x^2 = 5` is not, nor is `x = 5 = 6`.
4. Words, times and numbers in a base are compared as text; plain numbers exactly, decimals to 1e-6.
5. Lists and sets have as many elements, in any order (`\pm` makes two); pairs, intervals and vectors in their order, with
   the same brackets; unions have the same parts. Equations equal equations only, inequalities inequalities.
6. Of what is left, symbols decide, with two conditions. Arithmetic may stay, solving may not: sums, products, powers and
   roots of numbers need not be worked out, but functions (sines, logarithms, factorials, binomials, series, floors, products
   of matrices) may stay only where the stored answer has them. And where the question states an expression that equals the
   answer, the task is to rewrite it: the response then has no more numbers than the stored answer and not all those of the
   expression (`\frac{\sqrt{8}}{1}` does not simplify `\sqrt{8}`), and where there are variables, the answer's own numbers
   and letters.

"Compute $\sin 60^\circ$" is not answered by `\boxed{\sin 60^\circ}`, which symbols would find equal to the stored answer:
`Formulas` holds the formulas of a question, so that a copy of one of them does not count as an answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tba.tasks.gsm8k import equal_answers
from tba.tasks.math.answers import LONGEST_ANSWER, Answer, normal_form, plain_number, read_answer

MOST_FORMULAS = 12
"""Formulas of a question that are compared with its answer by symbols; each may take seconds, once."""

FUNCTION = re.compile(
    r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?(?![a-z])|\\(?:log|ln|lg|exp|[dt]?binom|choose|sum|prod|int|lim|lfloor|lceil|lvert"
    r"|vert|det|gcd|lcm|max|min|[bp]?mod|[cl]?dots|begin|overline|prime)(?![a-z])|!|\||\^T"
    r"|(?<![\\a-zA-Z])(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)|log|ln|exp|gcd|lcm|max|min|mod|det|floor|ceil|sqrt|abs)(?![a-z])"
)
INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|ne|subset|in|notin|approx|equiv)(?![a-zA-Z])")
BASED = re.compile(r"(?P<digits>-?[0-9A-Za-z.]+)_\{?(?P<base>\d+)\}?")
TIME = re.compile(r"[\d:]+[ap]m")
RATIO = re.compile(r"([^:]+):([^:]+)")
VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-df-hj-zA-Z](?![a-zA-Z]*\{)|(?<=\d)[a-df-hj-zA-Z]")
BASES = {
    2: "two|binary",
    3: "three",
    4: "four",
    5: "five",
    6: "six",
    7: "seven",
    8: "eight|octal",
    9: "nine",
    16: "hexadecimal",
}
OPENING, CLOSING = "([{", ")]}"
Symbolic = Callable[[str, str], bool]
"""Function that says whether two formulas, given and wanted, are equal."""


def same_answer(given: str | None, wanted: str, *, question: str, symbolic: Symbolic) -> bool:
    """Whether an answer is the one that is wanted of a question; None is never right."""
    # The raw text is bounded too: the patterns of read_answer are slow on babble.
    if given is None or len(given) > 4 * LONGEST_ANSWER:
        return False
    read, stored = read_answer(given), read_answer(wanted)
    if not read.form or len(read.form) > LONGEST_ANSWER:
        return False
    # About different things: other variables, other units. Single letters are variables; f(x) and a missing name are not.
    names, measures = {read.name, stored.name}, {read.measure, stored.measure} - {None}
    if len(measures) == 2 or (len(names) == 2 and all(len(name) == 1 for name in names)):
        return False
    if read.form == stored.form:
        return True
    # Only here: most answers are decided by text, and the question need not be read.
    comparison = Comparison(question=question, formulas=formulas_of(question), symbolic=symbolic)
    return comparison.is_right(read, stored)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparing the answers to one question, after their texts were found to differ."""

    question: str
    formulas: Formulas
    symbolic: Symbolic

    def is_right(self, given: Answer, wanted: Answer) -> bool:
        form, stored = _unnamed(given.form), _unnamed(wanted.form)
        # Rule 2 comes before all others: a copy of the question's formula may well equal the answer.
        if self.formulas.has(form, wanted=stored):
            return False
        # Symbols would read words as products of letters.
        if given.has_words or wanted.has_words:
            return Counter(_split(form.casefold(), ",")) == Counter(_split(stored.casefold(), ","))
        if "=" in stored:
            return self._same_equation(f"{given.name}={form}" if given.name else form, stored)
        if "=" in form:
            if wanted.name and VARIABLE.search(stored) and self._same_equation(form, f"{wanted.name}={stored}"):
                return True  # 2x - y + 3 = 0 is y = 2x + 3
            # Rule 3: the last side is the answer, and each other side must say nothing else.
            *others, form = form.split("=")
            if not form or self.formulas.has(form, wanted=stored):
                return False
            for side in others:
                # With an equals sign, because NAME only matches before one.
                is_name = bool(read_answer(f"{side}=0").name)
                if not (is_name or side in self.formulas.spans or self._equal(side, stored)):
                    return False
        return self._equal(form, stored) and not self._only_rewritten(form, stored)

    def _same_equation(self, given: str, wanted: str) -> bool:
        sides = wanted.split("=")
        if all(plain_number(side) for side in sides):  # 0.56 = 56%
            return given in sides
        if given.count("=") != wanted.count("=") or _functions(given) - _functions(wanted):
            return False
        return self.symbolic(given, wanted) and not self._only_rewritten(given, wanted)

    def _equal(self, given: str, wanted: str) -> bool:
        """Whether two forms are equal by their kinds, element by element."""
        if given == wanted:
            return True
        numbers = plain_number(given), plain_number(wanted)
        if numbers[0] is not None and numbers[1] is not None:
            return equal_answers(numbers[0], numbers[1])
        # Equal times have equal texts, which was asked first.
        if TIME.fullmatch(given) or TIME.fullmatch(wanted):
            return False
        # From here on by kind, the more special first: bases, ratios, inequalities, unions, collections.
        if "_" in given + wanted:
            return self._same_in_base(given, wanted)
        if ":" in given + wanted:
            given, wanted = (RATIO.sub(r"\\frac{\1}{\2}", form) for form in (given, wanted))
            has_ratio = "ratio" in self.question.lower() and ":" not in given + wanted
            return has_ratio and self._same_value(given, wanted)
        if INEQUALITY.search(given) or INEQUALITY.search(wanted):
            both = INEQUALITY.search(given) and INEQUALITY.search(wanted)
            return bool(both) and self._same_value(given, wanted)
        parts = _split(given, "\\cup"), _split(wanted, "\\cup")
        if max(map(len, parts)) > 1:
            return self._same_elements(*parts, in_order=False)
        (brackets, elements), (stored_brackets, stored_elements) = _collection(given), _collection(wanted)
        if brackets != stored_brackets or len(elements) != len(stored_elements):
            return False
        if brackets == "" and len(elements) == 1:
            return self._same_value(elements[0], stored_elements[0])
        return self._same_elements(elements, stored_elements, in_order=brackets != "")

    def _same_elements(self, given: Sequence[str], wanted: Sequence[str], *, in_order: bool) -> bool:
        if len(given) != len(wanted):
            return False
        if in_order:
            return all(self._same_element(own, stored) for own, stored in zip(given, wanted))
        # Each element of the response is used once: 1,1,2 is not 1,2,2.
        left = list(given)
        for stored in sorted(wanted, key=lambda stored: stored not in left):  # the same texts first
            own = stored if stored in left else next((own for own in left if self._same_element(own, stored)), None)
            if own is None:
                return False
            left.remove(own)
        return True

    def _same_element(self, given: str, wanted: str) -> bool:
        """Whether two elements are equal, and the response's is not one that the question states unsolved."""
        if not self._equal(given, wanted):
            return False
        return given == wanted or plain_number(given) is not None or not self.formulas.has(given, wanted=wanted)

    def _same_value(self, given: str, wanted: str) -> bool:
        if given == wanted:
            return True
        if not given or (given.isalpha() and wanted.isalpha() and len(given + wanted) == 2) or "=" in given:
            return False
        numbers = plain_number(given), plain_number(wanted)
        if numbers[0] is not None and numbers[1] is not None:
            return equal_answers(numbers[0], numbers[1])
        # Rule 6: what costs most comes last; a function that is left standing is refused before.
        return not (_functions(given) - _functions(wanted)) and self.symbolic(given, wanted)

    def _same_in_base(self, given: str, wanted: str) -> bool:
        """Whether two numbers with bases are equal: 2112_8 is 2112 where the question names the base, 1098_{10} is 1098
        everywhere; nothing is converted."""
        (digits, base), (stored_digits, stored_base) = _based(given), _based(wanted)
        if digits.casefold() != stored_digits.casefold():
            return False
        if base is not None and stored_base is not None:
            return base == stored_base
        own = base or stored_base or 10
        named = rf"base[-\s$]*(?:{own}(?!\d)|{BASES.get(own, own)})"
        return own == 10 or re.search(named, self.question, re.IGNORECASE) is not None

    def _only_rewritten(self, given: str, wanted: str) -> bool:
        """Whether the question states an expression of the same value, and the response is not yet in the answer's form."""
        if plain_number(given) is not None:
            return False
        # Rule 6: with variables any other parts are unfinished, with numbers alone only more of them.
        own, stored = leaves(given), leaves(wanted)
        unfinished = own != stored if VARIABLE.search(wanted) else own.total() > stored.total()
        # Of a finished response only the stated expressions that look like it are suspects: symbols take long.
        stated = [(form, leaves(form)) for form in self.formulas.forms if form != wanted]
        suspects = [
            form
            for form, parts in stated
            if unfinished or (parts <= own and not parts <= stored) or _core(parts) == _core(own) != _core(stored)
        ]
        return any(self.symbolic(form, wanted) for form in suspects[:MOST_FORMULAS])


def _core(parts: Counter[str]) -> dict[str, int]:
    """Numbers and letters without those that a formula can be dressed with: `\\frac{f}{1}`, `0 + f`."""
    return {part: count for part, count in parts.items() if part not in ("0", "1")}


def _functions(form: str) -> Counter[str]:
    return Counter(FUNCTION.findall(form))


def _based(form: str) -> tuple[str, int | None]:
    """Digits and base; None where no base is written."""
    found = BASED.fullmatch(form)
    return (found["digits"], int(found["base"][:9])) if found else (form, None)


def _unnamed(form: str) -> str:
    """A list without the names of its elements: `1,2` for `x=1,x=2`."""
    elements = _split(form, ",") if "=" in form else []
    return ",".join(read_answer(element).form for element in elements) if len(elements) > 1 else form


def _collection(form: str) -> tuple[str, list[str]]:
    r"""Brackets and elements: ("(]", ["1", "2"]) for (1,2], and ("", ["1", "2"]) for 1,2 and for \{1,2\}."""
    # \{1,2\} is a set: in any order, as a bare list.
    if form.startswith("\\{") and form.endswith("\\}") and _is_enclosed(form[1:-2] + "}"):
        return "", _both_signs(_split(form[2:-2], ","))
    if form[:1] in ("(", "[") and form[-1:] in (")", "]") and _is_enclosed(form):
        elements = _split(form[1:-1], ",")
        # Parentheses around one element only group.
        return (form[0] + form[-1], elements) if len(elements) > 1 or form[0] == "[" else _collection(form[1:-1])
    return "", _both_signs(_split(form, ","))


def _both_signs(elements: list[str]) -> list[str]:
    expanded = []
    for element in elements:
        if len(re.findall(r"\\pm(?![a-zA-Z])", element)) == 1:
            before, after = re.split(r"\\pm(?![a-zA-Z]) ?", element)
            expanded += [f"{before}{'+' if before else ''}{after}", f"{before}-{after}"]
        else:
            expanded.append(element)
    return expanded


def _is_enclosed(form: str) -> bool:
    """Whether the first bracket is closed by the last."""
    depth = 0
    for position, character in enumerate(form):
        depth += (character in OPENING) - (character in CLOSING)
        if depth == 0:
            return position == len(form) - 1
    return False


def _split(form: str, separator: str) -> list[str]:
    """Parts between separators that stand in no brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(form):
        depth += (character in OPENING) - (character in CLOSING)
        if depth == 0 and form.startswith(separator, position):
            parts.append(form[start:position])
            start = position + len(separator)
    return [*parts, form[start:]]


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
"""Text that may follow a formula: `= ?`, `\text{ for } x`."""
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
        # 0 + f, f / 1 and 1 * f are f: dressing a formula of the question does not solve it.
        form = NEUTRAL.sub("", form)
        key = _key(form)
        if key == _key(wanted):
            return False
        if any(key == _key(own) for own in self.forms):
            return True
        # As a bag of tokens: another order of terms is the same formula. Numbers are left to _key.
        return plain_number(form) is None and _bag(form) in self.bags and _bag(form) != _bag(wanted)


@lru_cache(maxsize=2_000)
def formulas_of(question: str) -> Formulas:
    """The formulas of a question: one question is asked for with each of its samples."""
    found = (next(filter(None, groups)) for groups in SPAN.findall(PICTURE.sub("", question)))
    spans = [span for own in found if (span := WRAPPER.sub("", own)).strip()]
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


def _parts(span: str) -> Iterator[str]:
    yield span
    for row in ROW.split(span) if "matrix" not in span else [span]:
        yield row.replace("&", " ") if "matrix" not in row else row
        for side in RELATION.split(row):
            yield side
            yield from side.split(",")


def _form(part: str) -> str:
    # In a matrix & parts columns; elsewhere it only aligns.
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
