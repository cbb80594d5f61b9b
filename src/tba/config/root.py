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
    process, lag 0; fixed_lag = by turns, the searcher with weights exactly lag_steps old (for studies of staleness)."""
    lag_steps: int = Field(default=1, ge=1)
    """Number of optimizer steps between the weights that generate and those that train, in mode=fixed_lag."""
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

    @property
    def trainer_devices(self) -> tuple[str, ...]:
        """Devices of the trainer, one per rank."""
        placement = self.runtime.placement
        return placement.trainer if placement is not None and placement.trainer else (self.model.device,)

    @property
    def trainer_model(self) -> ModelConfig:
        """The model as the trainer loads it."""
        return self.model.model_copy(update={"device": self.trainer_devices[0]})

    def searcher_device(self, index: int) -> str:
        """Device of searcher `index`: that of its place in runtime.placement, or model.device."""
        placement = self.runtime.placement
        if placement is not None and placement.searchers:
            return placement.searchers[index % len(placement.searchers)]
        return self.model.device

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
    def max_lag(self) -> int:
        """Largest lag: replay.max_lag; unset it is 8, or with replay.lag=pace 1 + spare_lag + the optimizer steps that all
        KV slots, and search.reward_workers beyond one, hold the responses of: fewer would leave them empty."""
        if self.replay.max_lag is not None:
            return self.replay.max_lag
        if self.replay.lag != "pace":
            return 8
        slots = self.search.count * (self.generate.slots or 0)
        judged = self.search.count * ((self.search.reward_workers or 1) - 1) * self.samples_generated_per_prompt
        return 1 + self.spare_lag + math.ceil((slots + judged) / self.train.responses_per_step)

    @property
    def spare_lag(self) -> int:
        """Optimizer steps by which searchers may be ahead, beside those that pass while a visit is made: the one that
        is trained meanwhile, and those between two publications."""
        return self.train.publish_every

    @property
    def steps_per_batch(self) -> int:
        """Number of optimizer steps that train on the groups of one batch: train.updates_per_batch *
        replay.max_uses."""
        return self.train.updates_per_batch * (self.replay.max_uses or 1)

    @property
    def max_waiting_groups(self) -> int | None:
        """Number of groups that may wait in the queue of replay.max_uses; None = as many as come, where their age is
        bounded otherwise."""
        if self.replay.lag != "keep":
            return None
        initial_groups = math.ceil(self.replay.initial_responses / self.samples_generated_per_prompt)
        return max(2 * self.train.prompts_per_step, initial_groups)

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
        assert self.objective.beta is not None, "filled in by tba.launch.defaults"
        return self.objective.beta.at(step, progress=progress)

    def reference_weight_at(self, step: int, progress: float) -> float:
        weight = self.objective.reference_weight
        return 1.0 if weight is None else weight.at(step, progress=progress)

    def target_temperature_at(self, step: int, progress: float) -> float:
        temperature = self.objective.target_temperature
        return 1.0 if temperature is None else temperature.at(step, progress=progress)

    def has_plain_target_at(self, step: int, progress: float) -> bool:
        """Whether the target is pi_ref exp(r / beta) itself."""
        return self.reference_weight_at(step, progress) == self.target_temperature_at(step, progress) == 1.0

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
                "For responses of the newest weights only, use mode=async with replay.lag=pace and replay.max_lag=0."
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
        self._check_replay()
        self._check_durability()
        reuse = self.replay.max_trained_per_generated
        if self.replay.lag == "pace" and reuse is not None and reuse < self.train.updates_per_batch:
            raise ValueError(
                f"replay.max_trained_per_generated={reuse:g} below train.updates_per_batch="
                f"{self.train.updates_per_batch} contradicts replay.lag=pace: the trainer would wait for responses that the "
                "pace limit holds back."
            )
        if self.replay.lag in ("pace", "drop") and self.max_lag < self.train.publish_every - 1:
            raise ValueError(
                f"replay.max_lag={self.max_lag} cannot be kept with weights every "
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
        if self.runtime.kind == "ray" and self.runtime.placement is not None:
            raise ValueError(
                "runtime.placement cannot be used with runtime.kind=ray: Ray places roles, each on a GPU where there are "
                "some. Leave it out, or use runtime.kind=local."
            )
        devices, ranks = self.trainer_devices, self.train.ranks
        gpus = [device for device in devices if device != "cpu"]
        is_open = len(devices) == 1 and devices[0] in ("auto", "cpu", "cuda")
        if not is_open and (len(devices) != ranks or len(set(gpus)) != len(gpus)):
            raise ValueError(
                f"the trainer has the devices {', '.join(devices)} (runtime.placement.trainer or model.device) and "
                f"train.ranks={ranks}: name one for each rank, or none."
            )
        devices = (*self.trainer_devices, self.searcher_device(0))
        if self.takes_turns and len(set(devices)) > 1:
            raise ValueError(
                f"runtime.placement gives the devices {', '.join(dict.fromkeys(devices))} to a run in {self.mode} mode, "
                "where trainer and searcher are one process on one device: set model.device, or use mode=async."
            )

    def _check_lora(self) -> None:
        """Refuse an adapter that no engine leaves unmerged, and a reference that an adapter cannot have."""
        if self.generate.lora == "unmerged" and (self.model.lora is None or self.generate.engine != "vllm"):
            raise ValueError(
                "generate.lora=unmerged needs model.lora and generate.engine=vllm: the other engines decide by the dtype. "
                "Leave it out."
            )
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
        if self.mode == "fixed_lag" and self.replay.lag == "drop" and self.max_lag < self.lag_steps:
            raise ValueError(
                f"replay.max_lag={self.max_lag} with replay.lag=drop would drop every response of mode=fixed_lag "
                f"lag_steps={self.lag_steps}: use replay.lag=keep."
            )

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

    def _check_replay(self) -> None:
        replay, per_visit = self.replay, self.samples_generated_per_prompt
        if replay.max_uses is not None and replay.on_policy_probability not in (None, 1.0):
            raise ValueError(
                f"replay.max_uses={replay.max_uses} trains groups in the order of their arrival, which contradicts "
                f"replay.on_policy_probability={replay.on_policy_probability:g}: leave one of them unset."
            )
        if replay.initial_responses > replay.capacity:
            raise ValueError(
                f"replay.initial_responses={replay.initial_responses} do not fit into replay.capacity={replay.capacity}."
            )
        paced = self.train.prompts_per_step * (self.max_lag // self.steps_per_batch + 1) * per_visit
        if replay.lag == "pace" and replay.initial_responses > paced:
            raise ValueError(
                f"replay.initial_responses={replay.initial_responses} cannot be reached: replay.lag=pace with "
                f"replay.max_lag={self.max_lag} lets searchers generate {paced} before the first step. Raise max_lag."
            )
