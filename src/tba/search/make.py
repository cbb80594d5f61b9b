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
from tba.search.loop import FailureCount, GroupScorer, Searcher, SearchState
from tba.search.prompts import PromptStream, ReferenceSamples, explore
from tba.search.values import StepValues
from tba.tasks.base import Rewards, Task
from tba.tasks.rewards.pool import make_rewards


def make_search_engine(config: Config, loaded: LoadedModel) -> Engine:
    """The engine with the model's weights as version 0; where the roles take turns it drains: a response is of one
    version."""
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


def make_reference_samples(
    config: Config, engine: Engine | None, *, between_steps: Callable[[], None] | None = None
) -> ReferenceSamples | None:
    if engine is None:
        return None
    return ReferenceSamples(engine, config.reference_samples_per_prompt, training_sampling(config), between_steps)


def make_start_scorer(config: Config, loaded: LoadedModel, searcher: Searcher) -> Scorer:
    """What holds the start model for evaluations: the searcher's reference, unless that is reset."""
    if config.reference.reset_every:
        return make_scorer(loaded.model, max_length=loaded.context)
    return searcher.scorer.reference


def make_step_values(
    config: Config,
    loaded: LoadedModel,
    task: Task,
    *,
    log: Path,
    between_steps: Callable[[], None] | None = None,
) -> StepValues | None:
    """What estimates the values of step prefixes; None unless the objective needs them."""
    continuations = make_objective(config).extras.continuations
    if not continuations:
        return None
    return StepValues(
        rewards=make_rewards(task, config, log=log),
        reward_weights=task.reward_weights,
        tokenizer=loaded.tokenizer,
        sampling=training_sampling(config),
        continuations=continuations,
        cut_off_reward=config.train.cut_off_reward,
        between_steps=between_steps,
    )


def make_search_state() -> SearchState:
    """A searcher before its first visit."""
    return SearchState(failures=FailureCount())


def make_searcher(
    config: Config,
    loaded: LoadedModel,
    task: Task,
    *,
    engine: Engine,
    state: SearchState,
    visits: VisitSource,
    rewards: Rewards,
    sender: GroupSender,
    reference_engine: Engine | None = None,
    step_values: StepValues | None = None,
    reference_samples: ReferenceSamples | None = None,
    index: int = 0,
    incarnation: str = "0",
) -> Searcher:
    """Searcher `index`; the loaded weights become its frozen reference. An engine that holds the reference also scores."""
    reference = reference_engine or make_scorer(loaded.model, max_length=loaded.context)
    sampling = training_sampling(config)
    return Searcher(
        engine=engine,
        prompts=PromptStream(task.prompts("train"), visits, samples_per_prompt=config.samples_generated_per_prompt),
        rewards=rewards,
        scorer=GroupScorer(
            reference=reference,
            temperature=config.generate.temperature,
            failures=state.failures,
        ),
        sender=sender,
        tokenizer=loaded.tokenizer,
        counts=state.counts,
        explore=lambda request: explore(request, sampling, config.search.explore, seed=config.seed),
        sampling=sampling,
        samples_per_prompt=config.samples_generated_per_prompt,
        step_values=step_values,
        reference_samples=reference_samples,
        index=index,
        incarnation=incarnation,
    )
