"""What a script gives in TRL's names, as sections of our config: one function for each part of it.

Values that cannot be kept are refused here, those that mean nothing for the chosen objective are told once.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tba.api.names import DIRECT
from tba.config import DEFAULT_STEPS, Config, ConfigError, TrainConfig, load_config, merge

Tell = Callable[[str], None]

DEFAULTS = TrainConfig()

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}
LOSSES: dict[str, dict[str, Any]] = {
    "bnpo": {"name": "grpo", "aggregate": "tokens"},
    "dapo": {"name": "grpo", "aggregate": "tokens"},
    **{name: {"name": "grpo", "aggregate": "tokens", "surrogate": name} for name in ("cispo", "vespo")},
    "sapo": {"name": "grpo", "surrogate": "sapo"},
    "luspo": {"name": "dr_grpo", "ratio": "sequence", "normal_length": 1, "scale_rewards": True},
}
"""TRL's losses that are settings of ours; other names are those of our objectives."""
RATIOS = {
    "delta": "max_ratio",
    "importance_sampling_level": "ratio",
    "off_policy_mask_threshold": "off_policy_mask",
    "top_entropy_quantile": "top_entropy",
}
"""TRL's names for settings of grpo and dr_grpo."""
OFF = {"importance_sampling_level": "token", "top_entropy_quantile": 1.0}
"""Values of these that ask for nothing."""
CLIPS: dict[str, tuple[str | None, str | None]] = {
    **dict.fromkeys(("grpo", "dr_grpo"), ("clip_low", "clip_high")),
    **dict.fromkeys(("proximal_rloo", "ppo", "vineppo"), ("clip", None)),
    "cispo": (None, "clip_high"),
}
"""Settings that epsilon and epsilon_high are, by objective or surrogate."""
SINKS = ("tensorboard", "wandb")
ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")


def translated(given: Mapping[str, Any], *, num_rows: int | None, tell: Tell) -> dict[str, Any]:
    """TRL's names as sections of ours, which win where both are given. `tell` says what has no meaning."""
    try:
        return _sections(given, num_rows=num_rows, tell=tell)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:  # a text, a list or nothing where a number is needed
        load_config(None, (), **{name: value for name, value in given.items() if name in Config.model_fields})
        values = ", ".join(f"{name}={value!r:.80}" for name, value in given.items())
        raise ConfigError(f"one of these is of another kind than its name asks for ({error}): {values}.") from error


def _sections(given: Mapping[str, Any], *, num_rows: int | None, tell: Tell) -> dict[str, Any]:
    of_trl = {name: value for name, value in given.items() if name not in Config.model_fields and value is not None}
    own = {name: value for name, value in given.items() if name in Config.model_fields}
    found: dict[str, Any] = {}
    for name, place in DIRECT.items():
        if name in of_trl:
            found = merge(found, _nested(place, of_trl[name]))
    steps = Steps(of_trl, own, num_rows)
    parts = (_folder(of_trl), _model(of_trl, tell), _generate(of_trl), _objective(of_trl, own, tell), steps.sections())
    for part in (*parts, _optimizer(of_trl, steps, tell), _reports(of_trl, steps, tell)):
        found = merge(found, part)
    return merge(found, own)


def _folder(given: Mapping[str, Any]) -> dict[str, Any]:
    """`output_dir` is the run folder; `run_name` names it only where no folder is given."""
    name, folder = given.get("run_name"), given.get("output_dir")
    if folder is None:
        return {} if name is None else {"name": name}
    path = Path(folder)
    found: dict[str, Any] = {"output": str(path.parent), "name": path.name}
    return found if name is None else {**found, "observe": {"label": name}}


def _model(given: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    model: dict[str, Any] = {}
    if given.get("bf16") is not None:
        model["dtype"] = "bfloat16" if given["bf16"] else "float32"
    if given.get("use_cpu"):
        model["device"] = "cpu"
    for name, value in (given.get("model_init_kwargs") or {}).items():
        if value is None or (name, value) == ("revision", "main"):
            continue
        if name in ("dtype", "torch_dtype"):
            model["dtype"] = str(value).removeprefix("torch.")
        elif name == "trust_remote_code":
            model["trust_remote_code"] = value
        elif name in ("attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage"):
            tell(f"model_init_kwargs: {name}={value!r} has no meaning here: the trainer and the engine have their own.")
        else:
            raise ConfigError(
                f"model_init_kwargs: {name}={value!r} cannot be kept: load the model yourself and give it as `model`."
            )
    return {"model": model} if model else {}


def _generate(given: Mapping[str, Any]) -> dict[str, Any]:
    generate: dict[str, Any] = {}
    if given.get("use_vllm"):
        generate["engine"] = "vllm"
    for name, value in (given.get("generation_kwargs") or {}).items():
        if name not in ("temperature", "top_p", "top_k", "max_new_tokens", "min_new_tokens"):
            raise ConfigError(
                f"generation_kwargs: {name}={value!r} cannot be kept: it takes temperature, top_p, top_k, max_new_tokens "
                "and min_new_tokens."
            )
        generate[name] = value
    return {"generate": generate} if generate else {}


def _objective(given: Mapping[str, Any], own: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """The loss, and what belongs to its ratio."""
    objective: dict[str, Any] = {}
    loss = given.get("loss_type")
    if loss is not None:
        objective |= LOSSES.get(loss, {"name": loss})
    name = (own.get("objective") or {}).get("name", objective.get("name", "tb"))
    low, high = CLIPS.get(objective.get("surrogate", name), (None, None))
    used: dict[str, str | None] = {"epsilon": low, "epsilon_high": high}
    if low is not None and "epsilon" in given:
        objective[low] = given["epsilon"]
        if high is not None:
            objective[high] = given.get("epsilon_high", given["epsilon"])
    elif high is not None and "epsilon_high" in given:
        objective[high] = given["epsilon_high"]
    for trl, ours in RATIOS.items():
        if trl in given and name in ("grpo", "dr_grpo"):
            objective[ours] = given[trl]
        used[trl] = ours if name in ("grpo", "dr_grpo") else None
    scale = given.get("scale_rewards")
    used["scale_rewards"] = "scale_rewards" if name in ("grpo", "dr_grpo") else None
    if scale == "batch":
        raise ConfigError('scale_rewards="batch" cannot be kept: use "group" or "none".')
    if scale not in (None, True, False, "group", "none"):
        raise ConfigError(f'scale_rewards={scale!r} is no scale: use "group" or "none".')
    if scale is not None and name in ("grpo", "dr_grpo"):
        objective["scale_rewards"] = scale in (True, "group")
    for trl in [trl for trl, ours in used.items() if ours is None and given.get(trl, OFF.get(trl)) != OFF.get(trl)]:
        tell(
            f"{trl}={given[trl]!r} has no meaning for the objective {name}: it is of losses with a clipped ratio. Give "
            "loss_type as well."
        )
    if name in ("tb", "tb_learned_z") and given.get("beta") == 0:
        raise ConfigError(
            f"beta=0 cannot be kept for {name}: its target is the reference times exp(reward / beta). Leave beta out, or "
            'use loss_type="dr_grpo", which needs no reference.'
        )
    found: dict[str, Any] = {"objective": objective} if objective else {}
    if given.get("mask_truncated_completions"):
        found["train"] = {"truncated": "drop"}
    if given.get("sync_ref_model"):
        found["reference"] = {"reset_every": given.get("ref_model_sync_steps", 512)}
        if given.get("ref_model_mixup_alpha", 1.0) != 1.0:
            raise ConfigError(
                f"ref_model_mixup_alpha={given['ref_model_mixup_alpha']} cannot be kept: at a reset the policy becomes the "
                "reference as it is. Set it to 1."
            )
    return found


def _count(train: Mapping[str, Any], given: Mapping[str, Any], ours: str, trl: str, default: int) -> int:
    """A number from 1 on, of the section `train` or by TRL's name."""
    name, value = (f"train.{ours}", train[ours]) if ours in train else (trl, given.get(trl, default))
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise ConfigError(f"{name}={value!r} is no number from 1 on: write one, such as {default}.")
    return count


class Steps:
    """How many responses a step has, how many steps the run, and how many an epoch."""

    def __init__(self, given: Mapping[str, Any], own: Mapping[str, Any], num_rows: int | None) -> None:
        train = own.get("train") or {}
        self._given = given
        self.samples = _count(train, given, "samples_per_prompt", "num_generations", DEFAULTS.samples_per_prompt)
        self.responses = self._responses(given, ranks=int(train.get("ranks", 1)))
        responses = int(train.get("responses_per_step", self.responses or self._default(self.samples)))
        prompts = max(1, responses // self.samples)
        updates = _count(train, given, "updates_per_batch", "num_iterations", DEFAULTS.updates_per_batch)
        self.per_epoch = None if num_rows is None else max(1, math.ceil(num_rows / prompts)) * updates
        """Optimizer steps that visit every row once; None = not known yet."""
        asked, epochs = given.get("max_steps", -1), given.get("num_train_epochs")
        self._is_timed = train.get("max_seconds") is not None
        self.max_steps: int | None = train.get("max_steps") or (asked if asked and asked > 0 else None)
        if epochs is not None and not 0 < epochs < math.inf:
            raise ConfigError(f"num_train_epochs={epochs} is no number above 0: write one, such as 1, or max_steps.")
        if self.max_steps is None and epochs is not None and self.per_epoch is not None:
            self.max_steps = max(1, math.ceil(epochs * self.per_epoch))

    @staticmethod
    def _default(samples: int) -> int:
        """Our default, or the nearest number that holds whole groups."""
        return samples * max(1, round(DEFAULTS.responses_per_step / samples))

    def _responses(self, given: Mapping[str, Any], *, ranks: int) -> int | None:
        batch, accumulated = given.get("per_device_train_batch_size"), given.get("gradient_accumulation_steps")
        if batch is None and accumulated is None:
            return given.get("generation_batch_size")
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            if given.get(name) is not None and given[name] < 1:
                raise ConfigError(f"{name}={given[name]} is below 1: write 1 or more.")
        responses = (8 if batch is None else batch) * (accumulated or 1) * ranks
        if responses % self.samples:
            raise ConfigError(
                f"per_device_train_batch_size x gradient_accumulation_steps = {responses} responses of a step do not hold "
                f"whole groups of num_generations={self.samples}: make it a multiple."
            )
        return responses

    @property
    def length(self) -> int:
        """Number of steps of the run, for shares of it."""
        if self.max_steps is None and self._is_timed:
            raise ConfigError(
                "train.max_seconds leaves the number of steps open, and save_steps, eval_steps or warm-up is "
                "a share of it: give a number of steps there, or max_steps."
            )
        return self.max_steps or DEFAULT_STEPS

    @property
    def most(self) -> int:
        """As many steps as the run can have."""
        return self.max_steps or (sys.maxsize if self._is_timed else DEFAULT_STEPS)

    def of(self, name: str, value: float) -> int:
        """A number of steps; below 1 it is a share of the run."""
        if not value > 0 or (value > 1 and value != int(value)):
            raise ConfigError(
                f"{name}={value} is no number of steps: write a whole one, or a share of the run, 0 to 1."
            )
        if value >= 1:
            return int(value)
        return max(1, math.ceil(value * self.length))

    def every(self, what: str, *, default: float) -> int | None:
        """Steps between two events, `save` or `eval`: by their strategy `no` = None, `epoch` or `steps`."""
        strategy, steps = _strategy(self._given, f"{what}_strategy"), self._given.get(f"{what}_steps")
        if strategy == "no":
            return None
        if strategy == "epoch":
            return self.per_epoch or self.of(f"{what}_steps", default)
        return self.of(f"{what}_steps", steps if steps is not None else default)

    def sections(self) -> dict[str, Any]:
        train: dict[str, Any] = {}
        if self.responses is not None:
            train["responses_per_step"] = self.responses
        elif "num_generations" in self._given:
            train["responses_per_step"] = self._default(self.samples)
        if self.max_steps is not None:
            train["max_steps"] = self.max_steps
        return {"train": train} if train else {}


def _optimizer(given: Mapping[str, Any], steps: Steps, tell: Tell) -> dict[str, Any]:
    train: dict[str, Any] = {}
    name = _word(given.get("optim", "adamw"))
    if name not in ADAMW:
        raise ConfigError(f"optim={name!r} cannot be kept: the optimizer is AdamW. Use one of {', '.join(ADAMW)}.")
    if "adam_beta1" in given or "adam_beta2" in given:
        train["adam_betas"] = (given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999))
    if "max_grad_norm" in given:
        train["max_grad_norm"] = given["max_grad_norm"] or None
    kind = _word(given.get("lr_scheduler_type", "constant"))
    if not 0 <= (given.get("warmup_ratio") or 0) <= 1:
        raise ConfigError(f"warmup_ratio={given['warmup_ratio']} is no share of the run: write one from 0 to 1.")
    warmup = given.get("warmup_steps") or given.get("warmup_ratio") or 0
    rate = given.get("learning_rate")
    if kind not in SCHEDULES:
        raise ConfigError(f"lr_scheduler_type={kind!r} cannot be kept: use one of {', '.join(SCHEDULES)}.")
    if rate is None and ("lr_scheduler_type" in given or warmup):
        tell(
            "lr_scheduler_type and warm-up have no meaning without learning_rate: the rate then follows from how far an "
            "update moves the policy, and falls to zero at the end."
        )
    elif rate is not None and not isinstance(rate, (int, float)):
        train["learning_rate"] = rate
    elif rate is not None:
        options = _schedule_options(given.get("lr_scheduler_kwargs") or {}, kind)
        end = options.get("min_lr", options.get("min_lr_rate", 0.0) * rate)
        schedule: dict[str, Any] = {
            "kind": SCHEDULES[kind],
            "start": rate,
            "warmup_steps": steps.of("warmup_steps", warmup) if warmup else 0,
        }
        if SCHEDULES[kind] != "constant":
            schedule["end"] = end
        if "num_decay_steps" in options:
            schedule["decay_steps"] = options["num_decay_steps"]
        train["learning_rate"] = schedule
    return {"train": train} if train else {}


def _schedule_options(options: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Refuse options of a schedule that would change its shape and are not known here."""
    known = ("min_lr", "min_lr_rate", *(["num_decay_steps"] if kind == "warmup_stable_decay" else []))
    for name, value in options.items():
        if name not in known:
            raise ConfigError(
                f"lr_scheduler_kwargs: {name}={value!r} cannot be kept for {kind}: it takes {', '.join(known)}."
            )
    return options


def _reports(given: Mapping[str, Any], steps: Steps, tell: Tell) -> dict[str, Any]:
    """Checkpoints, evaluations, logs."""
    observe: dict[str, Any] = {}
    evaluate: dict[str, Any] = {}
    train: dict[str, Any] = {}
    if "save_strategy" in given or "save_steps" in given:
        is_best = _strategy(given, "save_strategy") == "best"
        train["checkpoint_every"] = None if is_best else steps.every("save", default=500)
    limit = given.get("save_total_limit", 0)
    train["keep_checkpoints"] = limit if limit > 0 else steps.most  # as many as can be
    if "eval_strategy" in given or "eval_steps" in given:
        default = given.get("logging_steps") or 500
        evaluate["every"] = steps.every("eval", default=default) or 0
    if "metric_for_best_model" in given:
        evaluate["best_metric"] = str(given["metric_for_best_model"]).removeprefix("eval_")
    if given.get("greater_is_better") is False:
        evaluate["lower_is_better"] = True
    _strategy(given, "logging_strategy")  # refuses what is no strategy; every step has a line
    if given.get("disable_tqdm") is not None:
        observe["progress"] = not given["disable_tqdm"]
    if "report_to" in given:
        observe["sinks"] = _sinks(given["report_to"], tell)
    parts = {"observe": observe, "evaluate": evaluate, "train": train}
    return {name: part for name, part in parts.items() if part}


def _sinks(report_to: Any, tell: Tell) -> list[str]:
    if not isinstance(report_to, Iterable):  # text is one too
        raise ConfigError(f"report_to={report_to!r} is no name or list of names: use {', '.join(SINKS)} or none.")
    wanted = [report_to] if isinstance(report_to, str) else list(report_to)
    if "all" in wanted:
        return [name for name in SINKS if importlib.util.find_spec(name) is not None]
    for name in wanted:
        if name not in (*SINKS, "none"):
            tell(f"report_to={name!r} has no meaning here: metrics go to metrics.jsonl, tensorboard or wandb.")
    return [name for name in SINKS if name in wanted]


def _strategy(given: Mapping[str, Any], name: str) -> str:
    """When something happens: the value of `save_strategy`, `eval_strategy` or `logging_strategy`."""
    known = ("no", "steps", "epoch", *(("best",) if name == "save_strategy" else ()))
    if (strategy := _word(given.get(name, "steps"))) not in known:
        raise ConfigError(f"{name}={strategy!r} is none of {', '.join(known)}: write one of them.")
    return strategy


def _word(value: Any) -> str:
    """One of transformers' enumerations, or the text that stands for it."""
    return str(getattr(value, "value", value))


def _nested(place: str, value: Any) -> dict[str, Any]:
    for part in reversed(place.split(".")):
        value = {part: value}
    return value
