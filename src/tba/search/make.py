"""Make a searcher from a config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tba.config import Config
from tba.generate.contract import Engine, Scorer
from tba.generate.make import make_engine, make_scorer, with_adapters
from tba.generate.sampling import training_sampling
from tba.models.load import LoadedModel
from tba.objectives.registry import make_objective
from tba.runtime.channels import GroupSender
from tba.runtime.leases import VisitSource
from tba.search.loop import GroupScorer, SearchCounts, Searcher
from tba.search.prompts import PromptStream, ReferenceSamples, explore
from tba.search.values import StepValues
from tba.tasks.base import Task
from tba.tasks.rewards.pool import make_rewards


def make_search_engine(config: Config, loaded: LoadedModel, *, beside_trainer: bool = False) -> Engine:
    """The engine with the model's weights as version 0; where the roles take turns it drains: a response is of one
    version. `beside_trainer` says that weights come from another process on the same GPU."""
    generate = config.generate
    lora = config.model.lora
    engine = make_engine(
        loaded.model,
        loaded.tokenizer,
        generate,
        seed=config.seed,
        max_length=loaded.context,
        update="drain" if config.takes_turns else "in_flight",
        explores=config.search.explore.probability > 0.0,
        beside_trainer=beside_trainer and lora is None,
    )
    return engine if lora is None else with_adapters(engine, loaded.model)


def make_reference_engine(config: Config, loaded: LoadedModel) -> Engine | None:
    """An engine with the model's weights as they are now; None unless search.explore.reference_share asks for it."""
    count = config.reference_samples_per_prompt
    if count == 0:
        return None
    slots = min(count, config.generate.slots or count)
    generate = config.generate.model_copy(update={"slots": slots})
    return make_engine(
        loaded.model, loaded.tokenizer, generate, seed=config.seed, max_length=loaded.context, update="drain"
    )


def make_searcher(
    config: Config,
    loaded: LoadedModel,
    task: Task,
    *,
    engine: Engine,
    reference_engine: Engine | None,
    counts: SearchCounts,
    visits: VisitSource,
    sender: GroupSender,
    log: Path,
    between_steps: Callable[[], None] | None = None,
    index: int = 0,
    incarnation: str = "0",
) -> Searcher:
    """Searcher `index`, with the workers of its rewards. The loaded weights become its frozen reference; an engine that has
    the reference also scores. `between_steps` is called while others than the policy's own responses are generated."""
    sampling, samples, explores = training_sampling(config), config.samples_generated_per_prompt, config.search.explore
    # Reference and continuations have the run's plain sampling: explored visits alone have another.
    reference_samples = step_values = None
    if reference_engine is not None:
        count = config.reference_samples_per_prompt
        reference_samples = ReferenceSamples(reference_engine, count, sampling, between_steps)
    if continuations := make_objective(config).continuations:
        step_values = StepValues(
            rewards=make_rewards(task, config, log=log.with_name(f"{log.stem}-values.log")),
            reward_weights=task.reward_weights,
            tokenizer=loaded.tokenizer,
            sampling=sampling,
            continuations=continuations,
            cut_off_reward=config.train.cut_off_reward,
            between_steps=between_steps,
        )
    return Searcher(
        engine=engine,
        prompts=PromptStream(task.prompts("train"), visits, samples_per_prompt=samples),
        rewards=make_rewards(task, config, log=log),
        scorer=GroupScorer(
            reference=reference_engine or make_scorer(loaded.model, max_length=loaded.context),
            temperature=config.generate.temperature,
            counts=counts,
        ),
        sender=sender,
        tokenizer=loaded.tokenizer,
        explore=lambda request: explore(request, sampling, explores, seed=config.seed),
        sampling=sampling,
        samples_per_prompt=samples,
        step_values=step_values,
        reference_samples=reference_samples,
        index=index,
        incarnation=incarnation,
    )


def make_start_scorer(config: Config, loaded: LoadedModel, searcher: Searcher) -> Scorer:
    """What holds the start model for evaluations: the searcher's reference, unless that is reset."""
    if config.reference.reset_every:
        return make_scorer(loaded.model, max_length=loaded.context)
    return searcher.scorer.reference
