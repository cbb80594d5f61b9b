"""The whole config of a run: all sections, what follows from several of them, and checks across them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from tba.config.base import Section
from tba.config.runtime import RuntimeConfig
from tba.config.search import SearchConfig
from tba.config.sections import (
    EvaluateConfig,
    GenerateConfig,
    ModelConfig,
    ObjectiveConfig,
    ObserveConfig,
    ReferenceConfig,
    ReplayConfig,
    TrainConfig,
)
from tba.config.task import TaskConfig

LONGEST_NAME = 200
"""Bytes of the longest name of a run: file systems allow 255, and some folders are named by it and more."""


class Config(Section):
    """The whole config of a run. `tba train CONFIG.yaml key.sub=value ... --dry-run` prints it resolved."""

    name: str | None = None
    """Name of the run folder; None = it is made of task (custom: data and rewards), objective and seed, and `tba train`
    adds a number where a run has that name."""
    output: Path = Path("runs")
    """Folder that run folders are made in."""
    overwrite: bool = False
    """Whether a run folder of the same name is replaced, unless it holds anything that no run wrote; False = it is an
    error."""
    seed: int = Field(default=0, ge=0, le=2**62)
    """Seed of prompt order, sampling and replay."""
    mode: Literal["async", "sync", "fixed_lag"] = "async"
    """How searchers and trainer run: async = in processes of their own, without a barrier; sync = by turns in one
    process, lag 0; fixed_lag = by turns, the searcher with weights exactly replay.max_lag steps old (for studies)."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    generate: GenerateConfig = GenerateConfig()
    search: SearchConfig = SearchConfig()
    replay: ReplayConfig = ReplayConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    reference: ReferenceConfig = ReferenceConfig()
    train: TrainConfig = TrainConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    observe: ObserveConfig = ObserveConfig()

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        if name is not None and len(name.encode(errors="replace")) > LONGEST_NAME:
            raise ValueError(
                f"{name[:20]!r}... has {len(name.encode(errors='replace'))} bytes: give at most {LONGEST_NAME}."
            )
        if name is not None and (not name.strip(". ") or re.search(r"[/\\\x00-\x1f]", name)):
            raise ValueError(
                f"{name!r} cannot name a run folder: write letters, digits, - and _, without / or \\ and not `..`. The "
                "folder that it lies in is output=..."
            )
        return name

    @field_validator("output")
    @classmethod
    def _check_output(cls, output: Path) -> Path:
        if re.match(r"[a-z][a-z0-9+.-]+:/", str(output)):
            raise ValueError(
                f"{str(output)!r} is an address, and runs are written to a folder of this machine: give one."
            )
        if any(part.startswith("$") for part in output.parts):
            raise ValueError(f"{str(output)!r} has a variable, which only a shell fills in: write the folder itself.")
        try:
            return output.expanduser()
        except RuntimeError:
            raise ValueError(f"{str(output)!r}: there is no such user. Write the folder in full.") from None

    @property
    def run_name(self) -> str:
        return self.name or f"{self.task.folder_label}-{self.objective.name}-seed{self.seed}"

    @property
    def run_folder(self) -> Path:
        return self.output / self.run_name

    def searcher_device(self, index: int) -> str:
        """Device of searcher `index`: that of its place in search.devices, or model.device."""
        devices = self.search.devices
        return devices[index % len(devices)] if devices else self.model.device

    def for_searcher(self, index: int) -> Config:
        """The config that searcher `index` is made from: the run's, with the device of this searcher."""
        model = self.model.model_copy(update={"device": self.searcher_device(index)})
        return self.model_copy(update={"model": model})

    @property
    def samples_generated_per_prompt(self) -> int:
        """S = ceil(search.samples_multiplier * train.samples_per_prompt)."""
        return math.ceil(self.search.samples_multiplier * self.train.samples_per_prompt)

    @property
    def reference_samples_per_prompt(self) -> int:
        """Number of the responses of a visit that the reference generates."""
        return round(self.search.explore.reference_share * self.samples_generated_per_prompt)

    @property
    def fresh_steps(self) -> int:
        """Number of optimizer steps for which a group is fresh: twice the publication interval; 1 where the roles take
        turns, because only what was generated for the step is fresh there."""
        return 1 if self.takes_turns else 2 * self.train.publish_every

    @property
    def uses_per_group(self) -> int | None:
        """Number of batches that a group is trained in, where groups wait in a queue and are trained in the order of their
        arrival: replay.max_trained_per_generated / train.updates_per_batch. None = there is no queue: the roles take turns,
        older responses are drawn too, or it is no whole number."""
        replay, updates = self.replay, self.train.updates_per_batch
        uses = (replay.max_trained_per_generated or updates) / updates
        # Drawn by age alone, some groups are trained twice and others never wherever one role stalls for a while.
        is_queue = not self.takes_turns and not replay.imports and replay.on_policy_probability in (None, 1.0)
        return int(uses) if is_queue and uses.is_integer() else None

    @property
    def keeps_pace(self) -> bool:
        """Whether searchers wait where what they begin now would be older than replay.max_lag when it is trained. What a
        reset of the reference drops would be missing in the pace."""
        drops = bool(self.reference.reset_every) and self.replay.on_reference_reset == "drop"
        return self.uses_per_group is not None and not drops

    @property
    def expires(self) -> bool:
        """Whether responses beyond replay.max_lag leave the buffer."""
        return self.replay.max_lag is not None and self.mode != "fixed_lag" and not self.keeps_pace

    @property
    def lag_steps(self) -> int:
        """Number of optimizer steps between the weights that generate and those that train, in mode=fixed_lag."""
        return self.replay.max_lag or 1

    @property
    def spare_lag(self) -> int:
        """Optimizer steps by which searchers may be ahead, beside those that pass while a visit is made: the one that
        is trained meanwhile, and those between two publications."""
        return self.train.publish_every

    @property
    def steps_per_batch(self) -> int:
        """Number of optimizer steps that train on the groups of one batch."""
        return self.train.updates_per_batch * (self.uses_per_group or 1)

    @property
    def max_waiting_groups(self) -> int | None:
        """Number of groups that may wait in the queue, of which the oldest leave untrained beyond it; None = as many as
        come, where their age is bounded otherwise."""
        if self.keeps_pace or self.expires:
            return None
        return 2 * self.train.prompts_per_step

    @property
    def takes_turns(self) -> bool:
        """Whether searcher and trainer take turns in one process."""
        return self.mode != "async"

    def progress_at(self, step: int, seconds: float = 0.0) -> float:
        """Share of the run that is done after so many optimizer steps and seconds of training, 0 to 1: of train.max_steps
        or of train.max_seconds, whichever is nearer to its end."""
        limits = ((step, self.train.max_steps), (seconds, self.train.max_seconds))
        return min(1.0, max((used / limit for used, limit in limits if limit is not None), default=0.0))

    def evaluation_due(self, step: int, *, progress: float, before: float) -> bool:
        """Whether the weights of this step are to be evaluated; `progress` is that of the run after it, and `before` after
        the step before."""
        every, max_steps = self.evaluate.every, self.train.max_steps
        if progress >= 1.0:
            return True
        if every is None and (self.train.max_seconds is not None or max_steps is None):
            return int(10 * progress) > int(10 * before)
        every = max(1, (max_steps or 0) // 10) if every is None else every
        return every > 0 and step % every == 0

    def beta_at(self, step: int, progress: float) -> float:
        assert self.objective.beta is not None, "filled in by tba.launch.resolve"
        return self.objective.beta.at(step, progress=progress)

    def target_temperature_at(self, step: int, progress: float) -> float:
        temperature = self.objective.target_temperature
        return 1.0 if temperature is None else temperature.at(step, progress=progress)

    def has_plain_target_at(self, step: int, progress: float) -> bool:
        """Whether the target is pi_ref exp(r / beta) itself."""
        return self.target_temperature_at(step, progress) == 1.0

    def learning_rate_at(self, step: int, progress: float) -> float:
        """Learning rate of a schedule that was given; that of train.learning_rate=auto is the trainer's state."""
        assert self.train.learning_rate is not None
        return self.train.learning_rate.at(step, progress=progress)

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.takes_turns and self.train.publish_every != 1:
            raise ValueError(
                f"train.publish_every={self.train.publish_every} makes no sense in {self.mode} mode, where the lag of every "
                "step is given: leave it at 1."
            )
        if self.takes_turns and self.search.count != 1:
            raise ValueError(
                f"search.num_searchers={self.search.count} needs mode=async: in {self.mode} mode one searcher and "
                "the trainer take turns."
            )
        if self.takes_turns and self.train.ranks != 1:
            raise ValueError(
                f"train.ranks={self.train.ranks} needs mode=async: in {self.mode} mode one process generates and trains. "
                "For responses of the newest weights only, use mode=async with replay.max_lag=0."
            )
        if self.observe.on_collapse == "rollback" and self.train.keep_checkpoints == 0:
            raise ValueError(
                "observe.on_collapse=rollback goes back to a checkpoint, and train.keep_checkpoints=0 writes none: keep at "
                "least one, or use observe.on_collapse=stop."
            )
        if self.train.second_update_after and self.train.updates_per_batch > 1:
            raise ValueError(
                f"train.second_update_after={self.train.second_update_after} contradicts "
                f"train.updates_per_batch={self.train.updates_per_batch}: both train a batch again. Choose one of them."
            )
        self._check_placement()
        self._check_turns()
        self._check_reference_share()
        self._check_durability()
        if self.replay.max_lag is not None and self.replay.max_lag < self.train.publish_every - 1:
            raise ValueError(
                f"replay.max_lag={self.replay.max_lag} cannot be kept with weights every "
                f"train.publish_every={self.train.publish_every} steps: allow at least {self.train.publish_every - 1}."
            )
        self._check_lora()
        if self.train.prompts_per_step * self.train.samples_per_prompt > self.replay.capacity:
            raise ValueError(
                f"replay.capacity={self.replay.capacity} cannot hold one step of "
                f"train.responses_per_step={self.train.responses_per_step}: raise it."
            )
        room = self.replay.capacity_per_prompt
        if room is not None and room < self.samples_generated_per_prompt:
            raise ValueError(
                f"replay.capacity_per_prompt={room} cannot hold one visit's "
                f"{self.samples_generated_per_prompt} responses: raise it."
            )
        if self.generate.min_new_tokens > self.generate.max_new_tokens:
            raise ValueError(
                f"generate.min_new_tokens={self.generate.min_new_tokens} is above "
                f"generate.max_new_tokens={self.generate.max_new_tokens}: no response could end."
            )
        task, best = self.task, self.evaluate.best_metric
        if best is not None and task.name == "custom" and task.eval_data is None and task.eval_fraction == 0.0:
            raise ValueError(
                f"evaluate.best_metric={best} needs evaluations, and task.eval_fraction=0 holds no prompt out for them: "
                "raise it, give task.eval_data, or leave evaluate.best_metric out."
            )
        return self

    def _check_placement(self) -> None:
        """Refuse devices where roles are placed by others, or are one process."""
        devices = dict.fromkeys((self.model.device, *self.search.devices))
        if self.runtime.kind == "ray" and self.search.devices:
            raise ValueError(
                "search.devices cannot be used with runtime.kind=ray: Ray places roles, each on a GPU where there are some. "
                "Leave it out, or use runtime.kind=local."
            )
        if self.train.ranks > 1 and self.model.device not in ("auto", "cpu", "cuda", "cuda:0"):
            raise ValueError(
                f"model.device={self.model.device} is one device and train.ranks={self.train.ranks} want one each: use "
                "model.device=cuda, for the first of those that CUDA_VISIBLE_DEVICES names."
            )
        if self.takes_turns and len(devices) > 1:
            raise ValueError(
                f"search.devices and model.device give {', '.join(devices)} to a run in {self.mode} mode, where trainer and "
                "searcher are one process on one device: leave search.devices out, or use mode=async."
            )

    def _check_lora(self) -> None:
        """Refuse a reference that an adapter cannot have."""
        if self.model.lora is not None and self.reference.reset_every:
            raise ValueError(
                f"reference.reset_every={self.reference.reset_every} cannot be used with model.lora, whose reference is the "
                "base model: set it to 0."
            )

    def _check_reference_share(self) -> None:
        samples, count = self.samples_generated_per_prompt, self.reference_samples_per_prompt
        share = self.search.explore.reference_share
        if share > 0 and not 0 < count < samples:
            raise ValueError(
                f"search.explore.reference_share={share:g} of the {samples} responses of a visit is {count}: choose it so "
                "that both the reference and the policy generate some."
            )
        if share > 0 and self.mode == "fixed_lag":
            raise ValueError(
                f"search.explore.reference_share={share:g} contradicts mode=fixed_lag: the reference's responses are as "
                "old as it is. Use mode=async."
            )

    def _check_turns(self) -> None:
        """Refuse what cannot be kept where searcher and trainer take turns."""
        if not self.takes_turns:
            return
        reuse, updates = self.replay.max_trained_per_generated, self.train.updates_per_batch
        if reuse not in (None, updates):
            raise ValueError(
                f"replay.max_trained_per_generated={reuse:g} cannot be kept in {self.mode} mode, where every step trains on "
                f"what was generated for it, train.updates_per_batch={updates} times: leave it unset, or change "
                "train.updates_per_batch."
            )
        if self.mode == "fixed_lag" and self.replay.max_lag == 0:
            raise ValueError("replay.max_lag=0 is no lag for mode=fixed_lag: use mode=sync.")

    def _check_durability(self) -> None:
        """Refuse a second node where there is one only."""
        if self.replay.durability != "node":
            return
        if self.runtime.kind != "ray" or self.runtime.address is None or self.takes_turns:
            where = f"runtime.kind={self.runtime.kind}"
            if self.takes_turns:
                where = f"mode={self.mode}, where one process does everything,"
            elif self.runtime.kind == "ray":
                where = "runtime.kind=ray without runtime.address, a private cluster of this machine,"
            raise ValueError(
                f"replay.durability=node keeps a second copy of every group on another node, and {where} has only one: use "
                "replay.durability=power, or run in mode=async with runtime.kind=ray and the runtime.address of a cluster."
            )
