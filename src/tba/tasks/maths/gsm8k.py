"""GSM8K: grade-school maths in words (github openai/grade-school-math), the paper's first experiment.

    {"question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. ...",
     "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\\nNatalia sold ... altogether.\\n#### 72"}

The data is read from where it lies and never shipped:

    tba train configs/gsm8k_one_gpu.yaml model.path=MODEL task.data=FOLDER     train.jsonl and test.jsonl, or .jsonl.gz
    tba evaluate MODEL --task gsm8k task.data=openai/gsm8k                     from the hub, with `datasets` installed

An answer is one number of the response; tba/tasks/maths/answers.py says which.
"""

from __future__ import annotations

from tba.tasks.maths.answers import equal_answers, given_answer, marked_answer
from tba.tasks.maths.questions import Problem, QuestionTask, Source
from tba.tasks.rows import BadRow, Row, prompt_column, require_object, text_column


def read_problem(row: Row) -> Problem:
    require_object(row, columns="a `question` and an `answer`")
    question, answer = prompt_column(row, "question"), text_column(row, "answer")
    if marked_answer(answer) is None:
        raise BadRow("no answer", f"{row.place}: `answer` has no number after `####`; it ends with {answer[-40:]!r}.")
    return Problem(line=row.line, question=question, answer=answer, place=row.place)


class GSM8KTask(QuestionTask):
    name = "gsm8k"
    source = Source(hub_subset="main", read=read_problem)  # another subset has Socratic sub-questions
    template = "[MATH_TASK] Problem:\n{question}\n\nSolution:"  # what the paper's SFT model was taught
    instruction = (
        "Reason step by step, and end with the final answer as a number after four hash signs, for example: #### 42"
    )

    def is_right(self, text: str, *, question: str, answer: str) -> bool:
        wanted = marked_answer(answer)
        assert wanted is not None, "rows are checked when they are read"
        return equal_answers(given_answer(text), wanted)
