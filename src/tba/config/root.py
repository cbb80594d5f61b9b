"""The whole config of a run: all sections, what follows from several of them, and checks across them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from tba.config.sections import (
    EvaluateConfig,
    GenerateConfig,
    ModelConfig,
    ObjectiveConfig,
    ObserveConfig,
    ReferenceConfig,
    ReplayConfig,
    RuntimeConfig,
    SearchConfig,
    Section,
    TrainConfig,
)
from tba.config.task import TaskConfig


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
        if name is not None and (not name.strip(". ") or re.search(r"[/\\\x00-\x1f]", name)):
            raise ValueError(
                f"{name!r} cannot name a run folder: write letters, digits, - and _, without / or \\ and not `..`. The "
                "folder that it lies in is output=..."
            )
        # File systems allow 255 bytes, and some files are named by the run and more.
        if name is not None and (size := len(name.encode(errors="replace"))) > 200:
            raise ValueError(f"{name[:20]!r}... has {size} bytes, and 200 are allowed: give a shorter one.")
        return name

    @field_validator("output")
    @classmethod
    def _check_output(cls, output: Path) -> Path:
        # Path has made one slash of two: s3://bucket reads s3:/bucket here.
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
        """Number of the responses of a rollout that the reference generates."""
        return round(self.search.explore.reference_share * self.samples_generated_per_prompt)

    @property
    def fresh_steps(self) -> int:
        """Number of optimizer steps for which a group is fresh: twice the publication interval; 1 where the roles take
        turns, because only what was generated for the step is fresh there."""
        return 1 if self.is_synchronous else 2 * self.train.publish_every

    @property
    def uses_per_group(self) -> int | None:
        """Number of batches that a group is trained in, where groups wait in a queue and are trained in the order of their
        arrival: replay.max_replay_ratio / train.updates_per_batch. None = there is no queue: the roles take turns,
        older responses are drawn too, or it is no whole number."""
        replay, updates = self.replay, self.train.updates_per_batch
        # The ratio counts trainings of a response, and each batch is trained `updates` times.
        uses = (replay.max_replay_ratio or updates) / updates
        # Drawn by age alone, some groups are trained twice and others never wherever one role stalls for a while.
        is_queue = not self.is_synchronous and not replay.imports and replay.on_policy_probability in (None, 1.0)
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
        # In a queue searchers bound the age before they generate: nothing generated is thrown away.
        return self.replay.max_lag is not None and self.mode != "fixed_lag" and not self.keeps_pace

    @property
    def lag_steps(self) -> int:
        """Number of optimizer steps between the weights that generate and those that train, in mode=fixed_lag."""
        return self.replay.max_lag or 1

    @property
    def spare_lag(self) -> int:
        """Optimizer steps by which searchers may be ahead, beside those that pass while a rollout is made: the one that
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
        # Two steps' worth: without a bound of age a fast searcher would fill the queue with ever older groups.
        return 2 * self.train.prompts_per_step

    @property
    def is_synchronous(self) -> bool:
        """Whether searcher and trainer take turns in one process."""
        return self.mode != "async"

    def progress_at(self, step: int, seconds: float = 0.0) -> float:
        """Share of the run that is done after so many optimizer steps and seconds of training, 0 to 1: of train.max_steps
        or of train.max_seconds, whichever is nearer to its end."""
        # The one nearer to its end counts; without any limit progress stays 0.
        limits = ((step, self.train.max_steps), (seconds, self.train.max_seconds))
        return min(1.0, max((used / limit for used, limit in limits if limit is not None), default=0.0))

    def evaluation_due(self, step: int, *, progress: float, before: float) -> bool:
        """Whether the weights of this step are to be evaluated; `progress` is that of the run after it, and `before` after
        the step before."""
        every, max_steps = self.evaluate.every, self.train.max_steps
        if progress >= 1.0:
            return True
        if every is None and (self.train.max_seconds is not None or max_steps is None):
            # After the step that passes a tenth of the run: the number of steps is not known.
            return int(10 * progress) > int(10 * before)
        every = max(1, (max_steps or 0) // 10) if every is None else every
        return every > 0 and step % every == 0

    def beta_at(self, step: int, progress: float) -> float:
        assert self.objective.beta is not None, "filled in by tba.run.resolve"
        # Pure functions of the step: a resumed run computes the same values without stored state.
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
        # The first error alone: one wrong setting may break several rules.
        for message in chain(self._roles(), self._numbers(), self._contradictions()):
            raise ValueError(message)
        return self

    def _roles(self) -> Iterator[str]:
        """Errors of how searcher and trainer run, and of their devices."""
        turns, mode, search, count, ranks = (
            self.is_synchronous,
            self.mode,
            self.search,
            self.search.count,
            self.train.ranks,
        )
        every, updates = self.train.publish_every, self.train.updates_per_batch
        if turns and every != 1:
            yield f"train.publish_every={every} makes no sense in {mode} mode, which gives the lag: leave it at 1."
        if turns and count != 1:
            yield f"search.num_searchers={count} needs mode=async: in {mode} mode one takes turns with the trainer."
        if turns and ranks != 1:
            yield (
                f"train.ranks={ranks} needs mode=async: in {mode} mode one process generates and trains. For responses of "
                "the newest weights only, use mode=async with replay.max_lag=0."
            )
        reuse = self.replay.max_replay_ratio or 0
        if turns and reuse not in (0, updates):
            yield (
                f"replay.max_replay_ratio={reuse:g} cannot be kept in {mode} mode, where a response is trained "
                f"train.updates_per_batch={updates} times: leave it unset, or change that."
            )
        if mode == "fixed_lag" and self.replay.max_lag == 0:
            yield "replay.max_lag=0 is no lag for mode=fixed_lag: use mode=sync."
        share = search.explore.reference_share
        if mode == "fixed_lag" and share > 0:
            yield f"search.explore.reference_share={share:g} contradicts mode=fixed_lag: use mode=async."
        # A second copy is worth something on another node only. Without an address Ray starts on this machine: one node.
        on_cluster = self.runtime.kind == "ray" and self.runtime.address is not None
        if self.replay.durability == "node" and (turns or not on_cluster):
            yield (
                "replay.durability=node keeps a second copy on another node, and this run has only one: use power, or "
                "mode=async with runtime.kind=ray and the runtime.address of a cluster."
            )
        own, devices = self.model.device, dict.fromkeys((self.model.device, *search.devices))
        if self.runtime.kind == "ray" and search.devices:
            yield "search.devices cannot be used with runtime.kind=ray, which places roles: leave it out, or use local."
        if ranks > 1 and own not in ("auto", "cpu", "cuda", "cuda:0"):
            yield f"model.device={own} is one device and train.ranks={ranks} want one each: use model.device=cuda."
        if turns and len(devices) > 1:
            yield (
                f"search.devices and model.device give {', '.join(devices)} to a run in {mode} mode, which is one process: "
                "leave search.devices out, or use mode=async."
            )

    def _numbers(self) -> Iterator[str]:
        """Numbers that leave no room for one another."""
        capacity, of_prompt, rollout = (
            self.replay.capacity,
            self.replay.capacity_per_prompt,
            self.samples_generated_per_prompt,
        )
        if capacity < (step := self.train.responses_per_step):
            yield f"replay.capacity={capacity} cannot hold one step's {step} responses: raise it."
        if of_prompt is not None and of_prompt < rollout:
            yield f"replay.capacity_per_prompt={of_prompt} cannot hold one rollout's {rollout} responses: raise it."
        least, most = self.generate.min_new_tokens, self.generate.max_new_tokens
        if least > most:
            yield f"generate.min_new_tokens={least} is above generate.max_new_tokens={most}: make it smaller."
        # The newest published weights are up to publish_every - 1 steps old.
        lag, every = self.replay.max_lag, self.train.publish_every
        if lag is not None and lag < every - 1:
            yield (
                f"replay.max_lag={lag} cannot be kept with weights every train.publish_every={every} steps: allow at least "
                f"{every - 1}."
            )
        share, count = self.search.explore.reference_share, self.reference_samples_per_prompt
        if share > 0 and not 0 < count < rollout:
            message = f"search.explore.reference_share={share:g} of the {rollout} responses of a rollout is {count}"
            yield f"{message}: leave both some."

    def _contradictions(self) -> Iterator[str]:
        """Settings of which one asks for what the other takes away."""
        train, task, best = self.train, self.task, self.evaluate.best_metric
        if self.observe.on_collapse == "rollback" and train.keep_checkpoints == 0:
            missing = "train.keep_checkpoints=0 keeps none: raise it or use stop."
            yield f"observe.on_collapse=rollback needs checkpoints, and {missing}"
        if (after := train.second_update_after) and train.updates_per_batch > 1:
            yield (
                f"train.second_update_after={after} contradicts train.updates_per_batch={train.updates_per_batch}: both "
                "train a batch again. Choose one of them."
            )
        if self.model.lora is not None and (every := self.reference.reset_every):
            yield (
                f"reference.reset_every={every} cannot be used with model.lora, whose reference is the base model: set it "
                "to 0."
            )
        if best is not None and task.name == "custom" and task.eval_data is None and task.eval_fraction == 0.0:
            yield (
                f"evaluate.best_metric={best} needs evaluations, and task.eval_fraction=0 holds no prompt out: raise it, or "
                "give task.eval_data."
            )
        has_environment = task.environment.is_there
        if has_environment and self.objective.name == "vineppo":
            yield (
                "objective.name=vineppo continues responses from their middle, where an environment cannot be set back to: "
                "use subtb, which gives credit for turns, or another objective."
            )
        if has_environment and self.search.explore.reference_share > 0.0:
            yield (
                "search.explore.reference_share is for responses of one turn, and task.environment gives several: set 0."
            )
