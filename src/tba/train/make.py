"""Make a trainer from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tba.config import Config
from tba.generate.contract import Scorer
from tba.generate.make import make_scorer
from tba.models.load import LoadedModel, checkpoint_layers, compile_layers
from tba.models.weights import CANARY_TOKENS
from tba.objectives.base import Objective
from tba.objectives.registry import make_objective
from tba.observe.recorder import Recorder
from tba.policy.model import PolicyModel, make_critic, make_log_z
from tba.replay.buffer import ReplayBuffer
from tba.replay.durable import make_store
from tba.runtime.channels import GroupReceiver, WeightPublisher
from tba.runtime.leases import VisitLedger
from tba.runtime.placement import workers_of
from tba.tasks.base import Task
from tba.train.batch import Budget
from tba.train.checkpoint import Checkpoints
from tba.train.gate import Gate
from tba.train.health import Health
from tba.train.learning_rate import LearningRate
from tba.train.loop import Trainer
from tba.train.mismatch import MismatchProbe
from tba.train.optimizer import MasterAdamW
from tba.train.ranks import ALONE, ConnectedRanks, Ranks
from tba.train.reference import Beta, ReferenceResets, on_cpu
from tba.train.sharded import ShardedTrainStep
from tba.train.state import Stateful
from tba.train.step import TrainStep
from tba.train.updates import Updates
from tba.types import ResponseCounts, Weights


@dataclass(frozen=True, kw_only=True)
class Learner:
    """What takes the loaded model for its own: from here on its weights change with every step.

    Learner(train_step=..., rescorer=None)
    """

    train_step: TrainStep
    rescorer: Scorer | None
    """A copy of the reference, where stored log_ref is recomputed at resets."""


def make_learner(config: Config, loaded: LoadedModel, ranks: Ranks = ALONE) -> Learner:
    rescorer = make_rescorer(config, loaded)  # copies the model before packed attention changes its forward pass
    return Learner(train_step=make_train_step(config, loaded, ranks), rescorer=rescorer)


def make_trainer(
    config: Config,
    loaded: LoadedModel,
    task: Task,
    learner: Learner,
    receiver: GroupReceiver,
    publisher: WeightPublisher,
    recorder: Recorder,
    *,
    counts: ResponseCounts,
    reference_publisher: WeightPublisher | None = None,
    ledger: VisitLedger,
    parts: Mapping[str, Stateful],
    gate: Gate | None = None,
    restart_searchers: Callable[[Mapping[str, int]], None] | None = None,
    published: Callable[[int], Weights | None] | None = None,
) -> Trainer:
    """Make a trainer around a learner.

    `reference_publisher` is needed with reference.reset_every; `ledger` knows who visits which prompt; `parts` are saved
    with the trainer, by name; `gate` makes an asynchronous trainer wait for data, `restart_searchers` lets it begin anew
    with weights that it has gone back to; `published` has the weights of a version as searchers got them, while they are at
    hand.
    """
    train_step, rate = learner.train_step, LearningRate(config)
    beta = Beta(config)
    saved = dict(parts)
    checkpoints = make_checkpoints(config, loaded, train_step, recorder, saved)
    replay = make_replay(config, task)
    trainer = Trainer(
        config=config,
        train_step=train_step,
        replay=replay,
        references=make_references(config, learner, replay, reference_publisher),
        receiver=receiver,
        publisher=publisher,
        recorder=recorder,
        reward_weights=task.reward_weights,
        checkpoints=checkpoints,
        rate=rate,
        beta=beta,
        updates=Updates(config, train_step, rate, beta, recorder.folder.path, recorder.clock),
        ledger=ledger,
        counts=counts,
        durable=make_store(
            config, recorder.folder, reward_weights=task.reward_weights, row=None if gate is None else gate.row
        ),
        gate=gate,
        restart_searchers=restart_searchers,
        probe=make_probe(train_step, published),
        health=Health(config, recorder, checkpoints) if config.observe.on_collapse != "off" else None,
    )
    saved["trainer"] = trainer
    return trainer


def make_checkpoints(
    config: Config, loaded: LoadedModel, train_step: TrainStep, recorder: Recorder, parts: Mapping[str, Stateful]
) -> Checkpoints:
    """Those of the recorder's folder. `parts` may still grow: they are looked at when a checkpoint is saved or loaded."""
    return Checkpoints(
        folder=recorder.folder,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        optimizer=train_step if isinstance(train_step, ShardedTrainStep) else train_step.optimizer,
        heads=train_step.policy.heads,
        gather_weights=train_step.whole_weights if isinstance(train_step, ShardedTrainStep) else None,
        parts=parts,
        keep=config.train.keep_checkpoints,
        failures=recorder.failures,
        seed=config.seed,
    )


def make_train_step(config: Config, loaded: LoadedModel, ranks: Ranks = ALONE) -> TrainStep:
    """Every rank makes its own, from the same model."""
    train, objective = config.train, make_objective(config)
    assert train.tokens_per_micro_batch is not None, "filled in by tba.launch.resolve"
    policy = make_policy(loaded, objective, max_length=longest_sequence(config, loaded.context))
    if train.gradient_checkpointing:
        checkpoint_layers(loaded.model)
    if train.compile:
        compile_layers(loaded.model)
    if isinstance(ranks, ConnectedRanks):
        policy.shard(ranks.mesh)
    heads = [parameter for head in policy.heads for parameter in head.parameters()]
    heads_rate = objective.extras.heads_learning_rate
    optimizer = MasterAdamW(loaded.model.parameters(), train, heads=heads, heads_rate=heads_rate, ranks=ranks)
    budget = Budget(max_tokens=train.tokens_per_micro_batch)
    temperature = config.generate.temperature
    if isinstance(ranks, ConnectedRanks):
        return ShardedTrainStep(policy, objective, optimizer, budget=budget, temperature=temperature, ranks=ranks)
    workers = workers_of(config)
    return TrainStep(policy, objective, optimizer, budget=budget, temperature=temperature, workers=workers)


def make_probe(train_step: TrainStep, published: Callable[[int], Weights | None] | None) -> MismatchProbe | None:
    """None where batches are of the trained version anyway, and where no rank has the whole model to score with."""
    if published is None or isinstance(train_step, ShardedTrainStep):
        return None
    return MismatchProbe(train_step.policy, train_step.temperature, published)


def longest_sequence(config: Config, context: int) -> int:
    """Longest sequence in tokens that the trainer meets: a prompt with its response, or the canary."""
    prompt = config.task.max_prompt_tokens or context
    return min(context, max(prompt + config.generate.max_new_tokens, CANARY_TOKENS + 1))


def make_policy(loaded: LoadedModel, objective: Objective, *, max_length: int) -> PolicyModel:
    """The model with the heads its objective needs, for sequences of up to `max_length` tokens."""
    extras, critic, log_z = objective.extras, None, None
    if extras.critic:
        critic = make_critic(loaded.model)
    if extras.log_z:
        log_z = make_log_z(loaded.model)
    return PolicyModel(loaded.model, critic=critic, log_z=log_z, max_length=max_length)


def make_replay(config: Config, task: Task) -> ReplayBuffer:
    assert config.replay.on_policy_probability is not None, "filled in by tba.launch.resolve"
    return ReplayBuffer(
        config.replay,
        fresh_steps=config.fresh_steps,
        seed=config.seed,
        reward_names=tuple(task.reward_weights),
        reward_weights=tuple(task.reward_weights.values()),
        step_values=make_objective(config).extras.continuations > 0,
        truncated_reward=config.train.cut_off_reward,
        uses_per_group=config.uses_per_group,
        max_waiting_groups=config.max_waiting_groups,
        expires=config.expires,
    )


def make_rescorer(config: Config, loaded: LoadedModel) -> Scorer | None:
    """The trainer's own copy of the reference, where stored log_ref is recomputed at resets."""
    if not config.reference.reset_every or config.replay.on_reference_reset == "drop":
        return None
    return make_scorer(loaded.model, max_length=loaded.context)


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
        start=on_cpu(learner.train_step.weights(version=0)) if goes_back else None,
    )
