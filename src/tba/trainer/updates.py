"""The updates of a step: one on the new batch, and one more on the batch of some steps ago.

A batch holds more signal than one update uses. With train.second_update_after=n, it is trained a second time n steps after
its first; an immediate second update would follow the noise of the first (notes/). Where the roles take turns, that comes
before the next batch is generated, in an asynchronous run only where the trainer has to wait (trainer/loop.py)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tba.config import Config
from tba.observe.recorder import TrainingClock
from tba.trainer.batch import drift_metrics, entropy_of, hold_out, reward_spread, shape_target
from tba.trainer.learning_rate import MOST_DRIFT, LearningRate
from tba.trainer.reference import Beta
from tba.trainer.step import NonFiniteLoss, StepResult, TrainStep
from tba.types import TOKEN_FIELDS, Batch

RECENT, LATE = 8, 0.1  # batches that are looked at, and the share of an update's seconds that makes one late


@dataclass
class SpareTime:
    """Whether an asynchronous trainer has time for second updates: one of the last batches was late. A trainer whose batches
    are all there in time is the bottleneck, and a second update would cost it a new batch."""

    late: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))
    step_seconds: float = 0.0  # of the last update on a new batch

    @property
    def is_enough(self) -> bool:
        return any(self.late)

    def add(self, seconds: float) -> None:
        """Seconds waited before a step, with those of a second update that was made while no batch was there."""
        self.late.append(seconds > LATE * self.step_seconds)


@dataclass
class Updates:
    """Trains on batches, at the rate and with the beta of a step."""

    config: Config
    train_step: TrainStep
    rate: LearningRate
    beta: Beta
    folder: Path  # where a batch is saved that cannot be trained on
    clock: TrainingClock | None = None  # tells how many steps a run of limited time will have
    trained_once: deque[Batch] = field(init=False)
    """The last batches, the oldest first, at most as many as there are steps between the two updates."""
    reward_unit: float = field(init=False)  # divisor of rewards (objective.reward_unit)

    def __post_init__(self) -> None:
        self.trained_once = deque(maxlen=self.config.train.second_update_after or 0)
        given = self.config.objective.reward_unit
        self.reward_unit = given if isinstance(given, float) else 1.0
        self._spread = 0.0  # largest spread of rewards within prompts so far

    def first(self, batch: Batch, *, step: int, progress: float) -> StepResult:
        """The update of this step, on a new batch. `progress` is the share of the run that is done before it."""
        if self.config.objective.reward_unit == "spread":
            # The unit only grows: a policy that has learned its prompts gives them rewards that hardly differ. Rewards of 0
            # and 1 in equal parts have a spread of .5, and so a unit of 1.
            self._spread = max(self._spread, reward_spread(batch))
            self.reward_unit = 2.0 * self._spread or 1.0
        with self._naming(batch, f"step {step}", step):
            # No weight has moved yet: the first update of `auto` is scaled by responses that it does not train on.
            begins = self.rate.is_auto and self.rate.squares == 0.0
            trained, unseen = hold_out(batch) if begins else (batch, None)
            result = self._gradients(trained, step=step, progress=progress)
            exact, own = self.train_step.is_exact, self._in_own_unit(trained)
            found = drift_metrics(own, result.outputs.log_pi_N.cpu(), step=step, exact=exact)
            now = progress if self.clock is None else self.config.progress_at(step, self.clock.seconds)
            rate = self.rate.for_batch(step, progress, found, entropy=entropy_of(trained, result.outputs), now=now)
            metrics = self._move(trained, rate, progress=progress, lags="off_policy/drift" in found, unseen=unseen)
        # A batch that has moved nothing is left out: its second update would be its first.
        if self.config.train.second_update_after and batch.totals.responses and metrics["learning_rate"] > 0.0:
            self.trained_once.append(with_old_values(batch, result))
        signal = {"off_policy/signal": self.rate.signal} if self.rate.is_auto else {}
        return replace(result, metrics={**result.metrics, **found, **metrics, **signal})

    def second(self, *, step: int, progress: float) -> int:
        """The second update on the batch whose turn it is; returns the number of its responses, 0 where there is none."""
        after = self.config.train.second_update_after
        if not after or len(self.trained_once) < after:
            return 0
        # Taken out also where it is refused below: it would only be later the next time.
        batch = self.trained_once.popleft()
        if after * self.rate.next_drift(step, progress) > MOST_DRIFT:  # the policy has moved on too far
            return 0
        with self._naming(batch, f"the second update before step {step}", step):
            self._gradients(batch, step=step, progress=progress)
            found = self.train_step.move(self.rate.at(step, progress))
        if self._has_signal(batch, progress):
            self.rate.made(found["learning_rate"], of_new_batch=False)
        return batch.totals.responses

    def forget(self) -> None:
        """No second update on what has been trained so far: it was scored by a reference that is none any more."""
        self.trained_once.clear()

    def state(self) -> dict[str, Any]:
        return {"trained_once": list(self.trained_once), "reward_unit": self.reward_unit, "spread": self._spread}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Of a run that was at its end, or had another setting, the newest that it would hold now."""
        self.trained_once.clear()
        self.trained_once.extend(state["trained_once"])
        self.reward_unit, self._spread = state["reward_unit"], state["spread"]

    def _in_own_unit(self, batch: Batch) -> Batch:
        return replace(batch, reward_PK=batch.reward_PK / self.reward_unit)

    def _gradients(self, batch: Batch, *, step: int, progress: float) -> StepResult:
        batch = replace(self._in_own_unit(batch), usual_drift=self.rate.drift(progress))
        shaped, beta = shape_target(batch, self.config, step, progress, beta=self.beta.at(step, progress))
        return self.train_step.gradients(shaped, beta=beta)

    def _move(
        self, batch: Batch, rate: float, *, progress: float, lags: bool, unseen: Sequence[int] | None
    ) -> dict[str, float]:
        """The update of a new batch, and what it takes to know the next rate where no response lags behind. A batch without
        weight makes none. `unseen` are the responses that the first update of `auto` is measured by."""
        first = unseen is not None and math.isfinite(self.rate.entropy) and self._has_signal(batch, progress)
        if unseen is not None and not first:
            rate = 0.0
        measured = self.rate.is_auto and not lags and self.config.is_synchronous
        nats = self.rate.size if first else None
        found = self.train_step.move(rate, nats=nats, of=unseen or (), measure=measured)
        if first:
            self.rate.rate = found["learning_rate"]
        # Also where nothing has moved: every version has its entry, by which lags are looked up.
        counts = batch.totals.responses and self._has_signal(batch, progress)
        self.rate.made(found["learning_rate"] if counts else 0.0, of_new_batch=True)
        self.rate.moved(progress, new=found.pop("update_drift", None), own=found.pop("own_movement", None))
        return found

    def _has_signal(self, batch: Batch, progress: float) -> bool:
        """Whether an update on the batch moves the policy as others do. Groups of equal rewards have hardly a gradient where
        responses are compared with their group's mean. The first update would be rounding noise, of which Adam makes a whole
        step. Later ones move nothing, and a rate that makes up for that would destroy the policy at the next reward."""
        compares = self.train_step.objective.needs.group and self.config.has_plain_target_at(0, progress)
        return not compares or reward_spread(batch) > 0.0

    @contextmanager
    def _naming(self, batch: Batch, name: str, step: int) -> Iterator[None]:
        """Say which update was refused, and keep its batch."""
        before = self.train_step.moved
        try:
            yield
        except NonFiniteLoss as error:
            self.train_step.moved = before  # a step may have moved by its first update when its second is refused
            path = self.folder / f"failed-batch-step-{step}.safetensors"
            names = (*TOKEN_FIELDS, "reward_PK", "rows_PK", "offsets")
            tensors = {name: getattr(batch, name).cpu().contiguous() for name in names}
            tensors |= {f"rewards.{name}": value.cpu().contiguous() for name, value in batch.rewards.items()}
            save_file(tensors, path)
            raise NonFiniteLoss(
                f"{name} stopped before the optimizer moved: {error} The batch is saved in {path}. "
                "Lower train.learning_rate, raise objective.beta, or look for extreme rewards in it."
            ) from None


def with_old_values(batch: Batch, result: StepResult) -> Batch:
    """The batch with the critic's values of its first update, for further updates on it."""
    values_N = result.outputs.values_N
    if values_N is None or batch.old_values_N is not None:
        return batch
    return replace(batch, old_values_N=values_N.cpu())
