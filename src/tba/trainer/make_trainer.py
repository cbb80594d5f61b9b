"""Make a trainer from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tba.config import Config
from tba.engine.contract import Scorer
from tba.engine.make_engine import make_scorer
from tba.models.load import LoadedModel, checkpoint_layers, compile_layers
from tba.models.policy import ALONE, PolicyModel, Ranks, make_critic, make_log_z
from tba.models.weights import CANARY_TOKENS
from tba.objectives.registry import make_objective
from tba.observe.recorder import Recorder
from tba.replay.buffer import ReplayBuffer
from tba.replay.durable import make_store
from tba.runtime.channels import GroupReceiver, WeightPublisher
from tba.runtime.placement import workers_of
from tba.runtime.prompt_queue import PromptQueue
from tba.trainer.batch import Budget
from tba.trainer.checkpoint import Checkpoints, Stateful
from tba.trainer.health import Health
from tba.trainer.learning_rate import LearningRate
from tba.trainer.loop import Gate, Trainer
from tba.trainer.mismatch import MismatchProbe
from tba.trainer.optimizer import MasterAdamW
from tba.trainer.reference import Beta, ReferenceResets, on_cpu
from tba.trainer.sharded import ConnectedRanks, ShardedTrainStep
from tba.trainer.step import TrainStep
from tba.trainer.updates import Updates
from tba.types import ResponseCounts, Weights


@dataclass(frozen=True, kw_only=True)
class Learner:
    train_step: TrainStep
    rescorer: Scorer | None  # a copy of the reference, where stored log_ref is recomputed at resets


def make_learner(config: Config, loaded: LoadedModel, ranks: Ranks = ALONE) -> Learner:
    # The rescorer first: packed attention changes the model's forward pass.
    rescores = config.reference.reset_every and config.replay.on_reference_reset != "drop"
    rescorer = make_scorer(loaded.model, max_length=loaded.context) if rescores else None
    return Learner(train_step=make_train_step(config, loaded, ranks), rescorer=rescorer)


def make_train_step(config: Config, loaded: LoadedModel, ranks: Ranks = ALONE) -> TrainStep:
    """Every rank makes its own, from the same model."""
    train, model, objective = config.train, loaded.model, make_objective(config)
    assert train.tokens_per_micro_batch is not None, "filled in by tba.run.resolve"
    # Longest sequence in tokens that the trainer meets: a prompt with its response, or the canary.
    longest = (config.task.max_prompt_tokens or loaded.context) + config.generate.max_new_tokens
    policy = PolicyModel(
        model,
        critic=make_critic(model) if objective.has_critic else None,
        log_z=make_log_z(model) if objective.has_log_z else None,
        max_length=min(loaded.context, max(longest, CANARY_TOKENS + 1)),
    )
    if train.gradient_checkpointing:
        checkpoint_layers(model)
    if train.compile:
        compile_layers(model)
    # After the layers are wrapped and before the optimizer looks at parameters: it has this rank's rows of them.
    if isinstance(ranks, ConnectedRanks):
        policy.shard(ranks.mesh)
    heads = [parameter for head in policy.heads for parameter in head.parameters()]
    rate = objective.heads_learning_rate
    optimizer = MasterAdamW(model.parameters(), train, heads=heads, heads_rate=rate, ranks=ranks)
    budget, temperature = Budget(max_tokens=train.tokens_per_micro_batch), config.generate.temperature
    if isinstance(ranks, ConnectedRanks):
        return ShardedTrainStep(policy, objective, optimizer, budget=budget, temperature=temperature, ranks=ranks)
    workers = workers_of(config)
    return TrainStep(policy, objective, optimizer, budget=budget, temperature=temperature, workers=workers)


def make_trainer(
    config: Config,
    loaded: LoadedModel,
    reward_weights: Mapping[str, float],
    learner: Learner,
    receiver: GroupReceiver,
    publisher: WeightPublisher,
    recorder: Recorder,
    *,
    counts: ResponseCounts,
    reference_publisher: WeightPublisher | None = None,
    prompt_queue: PromptQueue,
    parts: Mapping[str, Stateful],
    gate: Gate | None = None,
    restart_searchers: Callable[[Mapping[str, int]], None] | None = None,
    published: Callable[[int], Weights | None] | None = None,
) -> Trainer:
    """Make a trainer around a learner. `reference_publisher` is needed with reference.reset_every; `parts` are saved with
    the trainer, by name; `published` has the weights of a version as searchers got them, while they are at hand."""
    train_step, rate, beta, saved = learner.train_step, LearningRate(config), Beta(config), dict(parts)
    sharded = train_step if isinstance(train_step, ShardedTrainStep) else None
    checkpoints = Checkpoints(
        folder=recorder.folder,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        # A sharded step gathers the state of all ranks, where its optimizer has the rows of one.
        optimizer=sharded or train_step.optimizer,
        heads=train_step.policy.heads,
        gather_weights=None if sharded is None else sharded.whole_weights,
        parts=saved,
        keep=config.train.keep_checkpoints,
        failures=recorder.failures,
        seed=config.seed,
    )
    assert config.replay.on_policy_probability is not None, "filled in by tba.run.resolve"
    replay = ReplayBuffer(
        config.replay,
        fresh_steps=config.fresh_steps,
        seed=config.seed,
        reward_names=tuple(reward_weights),
        reward_weights=tuple(reward_weights.values()),
        step_values=train_step.objective.continuations > 0,
        truncated_reward=config.train.cut_off_reward,
        uses_per_group=config.uses_per_group,
        max_waiting_groups=config.max_waiting_groups,
    )
    # Where the roles take turns batches are of the trained version anyway; no rank has the whole model to score with.
    probe = None
    if published is not None and sharded is None:
        probe = MismatchProbe(train_step.policy, train_step.temperature, published)
    row = None if gate is None else gate.row
    trainer = Trainer(
        config=config,
        train_step=train_step,
        replay=replay,
        references=make_references(config, learner, replay, reference_publisher),
        receiver=receiver,
        publisher=publisher,
        recorder=recorder,
        reward_weights=reward_weights,
        checkpoints=checkpoints,
        rate=rate,
        beta=beta,
        updates=Updates(config, train_step, rate, beta, recorder.folder.path, recorder.clock),
        prompt_queue=prompt_queue,
        counts=counts,
        durable=make_store(config, recorder.folder, reward_weights=reward_weights, row=row),
        gate=gate,
        restart_searchers=restart_searchers,
        probe=probe,
        health=Health(config, recorder, checkpoints) if config.observe.on_collapse != "off" else None,
    )
    saved["trainer"] = trainer  # checkpoints look at their parts when one is saved or loaded
    return trainer


def make_references(
    config: Config, learner: Learner, replay: ReplayBuffer, publisher: WeightPublisher | None
) -> ReferenceResets | None:
    """The learner has not trained yet: its weights are those of the start model."""
    if not config.reference.reset_every:
        return None
    assert publisher is not None, "the runtime publishes references where reference.reset_every is set"
    goes_back = config.observe.on_collapse == "rollback"
    return ReferenceResets(
        every=config.reference.reset_every,
        publisher=publisher,
        replay=replay,
        temperature=config.generate.temperature,
        scorer=learner.rescorer,
        on_reset=learner.train_step.restart_log_z,
        # A whole model in host memory, and only a run that goes back may need it.
        start=on_cpu(learner.train_step.weights(version=0)) if goes_back else None,
    )
