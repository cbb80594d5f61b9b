"""Preference tuning (TL;DR): summarise posts, rewarded by a reward model, judged by gold scores.

Embedded edition (task.data not given): the posts of `posts.py`, the shipped reward model, the hidden gold rule. Real
edition: posts with the summaries that people wrote, a reward model and a gold model:

    tba train configs/tldr.yaml task.data=vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144
        task.tldr.reward_model=mnoukhov/pythia410m-rm-tldr6.9b
        task.tldr.gold_model=cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr

    {"query": "... POST: I went for a run and ...\\n\\nTL;DR:", "reference_response": " I broke my foot.<|endoftext|>"}

The post of a row may also be called `prompt`, the summary `reference` or `summary`. Held out are the rows of task.eval_data,
or the validation rows of the data (the paper evaluates there), or a folder's test rows. Those to tune on, split
`validation`, are train rows that a hash of the post picks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np

from tba.engine.contract import Engine
from tba.models.paths import check_named
from tba.observe.metrics import mean_metrics
from tba.tasks.data.make_prompt import QuestionAnswer, Source, read_splits
from tba.tasks.data.rows import BadRow, DataRow, prompt_column, require_object, text_column
from tba.tasks.evaluation import Distance, TaskEvaluator, greedy, in_parts
from tba.tasks.outcomes import Outcome, RewardFailed
from tba.tasks.questions import RowsTask
from tba.tasks.task import BetweenSteps, EvaluationInputs, Evaluator, FinishedGroup, Split, TaskInputs
from tba.tasks.tldr.posts import (
    HELD_OUT_POSTS,
    SEEDS,
    VALIDATION_POSTS,
    draw_posts,
    first_posts,
    gold_scores,
    reference_summary,
    wins,
)
from tba.tasks.tldr.reward_model import ModelScorer, load_scorer
from tba.types import Completion, Prompt

PROMPT_COLUMNS = ("query", "prompt")
REFERENCE_COLUMNS = ("reference_response", "reference", "summary")
"""Columns of the reference summary; the first that a row has counts."""
SUMMARIES_AT_ONCE = 64
"""Number of summaries that are scored together, between two heartbeats."""


class TLDRTask(RowsTask):
    """Reward `reward_model`: the reward model's score. A summary counts as solved above 0: the embedded start model's mean.
    Models are loaded when they are first asked for a score."""

    reward_weights: ClassVar[Mapping[str, float]] = {"reward_model": 1.0}

    def __init__(self, inputs: TaskInputs) -> None:
        """Check the models' settings as far as that is possible without loading them, before a run has begun."""
        config, own = inputs.config, inputs.config.tldr
        if config.data is not None and own.reward_model is None:
            raise ValueError(
                "task.tldr.reward_model is needed with task.data: a folder or hub name of the model whose score is "
                "the reward. The shipped one only knows the embedded posts."
            )
        if config.data is not None and own.gold_model is None:
            raise ValueError(
                "task.tldr.gold_model is needed with task.data, where there is no gold rule: a folder or hub name "
                "of a reward model that training does not use, to judge summaries in evaluations."
            )
        if own.gold_model is not None and own.gold_model == own.reward_model:
            raise ValueError(
                f"task.tldr.gold_model={own.gold_model} is also the reward model, and what training maximises cannot "
                "judge it: give another one."
            )
        check_named("task.tldr.reward_model", own.reward_model)
        check_named("task.tldr.gold_model", own.gold_model)
        super().__init__(inputs)
        self._scorers: dict[str | None, ModelScorer] = {}

    def read(self) -> dict[Split, list[QuestionAnswer]]:
        """Posts as questions, reference summaries as answers; none in the embedded edition, which draws them."""
        if self.config.data is None:
            return {}
        reader = partial(read_row, eos=self.inputs.tokenizer.eos_token or "")
        source = Source(hub_subset="default", read=reader, held_out=("validation", "test"))
        return read_splits(self.config, source, trains=self.inputs.trains)

    def problems(self, split: Split) -> list[QuestionAnswer]:
        if self.config.data is not None:
            return super().problems(split)
        if split == "train":
            posts = tuple(islice(draw_posts("train", seed=SEEDS["train"]), self.config.num_train_prompts))
        else:
            posts = first_posts(split, HELD_OUT_POSTS if split == "held_out" else VALIDATION_POSTS)
        lines = enumerate(posts, start=1)
        return [QuestionAnswer(line=line, question=own.text, answer=reference_summary(own)) for line, own in lines]

    def columns(self, problem: QuestionAnswer) -> dict[str, str]:
        return {"reference": problem.answer}

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        # A response that did not end by itself is scored without an EOS, as the reward model reads it.
        finished = [completion.finish == "stop" for completion in completions]
        scores = self.proxy_scores([str(prompt.text)] * len(texts), texts, finished)
        return [
            {"reward_model": float(score)}
            # A NaN score is no reward: as a number it would spoil the whole batch's loss.
            if np.isfinite(score)
            else RewardFailed(f"the reward model's score is {score}.")
            for score in scores
        ]

    def solved(self, outcome: Outcome) -> bool:
        # Scores of our reward models are standardised, so 0 is their mean: RewardModel.standardise.
        return isinstance(outcome, dict) and outcome["reward_model"] > 0.0

    def make_evaluator(self, inputs: EvaluationInputs) -> Evaluator:
        """Models are loaded now, not at the first score: a large one takes minutes, and a wrong name shows at the start."""
        evaluator = SummaryEvaluator(self, inputs)
        for path in {self.config.tldr.reward_model, self.config.tldr.gold_model or self.config.tldr.reward_model}:
            self._scorer(path)
        return evaluator

    def proxy_scores(self, prompts: Sequence[str], texts: Sequence[str], finished: Sequence[bool]) -> np.ndarray:
        return self._scorer(self.config.tldr.reward_model).score(prompts, texts, finished)

    def gold_scores(self, prompts: Sequence[str], texts: Sequence[str], finished: Sequence[bool]) -> np.ndarray:
        """Scores that evaluations judge by and training never sees, float64 [N]."""
        gold = self.config.tldr.gold_model
        # The bare name is the rule of posts.py, not this method.
        return (gold_scores if gold is None else self._scorer(gold).score)(prompts, texts, finished)

    def _scorer(self, path: str | None) -> ModelScorer:
        """Scorer of a folder or hub name; None = the shipped reward model, which is small and stays on the CPU."""
        # One scorer for each path: a run and its evaluations share the model in memory.
        if path not in self._scorers and path is None:
            self._scorers[path] = load_scorer(str(reward_model_path()), device="cpu", dtype="float32")
        elif path is not None and path not in self._scorers:
            self._scorers[path] = load_scorer(path, device=self.inputs.device)
        return self._scorers[path]


class SummaryEvaluator(TaskEvaluator):
    """Win rate against the reference summaries by the gold scorer, sampled and greedy; a tie counts half. Where the start
    model is known also `kl` to it and `regularised_reward` of the samples, and the perplexities of the greedy responses.
    Standard errors are over posts."""

    def __init__(self, task: TLDRTask, inputs: EvaluationInputs) -> None:
        super().__init__(task, inputs)
        self._posts = [str(prompt.text) for prompt in self.prompts]
        self._distance = Distance.of(inputs)
        self._reference_gold: np.ndarray | None = None
        """Gold scores of the reference summaries, once they are known."""

    def __call__(self, engine: Engine, between_steps: BetweenSteps | None = None) -> dict[str, float]:
        def scored(score: Callable[..., np.ndarray], texts: Sequence[str], finished: Sequence[bool]) -> np.ndarray:
            # Slices of all posts: every caller has one text for each prompt, in the prompts' order.
            parts = in_parts(len(texts), SUMMARIES_AT_ONCE, between_steps)
            return np.concatenate([score(self._posts[part], texts[part], finished[part]) for part in parts])

        def scored_groups(score: Callable[..., np.ndarray], groups: Sequence[FinishedGroup]) -> np.ndarray:
            ended = [group.completions[0].finish == "stop" for group in groups]
            return scored(score, [group.texts[0] for group in groups], ended)

        sampled, best = (
            self.respond(engine, 1, sampling, between_steps) for sampling in (self.sampling, greedy(self.sampling))
        )
        # Once for all evaluations: references and gold model never change, and a large one takes minutes.
        if self._reference_gold is None:
            references = [prompt.columns["reference"] for prompt in self.prompts]
            self._reference_gold = scored(self.task.gold_scores, references, [True] * len(references))
        gold, gold_of_best = (scored_groups(self.task.gold_scores, groups) for groups in (sampled, best))
        cut_off = np.array([group.completions[0].finish == "length" for group in sampled])
        # The proxy that training maximises, beside gold: a gap between the two is over-optimisation.
        reward = scored_groups(self.task.proxy_scores, sampled)
        if (cut_off_reward := self.inputs.config.train.cut_off_reward) is not None:
            # As training combines it (train.truncated=penalise): else this would not be the reward maximised.
            reward = np.where(cut_off, cut_off_reward, reward)
        means = {
            "win_rate": wins(gold, self._reference_gold),
            "win_rate_greedy": wins(gold_of_best, self._reference_gold),
            "gold": gold,
            "reward": reward,
            "mean_length": np.array([len(group.completions[0].token_ids) for group in sampled]),
            "cut_off": cut_off,
        }
        perplexities = {}
        if self._distance is not None:
            # KL needs samples of the policy; greedy responses would give a number that is no KL.
            means |= self._distance.means(sampled, reward, self.inputs.final_beta, between_steps)
            perplexities = self._distance.perplexity(best, between_steps)
        return {**mean_metrics(means), **perplexities, "num_prompts": float(len(self.prompts))}


def read_row(row: DataRow, *, eos: str) -> tuple[str, str]:
    require_object(row, columns="a `query` and a `reference_response`")
    # The first that the row has; if none, the first, which the error then names.
    prompt, column = (
        next((own for own in columns if own in row.value), columns[0])
        for columns in (PROMPT_COLUMNS, REFERENCE_COLUMNS)
    )
    question = prompt_column(row, prompt)
    # The paper's data has the EOS as text at the end; scorers add the token themselves.
    reference = text_column(row, column).strip().removesuffix(eos).strip()
    if not reference:
        raise BadRow("empty reference", f"{row.place}: `{column}` is empty.")
    # A space parts it from the prompt, as in what a policy writes.
    return question, f" {reference}"


def reward_model_path() -> Path:
    """The folder of the shipped reward model."""
    return Path(__file__).parent / "reward_model"
