"""What a step does with batches: an update on the new one, and one more on that of some steps ago.

A response has more to give than one update takes from it, and trajectory balance may take it later: with
train.second_update_after=n, a batch is trained a second time n steps after its first. Not at once, where the second update
follows the noise of the first (docs/log.md); and before the next batch is waited for, in time that the trainer often has to
spare, or generated, where the roles take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tba.config import Config
from tba.train.batch import shape_target
from tba.train.optimizer import LearningRate
from tba.train.reference import Beta
from tba.train.step import NonFiniteLoss, StepResult, TrainStep
from tba.types import TOKEN_FIELDS, Batch


@dataclass
class Updates:
    """Trains on batches, at the rate and with the beta of a step."""

    config: Config
    train_step: TrainStep
    rate: LearningRate
    beta: Beta
    folder: Path
    """Where a batch is saved that cannot be trained on."""
    trained_once: deque[Batch] = field(init=False)
    """The last batches, the oldest first, at most as many as there are steps between the two updates."""

    def __post_init__(self) -> None:
        self.trained_once = deque(maxlen=self.config.train.second_update_after or 0)

    def first(self, batch: Batch, *, step: int, progress: float) -> StepResult:
        """The update of this step, on a new batch. `progress` is the share of the run that is done before it."""
        measures = self.rate.measures(step, progress)
        result = self._update(batch, f"step {step}", step=step, progress=progress, measure_movement=measures)
        if self.config.train.second_update_after and batch.totals.responses:
            self.trained_once.append(with_old_values(batch, result))
        return result

    def second(self, *, step: int, progress: float) -> int:
        """The second update on the batch whose turn it is; returns the number of its responses, 0 where there is none."""
        after = self.config.train.second_update_after
        if not after or len(self.trained_once) < after:
            return 0
        batch = self.trained_once.popleft()
        name = f"the second update before step {step}"
        self._update(batch, name, step=step, progress=progress, measure_movement=False)
        return batch.totals.responses

    def forget(self) -> None:
        """No second update on what has been trained so far: it was scored by a reference that is none any more, or is of a
        policy that was given up."""
        self.trained_once.clear()

    def state(self) -> dict[str, Any]:
        return {"trained_once": list(self.trained_once)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Of a run that was at its end, or had another setting, the newest that it would hold now."""
        self.trained_once.clear()
        self.trained_once.extend(state["trained_once"])

    def _update(self, batch: Batch, name: str, *, step: int, progress: float, measure_movement: bool) -> StepResult:
        shaped, beta = shape_target(batch, self.config, step, progress, beta=self.beta.at(step, progress))
        rate = self.rate.at(step, progress)
        try:
            return self.train_step(shaped, beta=beta, learning_rate=rate, measure_movement=measure_movement)
        except NonFiniteLoss as error:
            path = save_batch(batch, self.folder / f"failed-batch-step-{step}.safetensors")
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


def save_batch(batch: Batch, path: Path) -> Path:
    """A batch as safetensors, for looking at what went wrong."""
    tensors = {
        name: getattr(batch, name).cpu().contiguous() for name in (*TOKEN_FIELDS, "reward_PK", "rows_PK", "offsets")
    }
    tensors |= {f"rewards.{name}": value.cpu().contiguous() for name, value in batch.rewards.items()}
    save_file(tensors, path)
    return path
