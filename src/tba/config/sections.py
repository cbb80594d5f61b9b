"""Settings of model, engine, searchers, replay, objective, trainer, processes and what is observed: one section each. The
string under a field gives its unit and special values.

All sections are frozen and refuse unknown keys. A schedule is a pure function of the optimizer step, so nothing changes
config at run time. Checks that one section decides stand with it; checks across sections stand in `Config` (root.py). All of
them run before a model loads. The section `task` has a file of its own.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)


class Section(BaseModel):
    """One section of the config. The string under each field is its documentation."""

    # validate_default: defaults pass through the validators too, so a path or device has one form.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_slips_of_yaml(cls, value: Any, info: ValidationInfo) -> Any:
        # One level of the type: `int | None` shows its parts here.
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = {annotation, *get_args(annotation)}
        # YAML reads yes and on as true, which Pydantic would take for the number 1.
        if isinstance(value, bool) and kinds & {int, float} and not kinds & {bool, Any}:
            raise ValueError(f"a number is needed, got {str(value).lower()} (YAML reads yes, no, on and off so).")
        # No path or file can hold these two, and YAML makes them of a backslash in double quotes.
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise ValueError(
                f"{value!r} has a character that no file can hold (in double quotes YAML reads \\ as the start of one): "
                "write it in single quotes, or leave it out."
            )
        return value


OnOff = BeforeValidator(lambda value: {True: "on", False: "off"}[value] if isinstance(value, bool) else value)
"""YAML 1.1 reads on and off as true and false."""


def checked_device(name: str, *, also: str = "") -> str:
    """A device by one name only: cuda is cuda:0. `also` are names that may stand there besides."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device {name!r} is not known: write {also}cpu, cuda or cuda:1, as PyTorch names them.")
    return "cuda:0" if name == "cuda" else name


Device = Annotated[str, AfterValidator(checked_device)]
"""A device as PyTorch names it."""


def full_path(path: str) -> str:
    """A file or folder that is there by its full path: a run is evaluated and resumed from other working directories. Hub
    names, and what is not there, stay as they were written."""
    if not path:  # it would be the working directory
        raise ValueError(
            "the path is empty (a variable that is not set?): name a file or folder, or leave the setting out."
        )
    found = Path(path).expanduser()
    return str(found.absolute()) if found.exists() else path


LocalPath = Annotated[str, AfterValidator(full_path)]
"""A file or folder of this machine, or the name of something elsewhere."""


def number_or(value: Any, *, also: str) -> Any:
    """A number from text, which YAML 1.1 makes of 1e-5; other values as they are. `also` is what may stand there besides."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number: write one, for example 1e-5, or {also}.") from None


class Schedule(Section):
    """A number that changes with the step. A bare number in YAML is a constant: `beta: 0.05`."""

    kind: Literal["constant", "linear", "reciprocal", "cosine", "wsd"] = "constant"
    """Shape of the schedule: constant; linear or cosine from `start` to `end` over `steps`; reciprocal = 1 / value is
    linear, so that the weight 1 / beta of the reward grows evenly; wsd = warm-up, stable, then cosine decay to
    `end`."""
    start: float = Field(allow_inf_nan=False)
    """Value at the first step after warm-up."""
    end: float | None = Field(default=None, allow_inf_nan=False)
    """Value at the end; None = `start` for a constant schedule, 0 otherwise."""
    steps: int | None = Field(default=None, ge=1)
    """Number of optimizer steps over which the value changes, constant after them; None = to the end of the run, by
    train.max_steps or train.max_seconds."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of optimizer steps of linear warm-up from start / warmup_steps."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Number of optimizer steps of the final decay of a wsd schedule; None = a fifth of `steps`, or of the run."""
    end_from_step: int | None = Field(default=None, ge=0)
    """Optimizer step (0 is the first) from which on the value is `end`, however far it has come; None = it goes there
    evenly."""

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, value: Any) -> Any:
        value = number_or(value, also="a schedule: {kind: linear, start: 1e-4, end: 0}")
        return {"start": value} if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check(self) -> Schedule:
        if self.kind == "constant" and self.end not in (None, self.start):
            raise ValueError(
                f"a constant schedule has end={self.end} unlike start={self.start}: set kind to linear, reciprocal, "
                "cosine or wsd."
            )
        if self.kind == "reciprocal" and not (self.start > 0 and (self.end or 0) > 0):
            raise ValueError(
                f"a reciprocal schedule needs start and end above 0, got start={self.start}, end={self.end}."
            )
        if self.end_from_step is not None and (self.end is None or self.end_from_step < self.warmup_steps):
            raise ValueError(
                f"end_from_step={self.end_from_step} needs a schedule with an `end` (it is {self.end}) and must not lie in "
                f"the warm-up of {self.warmup_steps} steps: give `end`, or leave end_from_step out."
            )
        if self.steps is not None and self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} leaves nothing of steps={self.steps}: make it smaller.")
        if self.steps is not None and self.warmup_steps + (self.decay_steps or 0) > self.steps:
            raise ValueError(
                f"decay_steps={self.decay_steps} and warmup_steps={self.warmup_steps} exceed steps={self.steps}: make them "
                "smaller."
            )
        return self

    @property
    def ends(self) -> tuple[float, float]:
        """Value after warm-up and value at the end."""
        # An unset end is 0 for everything that changes.
        end = self.start if self.kind == "constant" else 0.0
        return self.start, end if self.end is None else self.end

    def at(self, step: int, *, progress: float) -> float:
        """Value for optimizer step `step` (0 is the first), before which `progress` (0 to 1) of the run is done."""
        # Before the shape: the jump holds wherever the schedule has come to.
        if self.end_from_step is not None and self.end is not None and step >= self.end_from_step:
            return self.end
        if step < self.warmup_steps:
            # step + 1: the first update would otherwise have rate 0.
            return self.start * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.start
        end = self.end or 0.0
        # Shares of `steps`, or of the run, whose number of steps need not be known.
        share, one_step = progress, progress / max(1, step)
        if self.steps is not None:
            share, one_step = step / self.steps, 1.0 / self.steps
        # Share at which the change begins; what follows is in shares too.
        first = self.warmup_steps * one_step
        if self.kind == "wsd":
            # A decay lasts one step at least.
            decay = max(0.2, one_step) if self.decay_steps is None else self.decay_steps * one_step
            first = max(first, 1.0 - decay)
        # Share of the change that is done; the maxima keep a run of one step from dividing by zero.
        done = min(1.0, max(0.0, (share - first) / max(one_step, 1.0 - first, 1e-9)))
        if self.kind == "reciprocal":
            return 1.0 / (1.0 / self.start + (1.0 / end - 1.0 / self.start) * done)
        fraction = done if self.kind == "linear" else 0.5 * (1.0 - math.cos(math.pi * done))
        return self.start + (end - self.start) * fraction


Auto = BeforeValidator(lambda value: None if value == "auto" else number_or(value, also="auto"))
"""`auto` may be written for None."""
Devices = Annotated[tuple[Device, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""Devices, of which one may stand without a list."""
DEFAULT_STEPS = 200
"""Optimizer steps of a run for which neither steps nor seconds are given."""
CUT_OFF_REWARD = -1.0
"""Reward of a cut-off response under truncated=penalise."""
AdamBeta = Annotated[float, Field(ge=0.0, lt=1.0)]
"""Decay rate of an average: share of the old value that stays."""


class LoraConfig(Section):
    """The LoRA adapter that is trained instead of the model."""

    rank: int = Field(default=32, ge=1, le=16_384)
    """Rank r of the adapter's matrices."""
    alpha: float | None = Field(default=None, gt=0.0)
    """Scale of the adapter, whose output counts alpha / rank times; None = twice the rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Names of the layers that get an adapter, as PEFT's target_modules; all-linear = every linear layer but the
    head."""


class ModelConfig(Section):
    """The model that is trained, and how it is held in memory."""

    path: LocalPath = "tba:arithmetic"
    """Folder or hub name of the start model, or `tba:arithmetic` for the one shipped with the package."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of trainer and engine; auto = float32 on a CPU, bfloat16 on a GPU. Master weights are always
    float32."""
    device: str = "auto"
    """Device of trainer and engine, such as cpu or cuda; auto = cuda where there is one, else cpu. Searchers may have others
    (search.devices), and of a trainer on several GPUs (train.ranks) this is the first."""
    lora: LoraConfig | None = None
    """Adapter to train instead of the model (needs PEFT), `lora: {}` for its defaults; the reference is then the base
    model. None = the whole model is trained."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the model is run; only for sources you trust."""

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if device != "auto":
            checked_device(device, also="auto, ")  # the name stays as it was written
        return device

    @model_validator(mode="before")
    @classmethod
    def _check_path(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("path", "") is None:
            raise ValueError("model.path has no value: pass model.path=FOLDER or a hub name.")
        return values


class GenerateConfig(Section):
    """How responses are generated."""

    engine: Literal["native", "vllm", "transformers"] = "native"
    """Engine that generates: native = our own decoder, many responses side by side; vllm = vLLM inside the searcher's
    process, for models that the native engine does not know (extra `tba-rl[vllm]`; it has random numbers of its own);
    transformers = the forward pass and cache of transformers, one prompt at a time, slower, for models that neither
    knows (the native engine falls back to it with a warning)."""
    slots: int | None = Field(default=None, ge=1)
    """Number of responses decoded side by side; None = as many as 1 GiB holds the keys and values of, each with the longest
    prompt of the run, at most 128; on a GPU as many as 16 GiB, or the searcher's part of a third of the memory that is free
    (half where no trainer uses it), at most 256. There samples share their prompt, and memory is taken as tokens come: half
    of the longest response is counted, and where responses are longer the youngest wait."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Length of the longest response, in tokens."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Length of the shortest response, in tokens: stop tokens are forbidden before it."""
    temperature: float = Field(default=1.0, gt=0.0, le=100.0)
    """Temperature of the policy: generation, log_pi and log_ref all use logits / temperature."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus that responses are sampled from, as a probability; 1 = all tokens. It changes generation only: log_pi in
    the loss is never truncated."""
    top_k: int = Field(default=0, ge=0)
    """Number of most probable tokens that responses are sampled from; 0 = all tokens. It changes generation only."""


class ExploreConfig(Section):
    """Off-policy exploration, off by default: the loss keeps the training temperature and no truncation."""

    probability: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the rollouts that explore (the official code: 0.3)."""
    temperature: tuple[float, float] = (1.0, 1.0)
    """Range of the sampling temperature of an exploring rollout."""
    reference_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the responses of every rollout that the reference (the frozen start model, unless it is reset) generates,
    so that what the policy has given up is still found. They count as responses of the reference's version."""

    @model_validator(mode="after")
    def _check(self) -> ExploreConfig:
        low, high = self.temperature
        if not 0.0 < low <= high:
            raise ValueError(f"temperature=[{low}, {high}] is no range: it needs 0 < low <= high.")
        return self


class SearchConfig(Section):
    """The searchers, which draw prompts, generate responses and have them rewarded."""

    num_searchers: int | None = Field(default=None, ge=1, le=64)
    """Number of searcher processes at the start. None = 1, or 2 for models of 5M parameters and more where all of an
    asynchronous run computes on the CPU of one machine: two keep its cores busy while the trainer does not train. Searchers
    get their rollouts one by one, so a searcher can be replaced, and `tba scale RUN --count N` can change their number
    during the run."""
    devices: Devices = ()
    """Devices of the searchers, such as [cuda:1, cuda:2, cuda:3], for runtime.kind=local: searcher i uses number i, and
    where there are more searchers than devices the list begins again. Where they differ from the trainer's, weights go
    through the machine's memory. Empty = model.device."""
    samples_multiplier: float = Field(default=1.0, ge=1.0, le=100.0)
    """Factor of the responses generated in a rollout: S = ceil(samples_multiplier * train.samples_per_prompt)."""
    shuffle: bool = True
    """Whether prompts are drawn in random order; False = in the order of the data."""
    reward_timeout_seconds: float = Field(default=30.0, gt=0.0)
    """Deadline of a reward call for the samples of one rollout. A call that takes longer is killed, and its samples are
    dropped. A run whose reward has never answered ends after 40 s of such calls, or one call where this is longer."""
    reward_workers: int | None = Field(default=None, ge=1, le=256)
    """Number of processes in which a searcher calls its rewards, each for one rollout at a time. They start where rollouts
    wait for one. A reward that waits (a remote judge) needs as many as the judge answers at once, shared by the searchers. A
    reward that computes needs no more than there are cores. Each imports the reward's file. None = 1, or 8 where every
    reward is `async def`."""
    reward_environment: tuple[str, ...] = ()
    """Names of environment variables that rewards get although they look like secrets, such as [OPENAI_API_KEY]. All others
    that do (TOKEN, KEY, SECRET, PASSWORD, CREDENTIAL, AUTH in the name, AWS_*, AZURE_*) are kept from the processes of
    rewards."""
    explore: ExploreConfig = ExploreConfig()

    @property
    def count(self) -> int:
        """Number of searcher processes at the start; 1 where it was left open and the machine was not asked."""
        return self.num_searchers or 1


class ReplayConfig(Section):
    """The replay buffer: what it holds, how batches are drawn from it, and how old responses may be."""

    capacity: int = Field(default=1_000_000, ge=1)
    """Most responses held in all; the oldest leave first."""
    capacity_per_prompt: int | None = Field(default=None, ge=1)
    """Most responses held of one prompt; the oldest leave first. None = 100, or four steps' worth where the task has so
    few prompts that this is more."""
    on_policy_probability: float | None = Field(default=None, ge=0.0, le=1.0)
    """Share m of the prompts of a batch that is drawn from the fresh set, the groups of the last 2 * train.publish_every
    steps (1 in sync and fixed_lag mode); the rest come from all that is stored. Below 1 a batch of one prompt has fresh
    and old responses side by side: m is the share of the fresh ones, and half of the old ones is drawn uniformly. None = 1
    (the paper: .95 for GSM8K, .5 for TL;DR and red-teaming)."""
    inverse_temperature: float = Field(default=0.0, ge=0.0)
    """How much old responses of high reward are preferred: they are drawn with probability ~ exp(inverse_temperature *
    reward); 0 = uniformly."""
    importance_weighted: bool = False
    """Whether old responses are also drawn with probability ~ reference / behaviour probability when they were
    generated (within exp(-12) and exp(0.5)): what the policy says too often does not fill the draw, and rare finds come
    back."""
    deduplicate: bool | None = None
    """Whether of two responses to a prompt with the same tokens only the newer is held (the paper). None = False: a
    response counts as often as it was sampled, which policy gradients need, and a policy that has become sure of itself
    keeps full groups."""
    max_replay_ratio: float | None = Field(default=None, gt=0.0)
    """Number of times that each response is trained on average before the trainer waits for new ones (Reverb's limiter),
    second updates (train.second_update_after) aside. In mode=async, where it is a whole number of batches,
    on_policy_probability is 1 and nothing is imported, groups wait in a queue: they are trained so often, whole, in the
    order of their arrival. Otherwise they stay until age evicts them. None = train.updates_per_batch. Where generating is
    what takes the time, 2 to 4 learns more from the same responses."""
    max_lag: int | None = Field(default=None, ge=0)
    """Largest lag of a response when it is trained, in optimizer steps. Where groups wait in a queue (see
    max_replay_ratio), a searcher starts a rollout only with weights at most so far behind the step that it is meant for.
    It starts no earlier than recent rollouts needed, and keeps closer where updates are long: the policy moves by 2 nats
    at most in between. Reuse, and batches that other searchers have filled first, may still train it later. Where there
    is no queue, or resets of the reference empty it, older responses leave the buffer, and the trainer waits until the
    others fill a batch. In mode=fixed_lag it is the lag of every response. Imported responses and the reference's have
    none. None = for a queue the steps that all KV slots, and search.reward_workers beyond one, hold the responses of, +
    train.publish_every + 1; 1 in mode=fixed_lag; elsewhere any age trains (TBA)."""
    on_reference_reset: Literal["drop", "recompute"] = "drop"
    """What happens at a reset to responses scored by the earlier reference: drop = they leave; recompute = their
    log_ref is computed again (the trainer then holds the reference)."""
    durability: Annotated[Literal["process", "power", "node", "off"], OnOff] = "process"
    """Events that received groups survive, in RUN/replay.sqlite: process = the end of any process, also by kill -9; power =
    also a power failure, at the price of a disk flush for every batch of groups; node = like process, and also the loss of
    the trainer's node with its disk, because groups and checkpoints are on the node of `tba train` too, in RUN.replica (for
    runtime.kind=ray); off = nothing is written, and groups are gone with the trainer (docs/durability.md)."""
    imports: tuple[LocalPath, ...] = ()
    """JSONL files of existing responses to start from (`prompt`, `completion`; optional `rewards`), also those that `tba
    replay RUN --export` writes."""


class ObjectiveConfig(Section):
    """The objective that is trained with. Further keys are the chosen objective's own settings."""

    model_config = ConfigDict(extra="allow")

    name: str = "tb"
    """Name of the objective: tb, tb_learned_z, subtb, tba_prime, kimi, reinforce, rloo, proximal_rloo, grpo, dr_grpo,
    ppo, vineppo or online_dpo."""
    beta: Schedule | None = None
    """Weight of the reference: TB's target is pi_ref * exp(r / beta), others subtract beta * KL; None = the
    objective's."""
    max_kl_penalty: float | None = Field(default=None, gt=0.0)
    """Largest penalty beta * KL, in units of the reward, that the pull to the reference may cost the policy on average:
    where it is further away, beta is this number over its mean KL of the last steps. None = .05 for tb where beta is
    unset, no bound otherwise."""
    reward_unit: Annotated[float, Field(gt=0.0)] | Literal["spread"] | None = None
    """Number that rewards are divided by before they are trained on: beta and max_kl_penalty are in this unit. spread =
    twice the largest standard deviation of the rewards within prompts so far, which is about 1 for rewards that are right or
    wrong. None = spread for tb where beta is unset, 1 otherwise."""
    target_temperature: Schedule | None = None
    """Temperature tau by which the log of the target, log pi_ref + r / beta, is divided, for tb and tb_learned_z only;
    None = 1. A target (w log pi_ref + r / b) / t, where w is 1 / gamma of GFNOrg/red-teaming, has beta = b w and
    tau = t / w."""

    @property
    def settings(self) -> dict[str, Any]:
        """The objective's own settings that were given."""
        # extra="allow" keeps unknown keys here; make_objective checks them by the objective's own model.
        return dict(self.model_extra or {})


class ReferenceConfig(Section):
    """The reference policy, which the objective pulls back to."""

    reset_every: int | None = Field(default=None, ge=0)
    """Number of optimizer steps after which the current policy becomes the reference; 0 = never; None = 50 for
    tba_prime, never for the other objectives."""


class TrainConfig(Section):
    """The trainer: optimizer steps, batches, the learning rate, memory and checkpoints."""

    max_steps: int | None = Field(default=None, ge=1)
    """Number of optimizer steps of the run, second updates (second_update_after) not counted. None = 200, or with
    max_seconds as many as there is time for."""
    max_seconds: float | None = Field(default=None, gt=0.0)
    """Seconds of training after which the run ends, with the step that goes on then; at least one step is made. They count
    from the first rollout of a prompt on, without loading; evaluations count only in mode=async, where they go on beside.
    The first limit reached ends the run, and what changes over its length (the rate, schedules, evaluations) follows the
    nearer one. None = no limit."""
    responses_per_step: int = Field(default=128, ge=2)
    """Number of responses in one optimizer step; a multiple of samples_per_prompt."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Number K of responses of one prompt in an optimizer step."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Number of optimizer steps on the same batch before the next is sampled (PPO's epochs, GRPO's mu)."""
    second_update_after: int | None = Field(default=None, ge=0, le=100)
    """Number of steps after which a batch is trained a second time; 0 = never. The second update is made between two
    steps, and max_steps does not count it. In mode=async it is made only in time that the trainer would spend waiting. It is
    left out while each of the last eight batches was there in time; a trainer that is the bottleneck makes none.
    So many batches are kept in the host's memory and in checkpoints. None = 3 or 0. It is 3 for objectives that bound the
    push of stale responses (tb), where the rate is auto, the policy computes in fp32 and only its own responses are trained
    on. No setting of replay may then say how often or how late a response is trained. fp32 is the dtype on a CPU, but not on
    Ray nodes, unless model.dtype or model.device says so. In bf16 the second update gained nothing."""
    learning_rate: Annotated[Schedule | None, Auto] = None
    """Learning rate of AdamW, a number or a schedule; None or auto = the rate at which each update moves the policy as far
    as target_drift says; over the last half of the run it falls to zero."""
    target_drift: float = Field(default=0.18, gt=0.0, le=10.0)
    """Drift that learning_rate=auto aims at: the mean |change of log_pi| of a new response by one update, in units of
    sqrt(signal x entropy). It is said for a run of 200 steps; of N steps it is sqrt(200 / N) times that. The entropy is that
    of a response in nats. The signal is the correlation of the drift of new responses with their rewards, at least .03; .1
    where it cannot be seen. Lower target_drift where a run is unstable."""
    adam_betas: tuple[AdamBeta, AdamBeta] = (0.9, 0.999)
    """Decay rates of AdamW's averages of the gradient and of its square."""
    adam_epsilon: float = Field(default=1e-8, gt=0.0)
    """Number that AdamW adds to the denominator."""
    weight_decay: float = Field(default=0.0, ge=0.0, le=10.0)
    """Weight decay of AdamW."""
    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Norm that gradients are clipped to. They are in units of the reward, divided by objective.reward_unit
    (docs/algorithm.md), so it means the same at every beta. None = no clipping."""
    tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Most tokens in one forward and backward pass; a longer response still runs, alone. None = as many as about 1 GiB
    (GPU: a third of its memory, half where no searcher uses it) holds the activations of, at most 4,096 (GPU: 32,768). On a
    CPU it is also no more than about a second of one core computes, 1e11 floating-point operations, but at least 512."""
    ranks: int = Field(default=1, ge=1, le=1024)
    """Number of processes that the trainer's model is spread over, by FSDP2: each holds its part of weights, gradients and
    optimizer, on a GPU of its own where there are GPUs. Under torchrun it is the number of processes that torchrun has
    started (docs/scaling.md)."""
    compile: bool = False
    """Whether the model's layers are compiled on CUDA: half a minute or more at the start, cached between runs, then
    faster steps."""
    gradient_checkpointing: bool = False
    """Whether one activation per layer is kept and the rest computed again in the backward pass: slower, for models
    that do not fit."""
    offload_optimizer: bool = False
    """Whether AdamW's moments lie in the host's memory, 8 bytes a parameter, and travel to the GPU once a step: the same
    numbers, slower steps, for models that do not fit. A checkpoint takes as much of the host's memory once more."""
    publish_every: int = Field(default=1, ge=1)
    """Number k of optimizer steps between two publications of weights."""
    truncated: Literal["keep", "drop", "penalise"] = "keep"
    """What happens to responses cut off at the length limit: keep = they keep their reward (as in the paper's GSM8K;
    the task decides what a response without an end gets); drop = they have no weight in the loss; penalise = their
    reward becomes -1 (as in the paper's TL;DR)."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Number of optimizer steps between checkpoints, from which a run can be resumed; None = only one at the end, besides
    those of the collapse guard, a tenth of the run apart, of which the newest stays until the end."""
    keep_checkpoints: int = Field(default=2, ge=0)
    """Number of checkpoints kept, the newest; 0 = none is written."""

    @property
    def prompts_per_step(self) -> int:
        """P = responses_per_step / samples_per_prompt."""
        return self.responses_per_step // self.samples_per_prompt

    @property
    def cut_off_reward(self) -> float | None:
        """Reward of a cut-off response, under truncated=penalise; None = it keeps its reward."""
        return CUT_OFF_REWARD if self.truncated == "penalise" else None

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.max_steps is None and self.max_seconds is None:
            # Past Pydantic's own __setattr__: the section is frozen.
            object.__setattr__(self, "max_steps", DEFAULT_STEPS)  # and it still counts as unset
        for rate in () if self.learning_rate is None else self.learning_rate.ends:
            # AdamW moves every weight by up to the rate in each step, and weights are smaller than 1.
            if not 0.0 <= rate <= 1.0:
                raise ValueError(
                    f"train.learning_rate={rate:g} is not between 0 and 1: language models learn at 1e-7 to 1e-3. Leave it "
                    "unset (auto) to have it found, or write one of these."
                )
        if self.responses_per_step % self.samples_per_prompt:
            samples, lower = self.samples_per_prompt, self.prompts_per_step * self.samples_per_prompt
            raise ValueError(
                f"train.responses_per_step={self.responses_per_step} is not divisible by "
                f"train.samples_per_prompt={samples}: use {lower or samples} or {lower + samples}."
            )
        return self


class RuntimeConfig(Section):
    """The processes of a run: their threads, their channels and their deadlines."""

    kind: Literal["local", "ray"] = "local"
    """Where roles run: local = processes of this machine; ray = actors on a Ray cluster, for which the extra `ray` is needed
    (docs/scaling.md)."""
    address: str | None = None
    """Address of the Ray cluster to join with kind=ray, as `ray start` prints it, or `auto`; None = a private one is started
    on this machine. Only this run can reach it, and it ends with the run."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """Number of threads with which each process computes a product of matrices. None = the cores of the machine but one,
    shared out among trainer and searchers, or all cores where that gives each two threads instead of one. A process that is
    alone (sync runs, evaluations) then has all cores but one. None gives at most OMP_NUM_THREADS where that is set,
    otherwise 16, and one to a role on a GPU or a Ray cluster. On a cluster a process takes up as many CPUs of its node. More
    threads than free cores make all of them slow. A trainer on a CPU computes its micro-batches side by side with so many
    workers, each a single thread. With None it has one worker for each core where it is alone or searchers have one thread,
    within the same limits. Otherwise it has one for each of its threads."""
    wait_seconds: float = Field(default=300.0, gt=0.0)
    """Deadline of every wait, which counts only while the awaited role does nothing. It is also the longest time without a
    heartbeat, even while a model loads: a silent searcher is replaced, and a silent trainer is killed and resumed. Raise it
    for a model that takes longer to load or to compile."""
    mps: Annotated[Literal["auto", "on", "off"], OnOff] = "auto"
    """Whether CUDA MPS lets roles on one GPU run side by side: auto = where a GPU is shared and it can be started. `tba
    doctor` says what it gains and risks."""

    @model_validator(mode="after")
    def _check(self) -> RuntimeConfig:
        if self.address is not None and self.kind != "ray":
            raise ValueError(
                f"runtime.address={self.address} is of a Ray cluster and needs runtime.kind=ray: set it, or leave the "
                "address out (null)."
            )
        return self


class EvaluateConfig(Section):
    """Evaluations, during the run and at its end."""

    every: int | None = Field(default=None, ge=0)
    """Number of optimizer steps between evaluations, of which there is always one at the start and one at the end; 0 =
    those two only; None = a tenth of the run."""
    split: Literal["held_out", "validation"] = "held_out"
    """Prompts to evaluate on: tune on validation, report on held_out, because settings chosen by looking at the
    held-out prompts flatter themselves there. A run folder keeps its split; `tba evaluate RUN evaluate.split=held_out`
    reports a run that was tuned on validation."""
    best_metric: str | None = None
    """Metric that the best checkpoint is kept by, as summary.json names it; of one with a minus before it (-kl) the lowest
    value is the best. None = the first, which the display shows."""
    num_prompts: int = Field(default=500, ge=1)
    """Number of prompts of the split to evaluate on; arithmetic and tldr have 2000 held-out and 1000 validation
    problems, gsm8k 1319 and 500, math 5000 and 500; red_team has one prompt."""
    samples_per_prompt: int = Field(default=0, ge=0, le=10_000)
    """Number of samples of each prompt, at the training temperature. For tasks with right answers it is the k of pass@k
    and avg@k (own data: also the mean reward, reward@k); 0 = greedy responses only. For red_team it is the number of
    attacks; 0 = 1,024. tldr always judges one sample and the greedy response."""

    @property
    def metric(self) -> str | None:
        """Name of best_metric; None = it is the first."""
        return None if self.best_metric is None else self.best_metric.removeprefix("-")

    @property
    def lower_is_better(self) -> bool:
        return self.best_metric is not None and self.best_metric.startswith("-")


class ObserveConfig(Section):
    """The output of a run about itself, and the collapse guard."""

    label: str | None = None
    """Name of the run in W&B; None = that of the run folder."""
    progress: bool = True
    """Whether there is a live display on the terminal, and at the end the results and a picture of the evaluations
    (RUN/evaluations.png); false = a line now and then, as where there is no terminal, and the summary as JSON."""
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go besides metrics.jsonl; wandb needs no account with WANDB_MODE=offline."""
    on_collapse: Annotated[Literal["warn", "stop", "rollback", "off"], OnOff] = "warn"
    """What happens when length, entropy, cut-off responses, KL or reward of the trained batches leave their past
    (`guard/alarm`): warn; stop, with a non-zero exit status; rollback = go back to the newest checkpoint from before and
    on from there with half the learning rate (auto: half of train.target_drift), twice at most; off = they are not watched.
    The newest checkpoint from before is kept."""
