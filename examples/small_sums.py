"""A task of your own in one file: word problems of one kind, with the right answer and few lines as rewards.

tba train task.name=examples/small_sums.py:SmallSums task.settings.largest=20 train.max_steps=50
"""

from tba.config import Section
from tba.observe.metrics import mean_metrics
from tba.tasks.data.make_prompt import make_prompt
from tba.tasks.evaluation import AnswerEvaluator, greedy

TEXT = "Mia has {a} pens. She buys {b} more. She loses 5. How many pens does she have now?\n"


class SumSettings(Section):
    largest: int = 20
    """Largest number in a problem."""


class SmallSums:
    Settings = SumSettings  # checks task.settings
    isolated_rewards = ()  # `score` may be called in the searcher: it never hangs

    def __init__(self, inputs):
        self.reward_weights = {"right": 1.0, "short": 0.1}
        numbers = range(5, inputs.settings.largest + 1)
        encoding = {"tokenizer": inputs.tokenizer, "max_tokens": inputs.max_prompt_tokens}
        self.all = [
            make_prompt(id=f"{a}+{b}", text=TEXT.format(a=a, b=b), columns={"answer": a + b - 5}, **encoding)
            for a in numbers
            for b in numbers
        ]

    def prompts(self, split):
        remainders = {"train": (1, 2), "validation": (3,), "held_out": (0,)}[split]
        return [prompt for prompt in self.all if prompt.columns["answer"] % 4 in remainders]

    def score(self, prompt, texts, completions):
        answer = f"#### {prompt.columns['answer']}"
        return [{"right": float(text.endswith(answer)), "short": 1 / (1 + text.count("\n"))} for text in texts]

    def solved(self, outcome):
        return isinstance(outcome, dict) and outcome["right"] == 1.0

    def make_evaluator(self, inputs):
        return SumEvaluator(self, inputs)


class SumEvaluator(AnswerEvaluator):
    """Greedy accuracy, and a metric of its own: lines of a greedy response."""

    def __call__(self, engine, between_steps=None):
        groups = self.respond(engine, 1, greedy(self.sampling), between_steps)
        lines = [text.count("\n") + 1 for group in groups for text in group.texts]
        return super().__call__(engine, between_steps) | mean_metrics({"lines": lines})
