"""The trainer: take in what arrived, sample, step, publish."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save_file

from tba.config import Config
from tba.models.weights import make_weights
from tba.observe.recorder import Recorder
from tba.replay.buffer import ReplayBuffer
from tba.runtime.channels import GroupReceiver, WeightPublisher
from tba.train.gate import Gate
from tba.train.measure import batch_metrics
from tba.train.rewards import combine, drop_stale
from tba.train.step import NonFiniteLoss, StepResult, TrainStep
from tba.types import TOKEN_FIELDS, Batch


@dataclass
class Trainer:
    """consumes: trajectory groups
    waits for: the first fill, and new responses at the replay-ratio limit (never in sync mode: its turn comes after)
    produces: weights every k steps, metrics, checkpoints
    unblocked by: searchers
    """

    config: Config
    train_step: TrainStep
    replay: ReplayBuffer
    receiver: GroupReceiver
    publisher: WeightPublisher
    recorder: Recorder
    reward_weights: Mapping[str, float]
    save: Callable[[int], None]
    """Writes a checkpoint of the given step."""
    gate: Gate | None = None
    """Holds a step back until there is enough to train on; None in sync mode."""
    received: int = field(default=0, init=False)
    """Groups with a response taken in since the last step."""
    lost: int = field(default=0, init=False)
    """Groups without one."""
    step_index: int = field(default=0, init=False)
    """Optimizer steps done: the version of the weights."""

    def step(self) -> StepResult:
        """One optimizer step on what the buffer holds."""
        self.receive()
        waited = self.gate.wait() if self.gate is not None else 0.0
        self.recorder.training_starts()
        started = time.perf_counter()
        batch = self.sample()
        result = self.optimize(batch)
        self.step_index += 1
        publishing = self.publish_if_due()
        self.record(batch, result, seconds=time.perf_counter() - started, waited=waited, publishing=publishing)
        return result

    @property
    def done(self) -> bool:
        return self.step_index >= self.config.train.max_steps

    def receive(self) -> None:
        groups = self.receiver.drain()
        self.received += sum(bool(group.trajectories) for group in groups)
        self.lost += sum(not group.trajectories for group in groups)
        for group in groups:
            self.replay.add(group, step=self.step_index)
            self.recorder.group_received(self.step_index, group)
        self.receiver.acknowledge(groups)

    def sample(self) -> Batch:
        train = self.config.train
        batch = self.replay.sample(self._prompts_to_sample(), train.samples_per_prompt, step=self.step_index)
        batch = combine(batch, train, reward_weights=self.reward_weights)
        if self.config.replay.lag == "drop":
            batch = drop_stale(batch, oldest_version=self.step_index - self.config.replay.max_lag)
        self.received = self.lost = 0
        return batch

    def _prompts_to_sample(self) -> int:
        """P; in sync mode no more than came this step: older groups must not fill up for those lost to failing rewards."""
        wanted = self.config.train.prompts_per_step
        return wanted if self.config.mode == "async" else min(wanted, self.received)

    def optimize(self, batch: Batch) -> StepResult:
        step = self.step_index
        try:
            return self.train_step(
                batch, beta=self.config.beta_at(step), learning_rate=self.config.learning_rate_at(step)
            )
        except NonFiniteLoss as error:
            path = save_batch(batch, self.recorder.folder.path / f"failed-batch-step-{step}.safetensors")
            raise NonFiniteLoss(
                f"step {step} stopped before the optimizer moved: {error} The batch is saved in {path}. "
                "Lower train.learning_rate, raise objective.beta, or look for extreme rewards in it."
            ) from None

    def publish_if_due(self) -> float:
        """Weights every k steps and at the end; checkpoints on schedule. Returns the seconds publishing took."""
        started = time.perf_counter()
        if self.done or self.step_index % self.config.train.publish_every == 0:
            self.publisher.publish(make_weights(self.train_step.policy.model, version=self.step_index))
        seconds = time.perf_counter() - started
        every = self.config.train.checkpoint_every
        if self.done or (every is not None and self.step_index % every == 0):
            self.save(self.step_index)
        return seconds

    def record(self, batch: Batch, result: StepResult, *, seconds: float, waited: float, publishing: float) -> None:
        """Metrics of the step just done; lag is counted against the version that was trained."""
        trained = self.step_index - 1
        metrics = {
            **result.metrics,
            **batch_metrics(batch, result.log_pi_N.cpu(), step=trained),
            "entropy": result.entropy,
            "beta": self.config.beta_at(trained),
            "time/step": seconds,
            "time/wait_for_batch": waited,
            "time/publish_weights": publishing,
            **{f"buffer/{name}": value for name, value in self.replay.stats().items()},
        }
        self.recorder.step(self.step_index, metrics, responses=batch.totals.responses)


def save_batch(batch: Batch, path: Path) -> Path:
    """A batch as safetensors, for looking at what went wrong."""
    tensors = {
        name: getattr(batch, name).cpu().contiguous() for name in (*TOKEN_FIELDS, "reward_PK", "rows_PK", "offsets")
    }
    tensors |= {f"rewards.{name}": value.cpu().contiguous() for name, value in batch.rewards.items()}
    save_file(tensors, path)
    return path
