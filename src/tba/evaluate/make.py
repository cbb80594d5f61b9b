"""Make the evaluator that a task asks for."""

from __future__ import annotations

from collections.abc import Callable

from tba.config import Config
from tba.evaluate.answers import AnswerEvaluator
from tba.evaluate.attacks import DEFAULT_ATTACKS, AttackEvaluator
from tba.evaluate.base import Evaluator
from tba.evaluate.summaries import SummaryEvaluator
from tba.generate.engine import Scorer, make_scorer
from tba.generate.settings import training_sampling
from tba.models.load import LoadedModel
from tba.tasks.base import Task
from tba.tasks.preference.task import PreferenceTask
from tba.tasks.red_team.task import RedTeamTask
from tba.tasks.rewards import Rewards


def make_evaluator(
    config: Config,
    loaded: LoadedModel,
    task: Task,
    rewards: Rewards,
    *,
    start: Callable[[], LoadedModel] | None = None,
) -> Evaluator:
    """`start` loads the model that KL is counted from, where that is measured; None = the loaded one as it is now."""
    settings, sampling, tokenizer = config.evaluate, training_sampling(config), loaded.tokenizer
    prompts = task.prompts(settings.split)[: settings.num_prompts]
    beta = config.beta_at(config.train.max_steps)
    if isinstance(task, PreferenceTask):
        return SummaryEvaluator(
            task=task,
            tokenizer=tokenizer,
            prompts=prompts,
            sampling=sampling,
            start=_start_scorer(loaded if start is None else start()),
            beta=beta,
        )
    if isinstance(task, RedTeamTask):
        return AttackEvaluator(
            task=task,
            tokenizer=tokenizer,
            prompts=prompts,
            sampling=sampling,
            num_attacks=settings.samples_per_prompt or DEFAULT_ATTACKS,
            start=_start_scorer(loaded if start is None else start()),
            beta=beta,
        )
    return AnswerEvaluator(
        task=task,
        rewards=rewards,
        tokenizer=tokenizer,
        prompts=prompts,
        sampling=sampling,
        samples_per_prompt=settings.samples_per_prompt,
    )


def _start_scorer(start: LoadedModel) -> Scorer:
    return make_scorer(start.model, max_length=start.context)
