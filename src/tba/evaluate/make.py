"""Make the evaluator that a task asks for."""

from __future__ import annotations

from collections.abc import Callable

from tba.config import Config
from tba.evaluate.answers import AnswerEvaluator
from tba.evaluate.attacks import DEFAULT_ATTACKS, AttackEvaluator
from tba.evaluate.base import Evaluator
from tba.evaluate.distance import Distance
from tba.evaluate.summaries import SummaryEvaluator
from tba.generate.engine import Scorer
from tba.generate.settings import training_sampling
from tba.models.load import LoadedModel
from tba.tasks.base import Task
from tba.tasks.custom.task import CustomTask
from tba.tasks.red_team.task import RedTeamTask
from tba.tasks.rewards.pool import Rewards
from tba.tasks.tldr.task import TLDRTask


def make_evaluator(
    config: Config,
    loaded: LoadedModel,
    task: Task,
    rewards: Rewards,
    *,
    start: Callable[[], Scorer] | None = None,
) -> Evaluator:
    """`start` gives what holds the model that KL is counted from, and is asked where that is measured; None = it is not."""
    settings, sampling, tokenizer = config.evaluate, training_sampling(config), loaded.tokenizer
    prompts = task.prompts(settings.split)[: settings.num_prompts]
    if isinstance(task, TLDRTask):
        task.load_models(gold=True)
        return SummaryEvaluator(
            task=task,
            tokenizer=tokenizer,
            prompts=prompts,
            sampling=sampling,
            distance=_distance(start),
            beta=_final_beta(config),
            cut_off_reward=config.train.cut_off_reward,
        )
    if isinstance(task, RedTeamTask):
        task.load_models(embedder=True)
        return AttackEvaluator(
            task=task,
            tokenizer=tokenizer,
            prompts=prompts,
            sampling=sampling,
            num_attacks=settings.samples_per_prompt or DEFAULT_ATTACKS,
            distance=_distance(start),
            beta=_final_beta(config) if task.rewards_probability else None,
        )
    return AnswerEvaluator(
        task=task,
        rewards=rewards,
        tokenizer=tokenizer,
        prompts=prompts,
        sampling=sampling,
        samples_per_prompt=settings.samples_per_prompt,
        mean_rewards=isinstance(task, CustomTask),
    )


def _distance(start: Callable[[], Scorer] | None) -> Distance | None:
    return None if start is None else Distance(start())


def _final_beta(config: Config) -> float | None:
    """None where the target is shaped, so that reward - beta x KL is not what is maximised."""
    last = config.train.max_steps
    plain = config.reference_weight_at(last) == 1.0 and config.target_temperature_at(last) == 1.0
    return config.beta_at(last) if plain else None
