r"""The graders against answers that were made to deceive them: tests/tasks/grader_pairs.jsonl, written by hand.

Each row has a stored answer in the style of its dataset, a response (for MATH what stands in the box, for GSM8K the whole
text), where it matters the question, and whether the response is right.
"""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from tba.tasks.gsm8k import equal_answers, given_answer, marked_answer
from tba.tasks.math.grading import formulas_of, same_answer
from tba.tasks.math.symbolic import symbolic_equality

pytestmark = pytest.mark.slow

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "grader_pairs.jsonl").read_text("utf-8").splitlines()]
KINDS = sorted({pair["kind"] for pair in PAIRS if pair["task"] == "math"})

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed: pip install 'tba-rl[math]'"
)


@pytest.fixture(scope="module", autouse=True)
def no_worker_stays_behind():
    """Other tests count the children of this process."""
    yield
    symbolic_equality().close()


@needs_math_verify
@pytest.mark.parametrize("kind", KINDS)
def test_every_math_pair_is_judged_as_written(kind):
    equal = symbolic_equality().equal
    wrong = [
        pair
        for pair in PAIRS
        if (pair["task"], pair["kind"]) == ("math", kind)
        and same_answer(pair["response"], pair["answer"], question=pair.get("question", ""), symbolic=equal)
        is not pair["right"]
    ]
    assert not wrong


def test_every_gsm8k_pair_is_judged_as_written():
    pairs = [pair for pair in PAIRS if pair["task"] == "gsm8k"]
    wrong = [
        pair
        for pair in pairs
        if equal_answers(given_answer(pair["response"]), marked_answer(f"#### {pair['answer']}")) is not pair["right"]
    ]
    assert not wrong


def test_the_file_has_both_verdicts_of_many_kinds_and_nothing_twice():
    keys = [(pair["task"], pair.get("question", ""), pair["answer"], pair["response"]) for pair in PAIRS]
    assert len(keys) == len(set(keys)) >= 150
    counts = Counter((pair["task"], pair["right"]) for pair in PAIRS)
    assert min(counts.values()) >= 30


def test_formulas_of_a_question_are_its_spans_sides_and_rows_without_pictures_and_prices():
    question = (
        '[asy] draw((0,0)--(1,1)); label("$Q$", (1,1)); [/asy] A pen costs \\$5. If $y = \\dfrac{x}{2} + 1$ and\n'
        "\\[\\begin{aligned} 3x &= 12, \\\\ z &= 4 \\end{aligned}\\]what is $x - z = ?$"
    )
    formulas = formulas_of(question)
    assert set(formulas.forms) >= {"\\frac{x}{2}+1", "y", "3x", "12", "4", "x-z", "3x=12"}
    assert "Q" not in formulas.forms
    assert formulas.has("1+\\frac{x}{2}", wanted="7")  # in another order
    assert not formulas.has("1+\\frac{x}{2}", wanted="\\frac{x}{2}+1")  # which is the stored answer
    assert not formulas.has("x+z", wanted="7")
