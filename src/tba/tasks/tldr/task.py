"""Preference tuning (TL;DR): summarise posts, rewarded by a reward model, judged by gold scores.

Embedded edition (task.data not given): the posts of `world.py`, the shipped reward model, the hidden gold rule. Real
edition: rows as `real.py` reads them, a reward model and a gold model:

    tba train configs/tldr.yaml task.data=vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144
        task.tldr.reward_model=mnoukhov/pythia410m-rm-tldr6.9b
        task.tldr.gold_model=cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from tba.models.load import check_named
from tba.tasks.base import Outcome, RewardFailed, Split
from tba.tasks.encoding import make_prompt
from tba.tasks.inputs import TaskInputs
from tba.tasks.maths.questions import Problem
from tba.tasks.overlap import nothing_left
from tba.tasks.rows import keep_some
from tba.tasks.tldr import gold
from tba.tasks.tldr.real import WHY_MISSING, read_splits
from tba.tasks.tldr.scorer import ModelScorer, load_scorer
from tba.tasks.tldr.summaries import reference_summary
from tba.tasks.tldr.world import HELD_OUT_POSTS, SEEDS, VALIDATION_POSTS, Post, draw_posts, first_posts
from tba.types import Completion, Prompt


class TLDRTask:
    """Reward `reward_model`: the reward model's score. A summary counts as solved above 0: the embedded start model's mean.
    Models are loaded when they are first asked for a score."""

    name = "tldr"
    isolated = False

    def __init__(self, inputs: TaskInputs) -> None:
        """Reads and checks all rows. The shipped reward model is small and stays on the CPU, whatever the device."""
        self._config = config = inputs.config
        self._tokenizer = inputs.tokenizer
        self._max_prompt_tokens = inputs.max_prompt_tokens
        self._device = inputs.device
        self._check_models()
        self._rows = None if config.data is None else read_splits(config, inputs.tokenizer)
        self._prompts: dict[Split, list[Prompt]] = {}
        self._scorers: dict[str | None, ModelScorer] = {}

    @property
    def reward_weights(self) -> dict[str, float]:
        return {"reward_model": 1.0}

    def load_models(self, *, gold: bool = False) -> None:
        """Now, and not at the first score: a large one takes minutes, and a wrong name should show at the start."""
        self._scorer(self._config.tldr.reward_model)
        if gold and self._config.tldr.gold_model is not None:
            self._scorer(self._config.tldr.gold_model)

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Made when first asked for; the column `reference` is the summary that win rates compare with."""
        if split not in self._prompts:
            self._prompts[split] = self._make_prompts(self._problems(split), split)
        return self._prompts[split]

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        finished = [completion.finish == "stop" for completion in completions]
        scores = self.proxy_scores([_text_of(prompt)] * len(texts), texts, finished)
        return [_outcome(float(score)) for score in scores]

    def solved(self, outcome: Outcome) -> bool:
        return isinstance(outcome, dict) and outcome["reward_model"] > 0.0

    def proxy_scores(self, prompts: Sequence[str], texts: Sequence[str], finished: Sequence[bool]) -> np.ndarray:
        """float64 [N]: what training is rewarded by."""
        return self._scorer(self._config.tldr.reward_model).score(prompts, texts, finished)

    def gold_scores(self, prompts: Sequence[str], texts: Sequence[str], finished: Sequence[bool]) -> np.ndarray:
        """float64 [N]: what evaluations judge by, and training never sees."""
        if self._config.tldr.gold_model is None:
            return gold.gold_scores(prompts, texts, finished)
        return self._scorer(self._config.tldr.gold_model).score(prompts, texts, finished)

    def _scorer(self, path: str | None) -> ModelScorer:
        """None = the shipped reward model."""
        if path not in self._scorers:
            per_pass = self._config.tldr.scores_per_pass
            if path is None:
                shipped = str(reward_model_path())
                self._scorers[path] = load_scorer(shipped, device="cpu", dtype="float32", scores_per_pass=per_pass)
            else:
                self._scorers[path] = load_scorer(path, device=self._device, scores_per_pass=per_pass)
        return self._scorers[path]

    def _check_models(self) -> None:
        """What can be known without loading them, before a run has begun."""
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

    def _problems(self, split: Split) -> list[Problem]:
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

    def _make_prompts(self, problems: Sequence[Problem], split: Split) -> list[Prompt]:
        return keep_some(
            problems,
            lambda problem: self._prompt(split, problem),
            on_bad_row=self._config.on_bad_row,
            what=f"task.data={self._config.data}: no {split} row",
        )

    def _prompt(self, split: Split, problem: Problem) -> Prompt:
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


def _embedded_problem(line: int, post: Post) -> Problem:
    return Problem(line=line, question=post.text, answer=reference_summary(post))


def _text_of(prompt: Prompt) -> str:
    assert isinstance(prompt.text, str), "prompts of this task are plain text"
    return prompt.text


def _outcome(score: float) -> Outcome:
    return {"reward_model": score} if np.isfinite(score) else RewardFailed(f"the reward model's score is {score}.")
