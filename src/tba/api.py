"""The Python entry points, in the shape TRL's users know.

from tba import TBAConfig, TBATrainer

def score(completions, answer, **columns):
    return [float(text.strip() == want) for text, want in zip(completions, answer)]

trainer = TBATrainer(
    model="path/or/hub-name",
    reward_funcs=score,
    args=TBAConfig(max_steps=200, num_generations=8),
    train_dataset=[{"prompt": "2+2=", "answer": "4"}],
)
trainer.train()
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba.config import Config, load_config, merge

TRL_NAMES = {
    "output_dir": "output",
    "run_name": "name",
    "max_steps": "train.max_steps",
    "learning_rate": "train.learning_rate",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.max_grad_norm",
    "num_generations": "train.samples_per_prompt",
    "num_iterations": "train.updates_per_batch",
    "generation_batch_size": "train.responses_per_step",
    "save_steps": "train.checkpoint_every",
    "save_total_limit": "train.keep_checkpoints",
    "beta": "objective.beta",
    "temperature": "generate.temperature",
    "top_p": "generate.top_p",
    "top_k": "generate.top_k",
    "max_completion_length": "generate.max_new_tokens",
    "max_prompt_length": "task.max_prompt_tokens",
    "logging_steps": "observe.log_every",
    "eval_steps": "evaluate.every",
    "report_to": "observe.sinks",
}
"""TRL's argument names and the settings behind them."""


def TBAConfig(**settings: Any) -> Config:
    """A checked config. Takes TRL's names (`learning_rate=`), our sections (`train={...}`) and top-level keys (`seed=`)."""
    return load_config(None, (), **_nested(settings))


class TBATrainer:
    """Trains a model on your data with your rewards: the same run as `tba train --model --data --reward`."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Callable[..., Any] | str | Sequence[Callable[..., Any] | str],
        args: Config | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | str | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | str | None = None,
        processing_class: Any = None,
        reward_weights: Sequence[float] | None = None,
    ) -> None:
        """`model` is a folder, a hub name or a transformers model (then `processing_class` is its tokenizer); datasets are
        JSONL files, lists of rows or Hugging Face datasets."""
        if train_dataset is None:
            raise ValueError("train_dataset is missing: give a JSONL file, a list of rows or a dataset with `prompt`.")
        args = args if args is not None else TBAConfig()
        rewards = [reward_funcs] if callable(reward_funcs) or isinstance(reward_funcs, str) else list(reward_funcs)
        inputs = args.run_folder.with_name(args.run_folder.name + ".inputs")
        task = args.task.model_dump() | {
            "name": "custom",
            "data": _as_file(train_dataset, inputs / "train.jsonl"),
            "eval_data": None if eval_dataset is None else _as_file(eval_dataset, inputs / "eval.jsonl"),
            "rewards": _reward_configs(rewards, reward_weights),
        }
        settings = args.model_dump(mode="json")
        settings["task"], settings["model"]["path"] = task, _as_path(model, processing_class, inputs / "model")
        self.config = load_config(None, (), **settings)

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> dict[str, Any]:
        """Run to the end; returns what summary.json holds. `resume_from_checkpoint` continues this run from its newest
        checkpoint (True) or from the one that is named."""
        from tba.launch import train

        return train(self.config, resume=resume_from_checkpoint or False)


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """TRL's flat names into sections."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, key = TRL_NAMES.get(name, name).split(".")
        part: Any = {key: _sinks(value) if name == "report_to" else value}
        for section in reversed(sections):
            part = {section: part}
        nested = merge(nested, part)
    return nested


def _sinks(report_to: Any) -> list[str]:
    wanted = [report_to] if isinstance(report_to, str) else list(report_to or [])
    return [name for name in wanted if name != "none"]


def _reward_configs(
    rewards: Sequence[Callable[..., Any] | str], weights: Sequence[float] | None
) -> list[dict[str, Any]]:
    from tba.tasks.rewards.files import check_reward_function

    if not rewards:
        raise ValueError("reward_funcs is empty: give at least one function.")
    if weights is not None and len(weights) != len(rewards):
        raise ValueError(f"reward_weights has {len(weights)} numbers for {len(rewards)} reward_funcs: give one each.")
    for reward in rewards:
        check_reward_function(reward)  # a file or name that is wrong shows now, not when the run starts
    return [
        {"function": reward, "weight": 1.0 if weights is None else weights[index]}
        for index, reward in enumerate(rewards)
    ]


def _as_file(dataset: Iterable[Mapping[str, Any]] | str, path: Path) -> str:
    if isinstance(dataset, (str, Path)):
        return str(dataset)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(dict(row)) + "\n" for row in dataset), encoding="utf-8")
    return str(path)


def _as_path(model: Any, tokenizer: Any, path: Path) -> str:
    if isinstance(model, (str, Path)):
        return str(model)
    if tokenizer is None:
        raise ValueError("processing_class is missing: a model given as an object needs its tokenizer.")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
