"""Every setting, one section per folder of the package. The string under a field gives its unit and special values.

Checks that one section decides stand with it; checks across sections stand in `Config` (root.py). All of them run before a
model loads. The `task` section has a file of its own.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from tba.config.base import Section
from tba.config.schedule import Schedule

OnOff = BeforeValidator(lambda value: {True: "on", False: "off"}[value] if isinstance(value, bool) else value)
"""YAML 1.1 reads on and off as true and false."""


Auto = BeforeValidator(lambda value: None if value == "auto" else value)
"""`auto` may be written for None."""


class LoraConfig(Section):
    rank: int = Field(default=32, ge=1)
    """r of the adapter's matrices."""
    alpha: float | None = Field(default=None, gt=0.0)
    """The adapter counts alpha / rank; None = twice the rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Names of the layers it is put on, as PEFT's target_modules; all-linear = every linear layer but the head."""


class ModelConfig(Section):
    path: str = "tba:arithmetic"
    """A folder, a hub name, or `tba:arithmetic` for the start model shipped with the package."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of trainer and engine; auto = float32 on a CPU, bfloat16 on a GPU. Master weights are always float32."""
    device: str = "auto"
    """auto = cuda where there is one, else cpu."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the model (needs PEFT): `lora: {}` for its defaults. The reference is then the base."""
    trust_remote_code: bool = False
    """True runs Python code that comes with the model: only for sources you trust."""

    @model_validator(mode="before")
    @classmethod
    def _check_path(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("path", "") is None:
            raise ValueError("model.path has no value: pass model.path=FOLDER or a hub name.")
        return values


class GenerateConfig(Section):
    engine: Literal["native", "transformers"] = "native"
    """native = our slot engine; transformers = `model.generate`, slow, for models the native engine does not know."""
    slots: int | None = Field(default=None, ge=1)
    """Responses decoded side by side; None = what 1 GiB (GPU: 16) holds of their keys and values, at most 128 (256)."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Longest response in tokens."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Stop tokens are forbidden before this many tokens."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Temperature of the policy: generation, log_pi and log_ref all use logits / temperature."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Behaviour only; log_pi in the loss is never truncated. 1 = off."""
    top_k: int = Field(default=0, ge=0)
    """Behaviour only. 0 = off."""
    update: Literal["in_flight", "drain"] = "in_flight"
    """New weights between decode steps, keeping the old KV, or after running responses finished. Sync mode drains."""


class ExploreConfig(Section):
    """Off-policy exploration, off by default: the loss keeps the training temperature and no truncation."""

    probability: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of visits that explore (the official code: 0.3)."""
    temperature: tuple[float, float] = (1.0, 1.0)
    """Range of the sampling temperature of an exploring visit."""
    top_p: tuple[float, float] = (1.0, 1.0)
    """Range of its top-p."""
    reference_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the responses of every visit that the reference (the frozen start model, unless it is reset) generates:
    what the policy has given up is still found. They count as responses of the reference's version."""

    @model_validator(mode="after")
    def _check(self) -> ExploreConfig:
        for name, (low, high), largest in (("temperature", self.temperature, math.inf), ("top_p", self.top_p, 1.0)):
            if not 0.0 < low <= high <= largest:
                raise ValueError(
                    f"search.explore.{name}=[{low}, {high}] is no range: it needs 0 < low <= high"
                    f"{'' if largest == math.inf else f' <= {largest:g}'}."
                )
        return self


class SearchConfig(Section):
    num_searchers: int = Field(default=1, ge=1)
    """N: searcher processes. Searcher i owns prompts i, i + N, i + 2N, ...; fewer prompts than N are shared."""
    samples_multiplier: float = Field(default=1.0, ge=1.0)
    """S = ceil(samples_multiplier * train.samples_per_prompt) responses are generated per prompt."""
    shuffle: bool = True
    """False = prompts in the order of the data."""
    reward_timeout_seconds: float = Field(default=30.0, gt=0.0)
    """A reward call that takes longer is killed and costs its samples."""
    max_reward_failures: int = Field(default=100, ge=1)
    """Failed samples in a row that stop the run."""
    explore: ExploreConfig = ExploreConfig()
    skip_solved_after: int | None = Field(default=None, ge=1)
    """A prompt whose last so many visits were all solved is skipped every other epoch; None = never."""
    skip_unsolved_after: int | None = Field(default=None, ge=1)
    """The same for prompts never solved; None = never."""


class ReplayConfig(Section):
    capacity: int = Field(default=1_000_000, ge=1)
    """Trajectories in all; the oldest go first."""
    capacity_per_prompt: int | None = Field(default=None, ge=1)
    """Trajectories of one prompt; the oldest go first. None = 100, or four steps' worth where the task has so few prompts
    that it is more."""
    on_policy_probability: float | None = Field(default=None, ge=0.0, le=1.0)
    """m: share of the prompts of a batch drawn from the fresh set; the rest come from all that is stored. With mix=responses
    also the share of fresh responses of each prompt. None = 1 (the paper: .95 for GSM8K, .5 for TL;DR and red-teaming)."""
    mix: Literal["prompts", "responses"] = "prompts"
    """What m is a share of: whole prompts of a batch (the paper), or the responses of each prompt, for tasks of one or few
    prompts, where a batch should hold fresh and old responses side by side."""
    fresh_steps: int | None = Field(default=None, ge=1)
    """Groups received in the last so many optimizer steps are fresh; None = 2 * train.publish_every. In sync and fixed-lag
    modes it is 1."""
    inverse_temperature: float = Field(default=0.0, ge=0.0)
    """Old responses are drawn with probability ~ exp(inverse_temperature * reward); 0 = uniform."""
    importance_weighted: bool = False
    """Old responses are also drawn ~ reference / behaviour probability when they were generated (within exp(-12) and
    exp(0.5)): what the policy says too often does not fill the draw, and rare finds come back."""
    uniform_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the old responses (mix=prompts: of the old prompts) that is drawn uniformly all the same; matters where
    the others are not, by inverse_temperature or importance_weighted."""
    deduplicate: bool | None = None
    """True = of two responses to a prompt with the same tokens the newer wins (the paper). None = no: a response counts as
    often as it was sampled, which policy gradients need, and a policy that has become sure of itself keeps full groups."""
    max_trained_per_generated: float | None = Field(default=None, gt=0.0)
    """The trainer waits for new responses once it has trained each so often on average (Reverb's limiter). None =
    train.updates_per_batch. Where generating is what takes the time, 2 to 4 learns more from the same responses."""
    initial_responses: int = Field(default=0, ge=0)
    """Responses to generate before the first optimizer step (the paper: 500 for GSM8K, 10,000 for TL;DR); 0 = one batch."""
    max_uses: int | None = Field(default=None, ge=1)
    """A queue: groups are trained in the order of their arrival and leave after so many draws, whole, also where S > K. With
    lag=keep the oldest leave untrained once two steps' worth of groups wait. None = max_trained_per_generated /
    train.updates_per_batch in mode=async where m is 1 and that is a whole number; otherwise groups stay until age evicts
    them, and are drawn by on_policy_probability."""
    lag: Literal["keep", "pace", "drop"] | None = None
    """Responses of old weights: keep (TBA: any age trains), pace (a visit starts only with weights at most max_lag steps
    behind the step it is meant for; replay and reuse may still train it later), drop (responses beyond max_lag leave the
    buffer, and the trainer waits until what is left fills a batch). Imported responses and the reference's have no lag.
    None = pace where one searcher feeds a queue (max_uses), otherwise keep."""
    max_lag: int | None = Field(default=None, ge=0)
    """Optimizer steps; for lag=pace and lag=drop. None = 8 for drop; for pace 2, the steps' worth of responses that the
    searchers generate at once, and those that pass between publications."""
    on_reference_reset: Literal["drop", "recompute"] = "drop"
    """What was scored by an earlier reference: drop it, or recompute its log_ref (the trainer then holds the reference)."""
    imports: tuple[str, ...] = ()
    """JSONL files of existing responses to start from (`prompt`, `completion`; optional `rewards`)."""


class ObjectiveConfig(Section):
    """Keys beside these are the chosen objective's own settings; its class in `tba.objectives` declares them."""

    model_config = ConfigDict(extra="allow")

    name: str = "tb"
    """tb, tb_learned_z, tba_prime, kimi, reinforce, rloo, proximal_rloo, grpo, dr_grpo, ppo, vineppo or online_dpo."""
    beta: Schedule | None = None
    """Weight of the reference: TB's target is pi_ref * exp(r / beta), others subtract beta * KL; None = the objective's."""
    reference_weight: Schedule | None = None
    """tb and tb_learned_z only: factor w of log pi_ref in the log of the target (1 / gamma of GFNOrg/red-teaming); None = 1.
    Below 1 the target is broader than the reference."""
    target_temperature: Schedule | None = None
    """tb and tb_learned_z only: tau, by which the log of the target, w log pi_ref + r / beta, is divided; None = 1."""

    @property
    def settings(self) -> dict[str, Any]:
        """The objective's own settings that were given."""
        return dict(self.model_extra or {})


class ReferenceConfig(Section):
    reset_every: int | None = Field(default=None, ge=0)
    """Optimizer steps after which the current policy becomes the reference; 0 = never; None = the objective's habit (50
    for tba_prime, never for the others)."""


class TrainConfig(Section):
    max_steps: int = Field(default=200, ge=1)
    """Optimizer steps."""
    responses_per_step: int = Field(default=128, ge=2)
    """Responses in one optimizer step: prompts_per_step * samples_per_prompt."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """K: responses of one prompt in a step."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer steps on the same batch before the next is sampled (PPO's epochs, GRPO's mu)."""
    learning_rate: Annotated[Schedule | None, Auto] = None
    """Of AdamW: a number or a schedule; None or auto = it follows the movement of the policy (movement), begins low and
    falls to zero at the end (settle)."""
    movement: float = Field(default=0.1, gt=0.0)
    """learning_rate=auto only: what the rate aims at: the mean |change of log_pi| of a response by one optimizer step, in
    units of the square root of its entropy; times the measured share of signal in recent updates over .1 (between .2 and 3)
    where each response is trained once; divided by sqrt(replay.max_trained_per_generated)."""
    settle: float = Field(default=0.5, ge=0.0, le=1.0)
    """learning_rate=auto only: share of the run, at its end, in which the rate falls to zero."""
    first_learning_rate: float | None = Field(default=None, gt=0.0)
    """learning_rate=auto only: the guess it begins from; None = by the number of parameters: 2e-4 for the shipped model,
    2.4e-6 at 0.5B, 5e-7 at 7B, ten times that for LoRA."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Gradients are in reward units (see docs/algorithm.md), so this means the same at every beta. None = no clipping."""
    tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Most tokens in one forward and backward pass; a longer response still runs, alone. None = what about 1 GiB (GPU:
    a third of its memory) holds of activations, at most 4,096 (32,768)."""
    responses_per_micro_batch: int | None = Field(default=None, ge=1)
    """Most responses in one pass, besides the token limit; None = as many as fit."""
    compile: bool = False
    """CUDA: compile the model's layers (half a minute or more at the start, cached between runs; then faster steps)."""
    gradient_checkpointing: bool = False
    """Keep one activation per layer and compute the rest again in the backward pass: slower, for models that do not fit."""
    share_prompts: bool = True
    """The responses of a prompt in a micro-batch share one pass over the prompt's tokens; exact, only faster."""
    publish_every: int = Field(default=1, ge=1)
    """k: optimizer steps between two publications of weights."""
    truncated: Literal["keep", "drop", "penalise"] = "keep"
    """Responses cut off at the length limit: keep their reward (the default, as the paper's GSM8K; a task's no-EOS rule
    scores them), drop them from the loss, or replace their reward by truncated_reward (the paper's TL;DR)."""
    truncated_reward: float = -1.0
    """Reward of a cut-off response under truncated=penalise."""
    equal_reward_groups: Literal["keep", "drop"] = "keep"
    """Groups whose rewards are all equal. Kept by default: in TB they carry the pull to the reference."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; None = only at the end."""
    keep_checkpoints: int = Field(default=2, ge=0)
    """The last so many are kept; 0 = none is written."""

    @property
    def prompts_per_step(self) -> int:
        """P = responses_per_step / samples_per_prompt."""
        return self.responses_per_step // self.samples_per_prompt

    @property
    def cut_off_reward(self) -> float | None:
        """What a cut-off response gets instead of its reward, under truncated=penalise; None = it keeps its reward."""
        return self.truncated_reward if self.truncated == "penalise" else None

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.responses_per_step % self.samples_per_prompt:
            lower = self.responses_per_step // self.samples_per_prompt * self.samples_per_prompt
            raise ValueError(
                f"train.responses_per_step={self.responses_per_step} is not divisible by "
                f"train.samples_per_prompt={self.samples_per_prompt}: use "
                f"{lower or self.samples_per_prompt} or {lower + self.samples_per_prompt}."
            )
        return self


class RuntimeConfig(Section):
    threads: int = Field(default=1, ge=1)
    """Threads of each process. Trainer and searchers share the cores: more threads than cores make all of them slow."""
    channel_groups: int = Field(default=64, ge=1)
    """Groups a searcher may have on the way, not yet stored by the trainer, before it waits."""
    start_seconds: float = Field(default=300.0, gt=0.0)
    """Deadline for the buffer's first fill: process start, model load and the first groups."""
    wait_seconds: float = Field(default=300.0, gt=0.0)
    """Deadline of every other wait, and for a searcher's sign of life."""
    mps: Annotated[Literal["auto", "on", "off"], OnOff] = "auto"
    """CUDA MPS, so that trainer and searchers on one GPU run side by side: auto = where it can be started; `tba doctor`
    says what it gains and risks."""
    stop_seconds: float = Field(default=10.0, gt=0.0)
    """Time for searchers to end when asked, before they are killed."""


class EvaluateConfig(Section):
    every: int | None = Field(default=None, ge=0)
    """Steps between evaluations, of which there is always one at the start and one at the end; 0 = those two only; None = a
    tenth of the run."""
    split: Literal["held_out", "validation"] = "held_out"
    """Tune on validation, report on held_out: settings chosen by looking at the held-out prompts flatter themselves there. A
    run folder keeps its split; `tba evaluate RUN evaluate.split=held_out` reports a run that was tuned on validation."""
    num_prompts: int = Field(default=500, ge=1)
    """Prompts of the split; arithmetic and tldr have 2000 held-out and 1000 validation problems, gsm8k 1319 and 500, math
    5000 and 500; red_team has one prompt."""
    samples_per_prompt: int = Field(default=0, ge=0)
    """Tasks with right answers: samples at the training temperature for pass@k and avg@k (own data: also the mean reward,
    reward@k); 0 = greedy responses only. red_team: attacks; 0 = 1,024. tldr always judges one sample and the greedy
    response."""


class ObserveConfig(Section):
    log_every: int = Field(default=1, ge=1)
    """Steps between lines of metrics.jsonl."""
    samples_every: int = Field(default=20, ge=1)
    """Steps between entries of samples.jsonl."""
    progress: bool = True
    """Live display on the terminal, and a table at the end."""
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go besides metrics.jsonl; wandb needs no account with WANDB_MODE=offline."""
    on_collapse: Annotated[Literal["warn", "stop", "off"], OnOff] = "warn"
    """When length, entropy, cut-off responses, KL or reward of the trained batches leave their past (`guard/alarm`): warn,
    stop with a non-zero exit status, or do not watch. The newest checkpoint from before is kept."""
    healthy_checkpoint_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints/healthy-step-N, of which the newest stays; None = a tenth of the run, at least 20. None is
    written with train.keep_checkpoints=0."""
    keep_healthy_checkpoint: bool = False
    """True keeps healthy-step-N also at the end of a run without a collapse."""
