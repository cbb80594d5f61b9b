"""Make a trainer from a config."""

from __future__ import annotations

from collections.abc import Callable

from tba.config import Config
from tba.models.load import LoadedModel
from tba.models.policy import PolicyModel
from tba.objectives.registry import make_objective
from tba.observe.recorder import Recorder
from tba.replay.buffer import ReplayBuffer
from tba.runtime.board import Row
from tba.runtime.channels import GroupReceiver, WeightPublisher
from tba.tasks.base import Task
from tba.train.checkpoint import save_checkpoint
from tba.train.collate import Budget
from tba.train.gate import Gate
from tba.train.loop import Trainer
from tba.train.optim import MasterAdamW
from tba.train.step import TrainStep


def make_trainer(
    config: Config,
    loaded: LoadedModel,
    task: Task,
    receiver: GroupReceiver,
    publisher: WeightPublisher,
    recorder: Recorder,
    *,
    cursors: Callable[[], list[int]],
) -> Trainer:
    """The trainer takes the loaded model for its own: from here on it changes with every step.

    `cursors` tells how far each searcher has come in its prompts, for checkpoints.
    """
    train_step = make_train_step(config, loaded)

    def save(step: int) -> None:
        save_checkpoint(
            recorder.folder,
            step=step,
            model=loaded.model,
            tokenizer=loaded.tokenizer,
            optimizer=train_step.optimizer,
            state={"seed": config.seed, "cursors": cursors()},
            keep=config.train.keep_checkpoints,
        )

    return Trainer(
        config=config,
        train_step=train_step,
        replay=make_replay(config, task),
        receiver=receiver,
        publisher=publisher,
        recorder=recorder,
        reward_weights=task.reward_weights,
        save=save,
    )


def make_train_step(config: Config, loaded: LoadedModel) -> TrainStep:
    train = config.train
    assert train.tokens_per_micro_batch is not None, "filled in by tba.launch.defaults"
    return TrainStep(
        PolicyModel(loaded.model),
        make_objective(config.objective),
        MasterAdamW(loaded.model.parameters(), train),
        budget=Budget(
            max_tokens=train.tokens_per_micro_batch,
            max_responses=train.responses_per_micro_batch,
            share_prompts=train.share_prompts,
        ),
        temperature=config.generate.temperature,
    )


def make_replay(config: Config, task: Task) -> ReplayBuffer:
    """Sync mode samples the current version only and keeps duplicates: on-policy data has multiplicities."""
    settings = config.replay
    if config.mode == "sync":
        settings = settings.model_copy(update={"on_policy_probability": 1.0, "deduplicate": False})
    return ReplayBuffer(
        settings,
        fresh_steps=config.fresh_steps,
        seed=config.seed,
        reward_names=tuple(task.reward_weights),
        reward_weights=tuple(task.reward_weights.values()),
    )


def make_gate(
    config: Config, trainer: Trainer, row: Row, *, num_train_prompts: int, asked_to_stop: Callable[[], bool]
) -> Gate:
    """The waits of an asynchronous trainer."""
    recorder = trainer.recorder
    return Gate(
        config=config,
        replay=trainer.replay,
        receive=trainer.receive,
        row=row,
        generated=lambda: recorder.responses_generated,
        trained=lambda: recorder.responses_trained,
        lost_prompts=lambda: trainer.lost,
        num_train_prompts=num_train_prompts,
        asked_to_stop=asked_to_stop,
    )
