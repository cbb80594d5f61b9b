r"""MATH: competition mathematics (github hendrycks/math), the paper's TBA' experiment.

    {"problem": "If $A=2+i$, $O=-4$, ...", "solution": "Adding real parts ... $=\boxed{8+4i}$.", "level": "Level 3", ...}

The right answer is in the `answer` column, where there is one as in MATH-500, or else in the solution's last box. The data
is read from where it lies and never shipped:

    tba train configs/math.yaml task.data=FOLDER                               train.jsonl and test.jsonl, or .jsonl.gz
    tba evaluate MODEL --task math task.data=FOLDER task.eval_data=math500.jsonl

The answer of a response is what stands in its last `\boxed{...}`: a response without a box is wrong. grading.py says
when it is right.
"""

from __future__ import annotations

from tba.tasks.data.make_prompt import Source
from tba.tasks.data.rows import BadRow, DataRow, prompt_column, require_object, text_column
from tba.tasks.math.answers import last_boxed, normal_form
from tba.tasks.math.grading import same_answer
from tba.tasks.math.symbolic import require_math_verify, symbolic_equality
from tba.tasks.questions import QuestionTask
from tba.tasks.task import TaskInputs


def read_problem(row: DataRow) -> tuple[str, str]:
    require_object(row, columns="a `problem` and a `solution` or `answer`")
    question, answer = prompt_column(row, "problem"), row.value.get("answer")
    if answer is None:
        solution = text_column(row, "solution")
        answer = last_boxed(solution)
        if answer is None:
            raise BadRow(
                "no answer", f"{row.place}: `solution` has no \\boxed{{...}}; it ends with {solution[-40:]!r}."
            )
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise BadRow("wrong type", f"{row.place}: `answer` is {answer!r}, it must be text or a number.")
    if not normal_form(str(answer)):
        raise BadRow("no answer", f"{row.place}: the answer is empty.")
    return question, str(answer)


class MathTask(QuestionTask):
    source = Source(hub_subset="default", read=read_problem)
    template = "Problem:\n{question}\n\nReason step by step, and put the final answer in \\boxed{}.\n\nSolution:"
    instruction = "Reason step by step, and put the final answer in \\boxed{}."

    def __init__(self, inputs: TaskInputs) -> None:
        # Before rows are read: the first comparison would otherwise fail in the middle of the run.
        require_math_verify()
        super().__init__(inputs)

    def is_right(self, text: str, *, question: str, answer: str) -> bool:
        return same_answer(last_boxed(text), answer, question=question, symbolic=symbolic_equality().equal)
