"""The trainer: take in arrived groups, train an earlier batch again, sample, step, publish.

It loads a checkpoint where a process resumes a run, and where a run leaves a collapse behind. The durable replay then
holds groups that the checkpoint's buffer does not. An asynchronous run that resumes takes them in again. Where searcher
and trainer take turns they are removed, since they are generated again, token by token. They are also removed after a
collapse or a resume from an earlier checkpoint, whose later policy is given up.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from tba.config import Config, ConfigError
from tba.observe.metrics import deciding_metric
from tba.observe.recorder import Recorder
from tba.replay.buffer import ReplayBuffer
from tba.replay.durable import GroupStore
from tba.runtime.channels import GroupReceiver, WeightPublisher, wait_until
from tba.runtime.columns import columns_of
from tba.runtime.counters import RoleCounters
from tba.runtime.prompt_queue import PromptQueue
from tba.trainer.batch import batch_metrics, combine, response_means, target_metrics
from tba.trainer.checkpoint import Checkpoints, CorruptCheckpoint, Stateful, check_manifest
from tba.trainer.health import MOST_ROLLBACKS, Collapsed, Health
from tba.trainer.learning_rate import LearningRate
from tba.trainer.mismatch import MismatchProbe, mismatch_of_batch
from tba.trainer.reference import Beta, ReferenceResets
from tba.trainer.step import StepResult, TrainStep
from tba.trainer.updates import SpareTime, Updates, with_old_values
from tba.types import Batch, GroupId, ResponseCounts, TrajectoryGroup

logger = logging.getLogger("tba")

GENTLER = 0.5  # factor of the learning rate with each rollback
SAVED = (
    "step_index",
    "received",
    "lost",
    "fresh_rewards",
    "fresh_reward",
)  # attributes that a checkpoint holds as they are


@dataclass
class Trainer:
    """consumes: trajectory groups
    waits for: a full batch, new responses at the replay-ratio limit (never in sync mode: its turn comes after), its disk
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
    checkpoints: Checkpoints
    rate: LearningRate
    beta: Beta
    updates: Updates
    prompt_queue: PromptQueue
    counts: ResponseCounts
    references: ReferenceResets | None = None  # makes the policy the reference now and then; None = it never does
    health: Health | None = None  # watches for a collapse; None with observe.on_collapse=off
    durable: GroupStore | None = None  # writes accepted groups to disk; None with replay.durability=off
    probe: MismatchProbe | None = None
    """Compares what searchers generate with this trainer; None where batches are of the trained version anyway."""
    gate: Gate | None = None  # holds a step back until there is enough to train on; None where the roles take turns
    restart_searchers: Callable[[Mapping[str, int]], None] | None = None
    """Has searchers begin anew with the weights that are published now; None where the roles take turns."""
    received: int = field(default=0, init=False)
    """Number of groups with a response that were taken in since the last step."""
    receive_seconds: float = field(default=0.0, init=False)  # time `receive` took since the last step
    lost: set[str] = field(default_factory=set, init=False)
    """Ids of prompts whose last rollout brought no response: every one was lost to its reward."""
    fresh_rewards: list[float] = field(default_factory=list, init=False)
    """Rewards of the responses that came since the last step, before the buffer drops or draws any."""
    fresh_reward: float = field(default=math.nan, init=False)  # their mean; where none came, that of the step before
    spare: SpareTime = field(default_factory=SpareTime, init=False)
    step_index: int = field(default=0, init=False)
    """Number of optimizer steps done, which is the version of the weights at the end of a step."""
    batch: Batch | None = field(default=None, init=False)
    """The last one sampled; train.updates_per_batch steps train on it."""
    last_row: int | None = field(default=0, init=False)
    """Row of the durable replay that came last when the state was saved that this trainer began with, 0 = none had come;
    None = it was saved without one."""

    def step(self) -> StepResult:
        """One optimizer step on what the buffer holds, and the second update on an earlier batch: before new responses are
        waited for, or, where the roles take turns, before the next ones are generated."""
        self.receive()
        again = waited = 0.0
        if self.gate is not None:
            self.gate.row["most_lag"] = self.rate.most_lag(self.step_index, self.progress)
            # Asked before the second update: its time counts as spare only where no batch was ready.
            was_ready = self.gate.is_open(self)
            # Before the wait: groups that arrive during the update are taken in by the gate's first look.
            again = self.train_again() if self.spare.is_enough else 0.0
            self.train_step.moved = False  # nothing of it is left to do, should the wait for the next batch be the end
            waited = self.gate.wait(self) if self.needs_batch else 0.0
            if self.step_index > 1:  # before that searchers have only begun
                self.spare.add(waited + (0.0 if was_ready else again))
        self.recorder.clock.start()
        started, progress = time.perf_counter(), self.progress
        batch = self.sample() if self.batch is None or self.needs_batch else self.batch
        result = self.updates.first(batch, step=self.step_index, progress=progress)
        # The batch stays on the host, where its metrics are computed.
        log_pi_N = result.outputs.log_pi_N.cpu()
        measured = self._measured(batch, result, log_pi_N)
        self.beta.follow(measured)
        self.batch = with_old_values(batch, result)
        self.counts.trained += batch.totals.responses
        self.step_index += 1
        self.recorder.step_done(self.step_index)
        # Where the roles take turns, the second update is part of the version that is published below.
        if self.gate is None and not self.done:
            again = self.train_again()
            started += again  # it has a time of its own
        if self.gate is not None:
            # Before searchers see the new version: its first prompts must keep the new limit.
            self.gate.row["most_lag"] = self.rate.most_lag(self.step_index, self.progress)
        publishing = self.publish_if_due()
        times = {"receive": self.receive_seconds, "second_update": again, "wait_for_batch": waited}
        times |= {"step": time.perf_counter() - started, "publish_weights": publishing}
        self.spare.step_seconds, self.receive_seconds = times["step"], 0.0
        # For the guard, of all sampled responses: where equal-reward groups or cut-off responses lose their weight, those
        # that count look well until none is left.
        watched = {**response_means(batch, log_pi_N, batch.sampled_PK), "entropy": result.entropy}
        self._record(batch, measured, watched, times)
        self.train_step.moved = False  # only now is the step whole (weights_are_consistent)
        # Before it is saved: a checkpoint of a step that is given up would only be dropped again.
        if self.health is not None and self.health.rolls_back:
            self.roll_back(self.health)
            return result
        # Checkpoints on schedule and at the end are the last thing of a step: nothing of it is missing in them.
        every = self.config.train.checkpoint_every
        if self.done or (every is not None and self.step_index % every == 0):
            self.save()
        if self.health is not None:
            self.health.save_if_due(self.step_index)
            self.health.stop_if_asked()
        return result

    def train_again(self) -> float:
        """The second update on an earlier batch, if it is due; returns the seconds it took."""
        started = time.perf_counter()
        trained = self.updates.second(step=self.step_index, progress=self.progress)
        self.counts.again += trained
        return time.perf_counter() - started if trained else 0.0

    def _measured(self, batch: Batch, result: StepResult, log_pi_N: Tensor) -> dict[str, float]:
        """Metrics of the update just made, which has seen `log_pi_N` before it, and the schedules' values for it."""
        step, progress = self.step_index, self.progress
        beta = self.beta.at(step, progress) * self.updates.reward_unit
        found = {**result.metrics, **batch_metrics(batch, log_pi_N, step=step)}
        # Searchers against this trainer at one version. Not by the batch of an asynchronous run: it may hold responses that
        # a trainer before a resume called this version.
        mismatch = None
        if self.probe is not None:
            mismatch = self.probe.take(step)
        elif self.config.is_synchronous:
            mismatch = mismatch_of_batch(batch, log_pi_N, step=step)
        if mismatch is not None:
            found["off_policy/mismatch_kl"] = mismatch
        if self.train_step.objective.needs.target and self.config.has_plain_target_at(step, progress):
            found |= target_metrics(batch, log_pi_N, beta=beta)
        return {**found, "beta": beta, "target_temperature": self.config.target_temperature_at(step, progress)}

    @property
    def needs_batch(self) -> bool:
        return self.step_index % self.config.train.updates_per_batch == 0

    @property
    def progress(self) -> float:
        """Share of the run that was done, 0 to 1, as the last step was: all schedules of a step go by this one number."""
        return self.recorder.progress

    @property
    def done(self) -> bool:
        return self.progress >= 1.0

    def end(self) -> None:
        """The time was over while the next batch was waited for: make up for what the last step would have done."""
        self.recorder.time_is_over()
        if self.health is not None:
            self.health.finish()
        # With train.publish_every > 1 searchers may have older weights, and the last evaluation is of these.
        self.publisher.publish(self.train_step.weights(self.step_index))
        self.save()

    @property
    def weights_are_consistent(self) -> bool:
        """Whether the weights are finite and of no half-made update, as after an error in the middle of one."""
        return not self.train_step.moved and self.train_step.is_finite

    def receive(self) -> None:
        """Take in the groups that have arrived, and acknowledge those that are committed."""
        started = time.perf_counter()
        groups = self.receiver.drain()
        if self.prompt_queue.outstanding:
            self.recorder.clock.start()  # a searcher has its first rollout
        for group in groups:
            if self.probe is not None:
                self.probe.look(group, step=self.step_index)
            if self.add(group):
                self._count(group)
        # Senders keep a group until it is acknowledged: with a durable replay, until it is on disk and not in the
        # buffer alone.
        self.receiver.acknowledge([group.id for group in groups] if self.durable is None else self.durable.committed())
        self.receive_seconds += time.perf_counter() - started

    def add(self, group: TrajectoryGroup) -> bool:
        new = self._add_to_buffer(group)  # first: what it refuses as wrong is not written either
        if self.durable is not None:
            self.durable.append(group, step=self.step_index)
        return new

    def _add_to_buffer(self, group: TrajectoryGroup) -> bool:
        """Add a group that arrives, or is stored on disk already; False where it came before."""
        new = not self.replay.marks.passed(GroupId.parse(group.id))
        if new:
            # Only for a new group: it may be scored anew, which costs the reference a forward pass.
            admitted = group if self.references is None else self.references.admit(group)
            self.replay.add(admitted, step=self.step_index)
        return new

    def _count(self, group: TrajectoryGroup) -> None:
        self.received += bool(group.trajectories)
        (self.lost.discard if group.trajectories else self.lost.add)(group.prompt.id)
        self.counts.generated += group.num_generated
        # NaN = no component of the reward was applicable to the response.
        rewards = columns_of(group).combined_rewards(self.reward_weights)
        self.fresh_rewards += [reward for reward in rewards if not math.isnan(reward)]
        self.prompt_queue.complete(group.rollout, is_lost=not group.trajectories)
        self.recorder.group_received(self.step_index, group)

    def close(self) -> None:
        if self.durable is not None:
            self.durable.close()

    def sample(self) -> Batch:
        train, prompts = self.config.train, self.config.train.prompts_per_step
        if self.config.is_synchronous and self.config.replay.on_policy_probability == 1.0:
            # Without replay no more than came this step: older groups must not fill up for those lost to failing rewards.
            prompts = min(prompts, self.received)
        batch = self.replay.sample(prompts, train.samples_per_prompt, step=self.step_index)
        self.received = 0
        return combine(batch, train, reward_weights=self.reward_weights)

    def expire(self) -> None:
        """Responses that are too old to train on leave the buffer (replay.max_lag)."""
        if self.config.expires and self.config.replay.max_lag is not None:
            self.replay.expire(self.step_index - self.config.replay.max_lag)

    def publish_if_due(self) -> float:
        """Publish weights every k steps and at the end, and a new reference on schedule. Returns the seconds it took."""
        started = time.perf_counter()
        # The tensors are the model's own, or gathered when they are looked at. Publishers that keep them (a lag,
        # references) copy.
        weights = self.train_step.weights(self.step_index)
        # Not after the last step: nothing would be trained against the new reference.
        reset = self.references is not None and not self.done and self.references.reset_if_due(weights)
        if reset:
            self.beta.kl = 0.0  # the reference is the policy itself from now on
            self.updates.forget()
        if self.done or reset or self.step_index % self.config.train.publish_every == 0:
            self.publisher.publish(weights)
        return time.perf_counter() - started

    def save(self) -> None:
        self.checkpoints.save(self.step_index)
        self.recorder.saved(self.step_index, self.checkpoints.wait)

    def state(self) -> dict[str, Any]:
        """State that the next step depends on, besides weights and optimizer."""
        log_z = self.train_step.policy.log_z
        return {
            **{name: getattr(self, name) for name in SAVED},
            "counts": vars(self.counts),
            # A resume between two updates of a batch trains on the same batch. One that is used up is not written.
            "batch": None if self.needs_batch else self.batch,
            "log_z_started": log_z is not None and log_z.started,
            "last_row": None if self.durable is None else self.durable.last_arrival,
            **{name: part.state() for name, part in self._parts().items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name in (*SAVED, "batch", "last_row"):
            setattr(self, name, state[name])
        vars(self.counts).update(state["counts"])
        if self.train_step.policy.log_z is not None:
            self.train_step.policy.log_z.started = state["log_z_started"]
        for name, part in self._parts().items():
            if name in state:  # the guard may have been switched on since
                part.load_state(state[name])

    def resume(self, checkpoint: Path | None) -> None:
        """Go on from a checkpoint of the run; None = from the start, also of a run that died before it had one. Where later
        checkpoints could have been gone on from, their steps are given up with what was generated for them."""
        if checkpoint is not None:
            self.checkpoints.load(checkpoint)
        later = any(step > self.step_index for step in self.checkpoints.folder.checkpoints_by_step())
        gives_up = self.config.is_synchronous or later
        self._leave_behind(forget_rows=gives_up)
        if not gives_up and self.durable is not None and self.last_row is not None:
            # In the order of their arrival, as if they arrived now.
            taken = sum(self._take_in(stored.group) for stored in self.durable.load(after=self.last_row))
            if taken:
                logger.info(
                    "%d groups that were stored after step %d was saved are taken in again.", taken, self.step_index
                )
            # The checkpoint may hold groups whose rows were never committed: their numbers must not be given to new
            # groups.
            self.durable.go_on_after(self.last_row)

    def _take_in(self, group: TrajectoryGroup) -> bool:
        """Add a group of the durable replay; False where it came before."""
        new = self._add_to_buffer(group)
        if new and group.rollout >= 0:  # imported ones were not counted the first time either
            self._count(group)
        return new

    def roll_back(self, health: Health) -> None:
        """Restore the newest checkpoint from before the collapse and go on with a gentler step. What came after it is
        removed, and searchers begin anew: nothing of the weights given up arrives later."""
        alarm, path, recorder = health.alarm, health.kept, self.recorder
        assert alarm is not None
        assert path is not None
        try:
            # Before anything is loaded: half a rollback would leave the parts of a run at two different steps.
            check_manifest(path)
        except CorruptCheckpoint as error:
            raise Collapsed(
                f"stopped at step {recorder.steps}: {alarm.message} It cannot be rolled back: {error}"
            ) from None
        # Read before the load, which sets the recorder back to what it knew at the checkpoint.
        rollbacks = recorder.rollbacks
        self.checkpoints.load(path)
        self._leave_behind(forget_rows=True)
        # The factor is absolute: the loaded state may be from before an earlier rollback and have another scale.
        to, factor = self.step_index, GENTLER ** (len(rollbacks) + 1)
        self.rate.scale_down(factor)
        recorder.rollbacks = [*rollbacks, {**vars(alarm), "to": to, "learning_rate_factor": factor}]
        self.checkpoints.pinned = to  # maybe the only one from before: the next rollback may need it
        if self.config.mode != "fixed_lag":  # lagged weights have loaded what is due themselves
            self.publisher.publish(self.train_step.weights(to))
        # After the publication: a searcher begins with the weights that it finds.
        if self.restart_searchers is not None:
            self.restart_searchers(self.replay.marks.by_source)
        logger.warning(
            "step %d: %s The run goes back to %s and on with %g of its learning rate (rollback %d of at most %d).",
            *(alarm.step, alarm.message, path, factor, len(recorder.rollbacks), MOST_ROLLBACKS),
        )

    def _leave_behind(self, *, forget_rows: bool) -> None:
        """Drop the stored groups that came after the checkpoint if they are given up, later checkpoints, then the lines of
        their steps: a process that is killed in between leaves a run that can go on from what is left. An evaluation that
        came after the checkpoint was saved may be the best one."""
        if forget_rows and self.durable is not None and self.last_row is not None:
            self.durable.return_to(self.last_row, self.replay.marks)
        self.checkpoints.drop_after(self.step_index)
        self.recorder.cut_files()
        self.checkpoints.recall_best({step: self.score(metrics) for step, metrics in self.recorder.late})
        self.recorder.best = self.checkpoints.best

    def _parts(self) -> dict[str, Stateful]:
        parts: dict[str, Stateful | None] = {"replay": self.replay, "rollouts": self.prompt_queue}
        parts |= {"learning_rate": self.rate, "beta": self.beta, "updates": self.updates}
        parts |= {"references": self.references, "health": self.health, "recorder": self.recorder}
        return {name: part for name, part in parts.items() if part is not None}

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """The evaluation of a step has come, after a resume maybe again: the weights of the best one so far are kept."""
        # A version above step_index was published by a trainer that died after its last checkpoint, or is given up.
        if step > self.step_index or any(evaluated == step and found for evaluated, found in self.recorder.evaluations):
            return
        self.recorder.evaluation(step, metrics)
        if metrics:
            with self.recorder.failures.tolerated("best checkpoint in", self.recorder.folder.checkpoints):
                self.checkpoints.keep_best(step, self.score(metrics))
            self.recorder.best = self.checkpoints.best

    def score(self, metrics: Mapping[str, float]) -> float:
        """How good an evaluation is, higher = better, by its `deciding_metric`. One that lacks it, because its rewards
        failed, is worse than any other."""
        evaluate, evaluations = self.config.evaluate, [found for _, found in self.recorder.evaluations if found]
        name = deciding_metric(evaluate.metric, evaluations[0] if evaluations else metrics, metrics)
        if name in metrics:
            return -metrics[name] if evaluate.lower_is_better else metrics[name]
        if not any(name in found for found in evaluations):
            raise ConfigError(f"evaluate.best_metric={name} is not measured here: there is {', '.join(metrics)}.")
        logger.warning("an evaluation has no %s, by which the best is kept: it is not the best.", name)
        return -math.inf

    def _record(
        self, batch: Batch, measured: Mapping[str, float], watched: Mapping[str, float], times: Mapping[str, float]
    ) -> None:
        """Record the step just done. `watched` is for the guard."""
        if self.fresh_rewards:
            self.fresh_reward, self.fresh_rewards = fmean(self.fresh_rewards), []
        metrics = {
            **{"batch/reward" if name == "reward" else name: value for name, value in measured.items()},
            **({} if math.isnan(self.fresh_reward) else {"reward": self.fresh_reward}),
            "entropy": watched["entropy"],
            **{f"time/{name}": seconds for name, seconds in times.items()},
            "empty_step": float(batch.totals.responses == 0),
            **{f"buffer/{name}": value for name, value in self.replay.stats().items()},
            "buffer/generated": float(self.counts.generated),
            "buffer/trained": float(self.counts.trained),
            "buffer/trained_again": float(self.counts.again),
            "buffer/replay_ratio": self.counts.ratio,
            "search/rollouts_in_flight": float(self.prompt_queue.outstanding),
        }
        if self.references is not None:
            metrics["reference_version"] = float(self.references.version)
        if self.health is not None:
            metrics |= self.health.step(self.step_index, watched)
        self.recorder.step(self.step_index, metrics)


class Interrupted(Exception):
    """Training was asked to end while it waited."""


@dataclass(frozen=True)
class Gate:
    """The trainer's two waits, in which it takes in groups: for a buffer that fills a batch (at the start, and after
    replay.max_lag has emptied it), and for new responses at the replay-ratio limit."""

    config: Config
    row: RoleCounters
    num_train_prompts: int  # a task may have fewer prompts than a step takes; they then repeat within a step
    asked_to_stop: Callable[[], bool]
    progress: Callable[[], float] = lambda: 0.0
    """A number that changes while searchers work: deadlines count only while it does not."""
    heartbeats: Callable[[], Mapping[str, float]] = dict  # for each searcher a number that changes while it lives

    def wait(self, trainer: Trainer) -> float:
        """Returns the seconds waited, without those in which groups were taken in: the trainer worked then."""
        started, received = time.perf_counter(), trainer.receive_seconds
        is_first = trainer.counts.trained == 0

        def is_ready() -> bool:
            # Receiving is also the trainer's heartbeat: the supervisor kills a trainer that does not look for groups
            # (run/supervise.py).
            trainer.receive()
            # Before the look at the buffer: responses that are too old must not fill a batch.
            trainer.expire()
            # After `receive`: groups that have arrived are taken in, whatever ends the wait.
            if self.asked_to_stop():
                raise Interrupted
            # For the display and `tba status`: how far a batch is filled.
            self.row["batch_prompts"] = min(trainer.replay.num_prompts, self._wanted_prompts)
            self.row["prompts_wanted"] = self._wanted_prompts
            return self.is_open(trainer)

        waited = wait_until(
            is_ready,
            name="replay_ratio" if self._full_batch(trainer) and not is_first else "first_fill",
            row=self.row,
            deadline_seconds=self.config.runtime.wait_seconds,
            waiter="the trainer",
            awaited=f"{self.config.search.count} searchers",
            explain=lambda: self._explain(trainer),
            progress=self.progress,
            heartbeats=self.heartbeats,
        )
        # All of it, and not `waited`: that leaves out the first look, which may have taken in most of the groups.
        return time.perf_counter() - started - (trainer.receive_seconds - received) if waited else 0.0

    @property
    def _wanted_prompts(self) -> int:
        return min(self.config.train.prompts_per_step, self.num_train_prompts)

    def is_open(self, trainer: Trainer) -> bool:
        return self._within_ratio(trainer) and self._full_batch(trainer)

    def _within_ratio(self, trainer: Trainer) -> bool:
        train, reuse = self.config.train, self.config.replay.max_replay_ratio
        assert reuse is not None, "filled in by tba.run.resolve"
        # All updates of the next batch count at once: they follow without another look.
        wanted = trainer.counts.trained + train.responses_per_step * train.updates_per_batch
        return wanted <= reuse * trainer.counts.generated

    def _full_batch(self, trainer: Trainer) -> bool:
        return trainer.replay.can_fill(
            self.config.train.prompts_per_step, prompts_of_task=self.num_train_prompts, lost=trainer.lost
        )

    def _explain(self, trainer: Trainer) -> str:
        lacking = []
        if not self._full_batch(trainer):
            lacking.append(f"{self._wanted_prompts} prompts and has {trainer.replay.num_prompts}")
        if not self._within_ratio(trainer):
            lacking.append(
                f"new responses, having trained {trainer.counts.trained} of {trainer.counts.generated} generated "
                f"(replay.max_replay_ratio={self.config.replay.max_replay_ratio:g})"
            )
        # Rewards of a user's may be the reason.
        names = ", ".join(repr(reward.label) for reward in self.config.task.rewards)
        seconds = self.config.search.reward_timeout_seconds
        call = f" (a call of {names} may take search.reward_timeout_seconds={seconds:g})" if names else ""
        return (
            f"the trainer waited for {' and for '.join(lacking)} from {self.config.search.count} searchers; look at "
            f"logs/searcher-*.log, or raise the deadline for large models and slow rewards{call}"
        )
