r"""How the graders of GSM8K and MATH judge the datasets' own solutions, and answers that should not be paid.

    python benchmarks/graders.py            # about three minutes; TBA_DATA names the folder above gsm8k/ and math/
    python benchmarks/graders.py --quick    # 1,000 problems of each file, seed 0
    python benchmarks/graders.py --attacks  # restatements of the questions and tests/tasks/grader_pairs.jsonl, and how other
                                            # graders judge them: half an hour, most of it math-verify's

For each file, the share of problems where
    gold       the dataset's solution is right, as a response (two train rows of MATH have an empty box: bad rows, which
               are told and not counted),
    rewritten  its answer is right, written in another way (MATH: \dfrac, \left, spaces, `x =`, a unit, a full stop; GSM8K:
               in a sentence, in a box), whichever of them it takes,
    symbolic   MATH: math-verify finds `0 + answer` equal to the answer, where that makes sense,
    other      the answer of the next problem with another answer is right: these are wrong, unless the two are the same
               value. They are listed.
Anything but a full mark is listed.

With --attacks, the number of MATH's test problems where a formula that stands in the question, or one of its sides, is right
as the answer although its normal form is not the stored answer's: as it is, and dressed (`x = f`, `(f)`, `0 + f`,
`1 \cdot (f)`, `f = f`, `\frac{f}{1}`, `-(-f)`, `(f)^1`). The first must be 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from other_graders import GRADERS, Grader

from tba.config import TaskConfig
from tba.tasks.data.rows import BadRows, jsonl_rows
from tba.tasks.data.splits import QuestionAnswer, Source, read_problems
from tba.tasks.gsm8k import GSM8KTask, equal_answers, given_answer, marked_answer
from tba.tasks.math.answers import last_boxed, normal_form
from tba.tasks.math.grading import same_answer
from tba.tasks.math.symbolic import symbolic_equality
from tba.tasks.math.task import MathTask

DATA = Path(os.environ.get("TBA_DATA", Path(__file__).parents[2] / "shared" / "data"))
PAIRS = Path(__file__).parents[1] / "tests" / "tasks" / "grader_pairs.jsonl"
LISTED = 30
SHARE_WANTED = 0.995
NO_TERM = re.compile(r"[,=<>:_]|\\(?:text|mbox|begin|cup|in|le|ge|pm|%|\$|\{|!|triangle|overline)|[A-Za-z]{3,}$")
"""In lists, equations, sets, words and units."""
Check = Callable[[QuestionAnswer, QuestionAnswer], bool | None]
"""(problem, next problem) -> full marks; None = does not apply."""


def math_rewritten(answer: str) -> Iterator[str]:
    """Ways a model writes the same answer."""
    if "\\frac" in answer:
        yield answer.replace("\\frac", "\\dfrac")
    if "(" in answer and "\\left" not in answer:
        yield answer.replace("(", "\\left( ").replace(")", " \\right)")
    yield f" {answer} ."
    yield f"${answer}$"
    if "=" not in answer and "text" not in answer and "," not in answer:
        yield f"x = {answer}"
    if answer.isdigit():
        yield f"{int(answer):,}"
        yield f"{answer}.0"
        yield f"{answer} \\text{{ cm}}^2"
        yield f"{answer}^\\circ"


def gsm8k_right(text: str, problem: QuestionAnswer) -> bool:
    wanted = marked_answer(problem.answer)
    assert wanted is not None
    return equal_answers(given_answer(text), wanted)


def gsm8k_number(problem: QuestionAnswer) -> str:
    return problem.answer.rpartition("####")[2].strip()


def gsm8k_rewritten(problem: QuestionAnswer, _: QuestionAnswer) -> bool:
    body, number = problem.answer.rpartition("####")[0], gsm8k_number(problem)
    return all(
        gsm8k_right(f"{body}{end}", problem) for end in (f"So it is ${number}.", f"\\boxed{{{number}}} in 7 days")
    )


def gsm8k_other(problem: QuestionAnswer, other: QuestionAnswer) -> bool | None:
    if marked_answer(problem.answer) == marked_answer(other.answer):
        return None
    return gsm8k_right(other.answer, problem)


def math_right(answer: str | None, problem: QuestionAnswer) -> bool:
    return same_answer(answer, problem.answer, question=problem.question, symbolic=symbolic_equality().equal)


def math_symbolic(problem: QuestionAnswer, _: QuestionAnswer) -> bool | None:
    """`0 + answer` is another text with the same value; for answers that a term can be added to."""
    if NO_TERM.search(problem.answer):
        return None
    return symbolic_equality().equal(f"0 + {problem.answer}", problem.answer)


def math_other(problem: QuestionAnswer, other: QuestionAnswer) -> bool | None:
    if normal_form(problem.answer) == normal_form(other.answer):
        return None
    return math_right(other.answer, problem)


def solutions(path: Path) -> dict[int, str]:
    return {row.line: row.value["solution"] for row in jsonl_rows(path, BadRows("stop"))}


def measure(
    name: str,
    problems: Sequence[QuestionAnswer],
    check: Check,
    *,
    good: bool,
    show: Callable[[QuestionAnswer, QuestionAnswer], str],
) -> float:
    """Share of problems where `check` holds; prints it and lists the exceptions."""
    started, exceptions, count = time.perf_counter(), [], 0
    for problem, other in zip(problems, [*problems[1:], problems[0]]):
        holds = check(problem, other)
        if holds is None:
            continue
        count += 1
        if holds != good:
            exceptions.append(f"    line {problem.line}: {show(problem, other)}")
    share = (count - len(exceptions) if good else len(exceptions)) / max(1, count)
    print(f"{name:<28} {share:8.2%} of {count:5d}   {time.perf_counter() - started:6.1f} s", flush=True)
    for line in exceptions[:LISTED]:
        print(line)
    return share


def problems_of(path: Path, source: Source, quick: bool) -> list[QuestionAnswer]:
    problems = read_problems(TaskConfig(on_bad_row="skip"), str(path), "train", source)
    return random.Random(0).sample(problems, min(1000, len(problems))) if quick else problems


def run_gsm8k(quick: bool) -> list[float]:
    shares = []
    for split in ("train", "test"):
        problems = problems_of(DATA / "gsm8k" / f"{split}.jsonl.gz", GSM8KTask.source, quick)
        shares.append(
            measure(f"gsm8k {split} gold", problems, lambda p, _: gsm8k_right(p.answer, p), good=True, show=_gsm8k_pair)
        )
        shares.append(measure(f"gsm8k {split} rewritten", problems, gsm8k_rewritten, good=True, show=_gsm8k_pair))
        measure(f"gsm8k {split} other", problems, gsm8k_other, good=False, show=_gsm8k_pair)
    return shares


def run_math(quick: bool) -> list[float]:
    shares = []
    for split in ("train", "test", "math500"):
        path = DATA / "math" / f"{split}.jsonl.gz"
        problems, texts = problems_of(path, MathTask.source, quick), solutions(path)
        checks: dict[str, Check] = {
            "gold": lambda p, _, texts=texts: math_right(last_boxed(texts[p.line]), p),  # type: ignore[misc]
            "rewritten": lambda p, _: all(math_right(answer, p) for answer in math_rewritten(p.answer)),
            "symbolic": math_symbolic,
        }
        for name, check in checks.items():
            share = measure(f"math {split} {name}", problems, check, good=True, show=_math_pair)
            shares += [] if name == "symbolic" else [share]
        measure(f"math {split} other", problems, math_other, good=False, show=_math_pair)
    print(f"comparisons killed or failed: {symbolic_equality().num_failures}")
    return shares


def ours(question: str, wanted: str, given: str) -> bool:
    return same_answer(given, wanted, question=question, symbolic=symbolic_equality().equal)


def formulas(question: str) -> list[str]:
    """What stands between dollar signs or in display brackets, and its sides; found without the grader's own code."""
    text = re.sub(r"\[asy\].*?\[/asy\]", " ", question, flags=re.DOTALL).replace("\\$", "").replace("$$", "$")
    spans = re.findall(r"\$([^$]+)\$", text) + re.findall(r"\\\[(.+?)\\\]", text, flags=re.DOTALL)
    sides = [side for span in spans for side in span.split("=") if "=" in span]
    return list(dict.fromkeys(found for part in spans + sides if (found := part.strip(" \n.,;?"))))


def dressed(formula: str) -> Iterator[str]:
    yield from (f"x = {formula}", f"({formula})", f"0 + {formula}", f"1 \\cdot ({formula})", f"{formula} = {formula}")
    yield from (f"\\frac{{{formula}}}{{1}}", f"-(-({formula}))", f"({formula})^1")


def restatements_accepted(name: str, grader: Grader, problems: Sequence[QuestionAnswer], *, dress: bool) -> int:
    started, accepted = time.perf_counter(), []
    for problem in problems:
        wanted = normal_form(problem.answer)
        for formula in formulas(problem.question):
            if normal_form(formula) == wanted:
                continue
            tried = dressed(formula) if dress else (formula,)
            right = next((text for text in tried if grader(problem.question, problem.answer, text)), None)
            if right is not None:
                accepted.append(f"    line {problem.line}: {right!r} for {problem.answer!r}")
                break
    kind = "dressed restatement" if dress else "restatement"
    seconds = time.perf_counter() - started
    print(f"{name:<18} {kind:<20} right: {len(accepted):4d} of {len(problems)} problems   {seconds:6.1f} s", flush=True)
    for line in accepted[:LISTED] if grader is ours else ():
        print(line)
    return len(accepted)


def run_pairs() -> int:
    """Verdicts of each grader on the file of pairs; the number that ours gets wrong."""
    pairs = [
        pair for line in PAIRS.read_text(encoding="utf-8").splitlines() if (pair := json.loads(line))["task"] == "math"
    ]
    print(f"{len(pairs)} pairs of {PAIRS.name}, {sum(pair['right'] for pair in pairs)} of them right")
    failures = 0
    for name, grader in {"ours": ours, **GRADERS}.items():
        wrong = [p for p in pairs if grader(p.get("question", ""), p["answer"], p["response"]) != p["right"]]
        kinds = Counter(f"{p['kind']} {'refused' if p['right'] else 'accepted'}" for p in wrong)
        accepted = sum(not pair["right"] for pair in wrong)
        print(f"{name:<18} wrongly accepted {accepted:4d}, wrongly refused {len(wrong) - accepted:4d}", flush=True)
        print("    " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))
        failures += len(wrong) if grader is ours else 0
    return failures


def run_attacks(quick: bool) -> int:
    failures = run_pairs()
    problems = problems_of(DATA / "math" / "test.jsonl.gz", MathTask.source, quick)
    failures += restatements_accepted("ours", ours, problems, dress=False)
    restatements_accepted("ours", ours, problems, dress=True)
    for name, grader in GRADERS.items():
        restatements_accepted(name, grader, problems, dress=False)
    print(f"comparisons killed or failed: {symbolic_equality().num_failures}")
    return failures


def _gsm8k_pair(problem: QuestionAnswer, other: QuestionAnswer) -> str:
    return f"{gsm8k_number(problem)!r}, next {gsm8k_number(other)!r}"


def _math_pair(problem: QuestionAnswer, other: QuestionAnswer) -> str:
    return f"{problem.answer!r}, next {other.answer!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--attacks", action="store_true")
    arguments = parser.parse_args()
    if not DATA.is_dir():
        print(f"the data is not at {DATA}: set TBA_DATA to the folder above gsm8k/ and math/.", file=sys.stderr)
        return 2
    if arguments.attacks:
        return 1 if run_attacks(arguments.quick) else 0
    shares = run_gsm8k(arguments.quick) + run_math(arguments.quick)
    return 0 if min(shares) >= SHARE_WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
