"""Preference tuning (TL;DR): summarise posts, rewarded by a reward model, judged by gold scores.

Embedded edition (task.data not given): the posts of `world.py`, the shipped reward model, the hidden gold rule. Real
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

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.config import TaskConfig
from tba.models.names import check_named
from tba.tasks.base import Outcome, RewardFailed, Split, TaskInputs
from tba.tasks.data.prompts import make_prompt
from tba.tasks.data.rows import SUFFIXES, BadRow, DataRow, keep_some, prompt_column, require_object, text_column
from tba.tasks.data.splits import QuestionAnswer, Source, make_splits, nothing_left, read_problems
from tba.tasks.evaluation import EvaluationInputs, Evaluator
from tba.tasks.tldr.evaluator import SummaryEvaluator
from tba.tasks.tldr.reward_model import ModelScorer, load_scorer
from tba.tasks.tldr.world import (
    HELD_OUT_POSTS,
    SEEDS,
    VALIDATION_POSTS,
    Post,
    draw_posts,
    first_posts,
    gold_scores,
    reference_summary,
)
from tba.types import Completion, Prompt

PROMPT_COLUMNS = ("query", "prompt")
REFERENCE_COLUMNS = ("reference_response", "reference", "summary")
"""Columns of the reference summary; the first that a row has counts."""
WHY_MISSING: dict[Split, str] = {
    "validation": "task.num_validation_prompts is 0: set it to a number of train posts to tune on.",
    "held_out": "task.data={data} is one file, taken as the train rows. Give the rows to report on as task.eval_data, or a "
    "folder with both as task.data, or evaluate on evaluate.split=validation.",
}


class TLDRTask:
    """Reward `reward_model`: the reward model's score. A summary counts as solved above 0: the embedded start model's mean.
    Models are loaded when they are first asked for a score."""

    isolated_rewards = ()

    def __init__(self, inputs: TaskInputs) -> None:
        """Reads and checks all rows. The shipped reward model is small and stays on the CPU, whatever the device."""
        self._config = config = inputs.config
        self._tokenizer = inputs.tokenizer
        self._max_prompt_tokens = inputs.max_prompt_tokens
        self._device = inputs.device
        self._check_models()
        self._rows = None if config.data is None else read_splits(config, inputs.tokenizer, trains=inputs.trains)
        self._prompts: dict[Split, list[Prompt]] = {}
        self._scorers: dict[str | None, ModelScorer] = {}

    @property
    def reward_weights(self) -> dict[str, float]:
        return {"reward_model": 1.0}

    def load_models(self, *, gold: bool = False) -> None:
        """Load the models now, not at the first score: a large one takes minutes, and a wrong name shows at the start."""
        self._scorer(self._config.tldr.reward_model)
        if gold and self._config.tldr.gold_model is not None:
            self._scorer(self._config.tldr.gold_model)

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Prompts of a split, made when first asked for; the column `reference` is what win rates compare with."""
        if split not in self._prompts:
            self._prompts[split] = self._make_prompts(self._problems(split), split)
        return self._prompts[split]

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        finished = [completion.finish == "stop" for completion in completions]
        scores = self.proxy_scores([_text_of(prompt)] * len(texts), texts, finished)
        return [_outcome(float(score)) for score in scores]

    def solved(self, outcome: Outcome) -> bool:
        return isinstance(outcome, dict) and outcome["reward_model"] > 0.0

    def make_evaluator(self, inputs: EvaluationInputs) -> Evaluator:
        prompts = inputs.prompts(self)
        self.load_models(gold=True)
        return SummaryEvaluator(
            gold_scores=self.gold_scores,
            proxy_scores=self.proxy_scores,
            tokenizer=inputs.tokenizer,
            prompts=prompts,
            sampling=inputs.sampling,
            distance=inputs.distance(),
            beta=inputs.final_beta,
            cut_off_reward=inputs.config.train.cut_off_reward,
        )

    def proxy_scores(self, prompts: Sequence[str], texts: Sequence[str], finished: Sequence[bool]) -> np.ndarray:
        """Scores that training is rewarded by, float64 [N]."""
        return self._scorer(self._config.tldr.reward_model).score(prompts, texts, finished)

    def gold_scores(self, prompts: Sequence[str], texts: Sequence[str], finished: Sequence[bool]) -> np.ndarray:
        """Scores that evaluations judge by and training never sees, float64 [N]."""
        if self._config.tldr.gold_model is None:
            return gold_scores(prompts, texts, finished)
        return self._scorer(self._config.tldr.gold_model).score(prompts, texts, finished)

    def _scorer(self, path: str | None) -> ModelScorer:
        """Scorer of a folder or hub name; None = the shipped reward model."""
        if path not in self._scorers:
            if path is None:
                shipped = str(reward_model_path())
                self._scorers[path] = load_scorer(shipped, device="cpu", dtype="float32")
            else:
                self._scorers[path] = load_scorer(path, device=self._device)
        return self._scorers[path]

    def _check_models(self) -> None:
        """Check the models' settings as far as that is possible without loading them, before a run has begun."""
        own = self._config.tldr
        if self._config.data is not None and own.reward_model is None:
            raise ValueError(
                "task.tldr.reward_model is needed with task.data: a folder or hub name of the model whose score is "
                "the reward. The shipped one only knows the embedded posts."
            )
        if self._config.data is not None and own.gold_model is None:
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

    def _problems(self, split: Split) -> list[QuestionAnswer]:
        if self._rows is None:
            return [_embedded_problem(line, post) for line, post in enumerate(self._posts(split), start=1)]
        if split not in self._rows:
            raise ValueError(f"evaluate.split={split}: {WHY_MISSING[split].format(data=self._config.data)}")
        if not self._rows[split]:
            raise nothing_left(self._config.data)
        return self._rows[split]

    def _posts(self, split: Split) -> Sequence[Post]:
        if split == "train":
            return list(islice(draw_posts("train", seed=SEEDS["train"]), self._config.num_train_prompts))
        return first_posts(split, HELD_OUT_POSTS if split == "held_out" else VALIDATION_POSTS)

    def _make_prompts(self, problems: Sequence[QuestionAnswer], split: Split) -> list[Prompt]:
        return keep_some(
            problems,
            lambda problem: self._prompt(split, problem),
            on_bad_row=self._config.on_bad_row,
            what=f"task.data={self._config.data}: no {split} row",
        )

    def _prompt(self, split: Split, problem: QuestionAnswer) -> Prompt:
        return make_prompt(
            id=f"{split}-{problem.line}",
            text=problem.question,
            columns={"reference": problem.answer},
            tokenizer=self._tokenizer,
            max_tokens=self._max_prompt_tokens,
            place=problem.place,
        )


def start_model_path() -> Path:
    """The folder of the shipped start model; `model.path=tba:tldr` means the same."""
    return Path(__file__).parent / "start_model"


def reward_model_path() -> Path:
    """The folder of the shipped reward model."""
    return Path(__file__).parent / "reward_model"


def read_splits(
    config: TaskConfig, tokenizer: PreTrainedTokenizerBase, *, trains: bool = True
) -> dict[Split, list[QuestionAnswer]]:
    """The splits that the data has, in the order of their files: posts as questions, reference summaries as answers."""
    assert config.data is not None, "only the real edition has rows"
    source = Source(hub_subset="default", read=lambda row: read_row(row, tokenizer))
    held_out = config.eval_data or config.data
    has_held_out = config.eval_data is not None or not Path(held_out).expanduser().is_file()
    return make_splits(
        config,
        read_problems(config, config.data, "train", source),
        read_problems(config, held_out, held_out_name(held_out), source) if has_held_out else None,
        trains=trains,
    )


def held_out_name(data: str) -> str:
    """Which rows of a folder or hub dataset are held out: `validation`, or `test` of a folder that has no such file."""
    folder = Path(data).expanduser()
    if not folder.is_dir():
        return "validation"
    for name in ("validation", "test"):
        if any((folder / f"{name}{suffix}").is_file() for suffix in SUFFIXES):
            return name
    raise ValueError(
        f"task.data: folder {folder} has no rows to report on: it needs validation.jsonl or test.jsonl (or .jsonl.gz), or "
        "give them as task.eval_data."
    )


def read_row(row: DataRow, tokenizer: PreTrainedTokenizerBase) -> QuestionAnswer:
    require_object(row, columns="a `query` and a `reference_response`")
    question = prompt_column(row, _first_column(row, PROMPT_COLUMNS))
    column = _first_column(row, REFERENCE_COLUMNS)
    # The paper's data has the EOS as text at the end; scorers add the token themselves.
    reference = text_column(row, column).strip().removesuffix(tokenizer.eos_token or "").strip()
    if not reference:
        raise BadRow("empty reference", f"{row.place}: `{column}` is empty.")
    # A space parts it from the prompt, as in what a policy writes.
    return QuestionAnswer(line=row.line, question=question, answer=f" {reference}", place=row.place)


def _first_column(row: DataRow, columns: Sequence[str]) -> str:
    """The first of these that the row has; if none, the first, which the error then names."""
    return next((column for column in columns if column in row.value), columns[0])


def _embedded_problem(line: int, post: Post) -> QuestionAnswer:
    return QuestionAnswer(line=line, question=post.text, answer=reference_summary(post))


def _text_of(prompt: Prompt) -> str:
    assert isinstance(prompt.text, str), "prompts of this task are plain text"
    return prompt.text


def _outcome(score: float) -> Outcome:
    return {"reward_model": score} if np.isfinite(score) else RewardFailed(f"the reward model's score is {score}.")
