"""TBATrainer: a script's model, data and rewards as a run, with the methods and attributes that TRL's users know.

The run is the one of `tba train`: a trainer in this process, searchers in processes of their own, a run folder. What a
script asks for afterwards (the trained model, an evaluation, samples) is read from the run folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba.api.callbacks import Callbacks
from tba.api.config import TBAConfig
from tba.api.inputs import dataset_file, lora_config, model_folder, reward_configs
from tba.api.model_card import model_card
from tba.api.names import TRAINER_ARGUMENTS
from tba.api.saving import copy_model, metric_lines, save_metrics, save_state
from tba.config import Config, ConfigError, TaskConfig, load_config
from tba.observe.contents import CARD
from tba.observe.files import RunFolder
from tba.tasks.custom import num_train_prompts
from tba.tasks.data.rows import SCRIPT_FOLDER


class TrainOutput(dict[str, Any]):
    """What summary.json holds, with the attributes of transformers' TrainOutput."""

    def __init__(self, summary: Mapping[str, Any], *, training_loss: float) -> None:
        super().__init__(summary)
        self.global_step: int = summary["steps"]
        self.training_loss = training_loss
        self.metrics: dict[str, Any] = {"train_runtime": summary["seconds"], "train_loss": training_loss, **summary}


class TBATrainer:
    """Trains a model on your data with your rewards: the same run as `tba train --model --data --reward`."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: TBAConfig | Config | Mapping[str, Any] | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | str | Path | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | str | Path | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        reward_weights: Sequence[float] | None = None,
        **others: Any,
    ) -> None:
        """`model` is a folder, a hub name or a transformers model; `reward_funcs` are functions, `file.py:name`, or reward
        models by name or as objects; datasets are JSONL files, lists of rows or Hugging Face datasets."""
        _check_others(others)
        if train_dataset is None:
            raise ConfigError("train_dataset is missing: give a JSONL file, a list of rows or a dataset with `prompt`.")
        self.args = TBAConfig.of(args)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._given_model, self._tokenizer = model, processing_class
        folder = self.args.run_folder
        self._inputs = inputs = folder.with_name(folder.name + SCRIPT_FOLDER)
        weights = reward_weights if reward_weights is not None else self.args.get("reward_weights")
        task = self.args.config.task.model_dump() | {
            "name": "custom",
            "data": dataset_file(train_dataset, inputs / "train.jsonl", what="train_dataset"),
            "eval_data": None
            if eval_dataset is None
            else dataset_file(eval_dataset, inputs / "eval.jsonl", what="eval_dataset"),
            "rewards": reward_configs(reward_funcs, weights, reward_processing_classes, inputs),
        }
        rows = num_train_prompts(TaskConfig(**task))
        settings = self.args.resolved(num_rows=rows).model_dump(mode="json")
        settings["output"], settings["name"] = str(folder.parent), folder.name
        settings["task"], settings["model"]["path"] = task, model_folder(model, processing_class, inputs / "model")
        settings["model"]["lora"] = lora_config(peft_config) or settings["model"]["lora"]
        self.config: Config = load_config(None, (), **settings)
        """The config of the run, in our names."""
        self._model: Any = None
        self._has_trained = False
        """Whether the checkpoints of the run folder are of this trainer, and not of an earlier run of that name."""
        train = self.config.train
        self._steps_per_epoch = rows / train.prompts_per_step * train.updates_per_batch if rows else None
        """Number of optimizer steps that visit every row once; None = the rows are not known."""
        self._handler = Callbacks(
            callbacks or (),
            args=self.args,
            state=self._new_state(),
            context=self._context,
            steps_per_epoch=self._steps_per_epoch,
        )

    # Training

    def train(
        self, resume_from_checkpoint: bool | str | Path | None = None, *, accept_lost_replay: bool = False
    ) -> TrainOutput:
        """Run to the end; returns what summary.json holds. `resume_from_checkpoint` continues this run from its newest
        checkpoint (True) or from the one that is named, with `accept_lost_replay` also where stored groups are lost."""
        from tba.launch import train

        if resume_from_checkpoint is None:
            resume_from_checkpoint = self.args.get("resume_from_checkpoint")
        self._model = None
        resume = resume_from_checkpoint or False
        summary = train(self.config, resume=resume, accept_lost_replay=accept_lost_replay, listener=self._handler)
        self._has_trained = True
        best = RunFolder(self.run_folder).checkpoints_by_step("best-step-")
        self.state.best_model_checkpoint = str(best[max(best)]) if best else None
        self._write_model_card(summary)
        self._return_weights()
        if self.args.get("push_to_hub"):
            self.push_to_hub()
        losses = [record["loss"] for record in self.state.log_history if "loss" in record]
        return TrainOutput(summary, training_loss=sum(losses) / max(1, len(losses)))

    @property
    def state(self) -> Any:
        """transformers' TrainerState: global_step, max_steps, log_history ..."""
        return self._handler.state

    @property
    def run_folder(self) -> Path:
        return self.config.run_folder

    def log(self, logs: Mapping[str, float]) -> None:
        """Add a record to `state.log_history`, and tell the callbacks."""
        self._handler.log(self.state.global_step, logs)

    def is_world_process_zero(self) -> bool:
        """Whether this is the process that saves and tells: it always is, the others of a run are started by it."""
        return True

    def is_local_process_zero(self) -> bool:
        return True

    def add_callback(self, callback: Any) -> None:
        self._handler.add(callback)

    def remove_callback(self, callback: Any) -> None:
        self._handler.remove(callback)

    def pop_callback(self, callback: Any) -> Any:
        return self._handler.remove(callback)

    # The model, before and after

    @property
    def model(self) -> Any:
        """The model as it was given before train(), with the trained weights after it."""
        if self._model is None:
            trained = self._trained_path()
            if not isinstance(self._given_model, (str, Path)):
                self._model = self._given_model
            else:
                self._model = _load(str(trained or self.config.model.path), self.config)
        return self._model

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        if self._tokenizer is None or isinstance(self._tokenizer, (str, Path)):
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(str(self._tokenizer or self.config.model.path))
        return self._tokenizer

    def evaluate(
        self,
        eval_dataset: Iterable[Mapping[str, Any]] | str | Path | None = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """The metrics of the weights there are, on the evaluation rows or on others: `eval_reward`, `eval_accuracy` ...
        `ignore_keys` is TRL's, and has no meaning here."""
        from tba.launch import evaluate

        path = str(self._trained_path() or self.config.model.path)
        config = self.config.model_copy(update={"model": self._model_config(path)})
        if eval_dataset is not None:
            data = dataset_file(eval_dataset, self._inputs / "evaluate.jsonl", what="eval_dataset")
            config = config.model_copy(update={"task": config.task.model_copy(update={"eval_data": data})})
        metrics, prefix = evaluate(config), f"{metric_key_prefix}_"
        self._handler.tell_evaluation(self.state.global_step, metrics, prefix=prefix)
        return {f"{prefix}{name}": value for name, value in metrics.items()}

    def generate(
        self, prompts: Sequence[str | list[dict[str, str]]], *, num_generations: int = 1, greedy: bool | None = None
    ) -> list[list[str]]:
        """Responses of the weights there are to prompts, of text or chat messages: for each prompt `num_generations` texts,
        greedy where one is asked for and sampled otherwise."""
        from tba.api.generate import generate

        if isinstance(prompts, str):
            raise ConfigError("prompts is a text: give a list of prompts, also for one.")
        path = str(self._trained_path() or self.config.model.path)
        config = self.config.model_copy(update={"model": self._model_config(path)})
        greedy = num_generations == 1 if greedy is None else greedy
        return generate(config, prompts, num_generations=num_generations, greedy=greedy)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the trained model with its tokenizer and card, as `from_pretrained` loads it. Without a folder it is written
        into the run folder, as in TRL."""
        source = self._trained_path()
        if source is None:
            raise ConfigError("there is no trained model yet: call train() first.")
        copy_model(source, Path(output_dir) if output_dir is not None else self.run_folder, self.run_folder)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics, such as those of train() or evaluate()."""
        print("\n".join(metric_lines(split, metrics)))

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write them to SPLIT_results.json in the run folder and, `combined`, into all_results.json there."""
        save_metrics(self.run_folder, split, metrics, combined=combined)

    def save_state(self) -> None:
        """Write `state` to trainer_state.json in the run folder."""
        save_state(self.run_folder, self.state)

    def push_to_hub(self, commit_message: str = "End of training", **options: Any) -> str:
        """Upload the trained model to the hub, through huggingface_hub; returns the address of the commit."""
        import tempfile

        from huggingface_hub import HfApi

        name = self.args.get("hub_model_id") or self.run_folder.name
        api = HfApi(token=self.args.get("hub_token"))
        with tempfile.TemporaryDirectory() as folder:
            self.save_model(folder)
            repository = api.create_repo(name, private=self.args.get("hub_private_repo"), exist_ok=True).repo_id
            revision = self.args.get("hub_revision")
            return str(
                api.upload_folder(
                    repo_id=repository, folder_path=folder, commit_message=commit_message, revision=revision, **options
                )
            )

    def create_model_card(self, *arguments: Any, **options: Any) -> None:
        """Nothing to do: train() writes a card beside the trained model, and save_model() copies it."""

    def _trained_path(self) -> Path | None:
        """The checkpoint whose weights count: the newest, or the best with load_best_model_at_end; None before train()."""
        if not self._has_trained:
            return None
        folder = RunFolder(self.run_folder)
        newest = folder.checkpoints_by_step()
        best = folder.checkpoints_by_step("best-step-")
        if self.args.get("load_best_model_at_end") and best:
            return best[max(best)]
        return newest[max(newest)] if newest else None

    def _model_config(self, path: str) -> Any:
        lora = None if (Path(path) / "adapter_config.json").is_file() else self.config.model.lora
        return self.config.model.model_copy(update={"path": path, "lora": lora})

    def _return_weights(self) -> None:
        """A model that was given as an object has the trained weights afterwards, as in TRL."""
        path = self._trained_path()
        if path is None or isinstance(self._given_model, (str, Path)):
            return
        if (path / "adapter_config.json").is_file():
            from peft import PeftModel

            self._model = PeftModel.from_pretrained(self._given_model, str(path))
            return
        self._given_model.load_state_dict(_load(str(path), self.config).state_dict())

    def _write_model_card(self, summary: Mapping[str, Any]) -> None:
        path = self._trained_path()
        if path is not None:
            (path / CARD).write_text(model_card(self.config, summary), encoding="utf-8")

    def _new_state(self) -> Any:
        from transformers import TrainerState

        train = self.config.train
        state = TrainerState(max_steps=train.max_steps, logging_steps=self.config.observe.log_every)
        steps = self._steps_per_epoch
        state.num_train_epochs = 0 if steps is None else math.ceil(train.max_steps / steps)
        return state

    def _context(self) -> dict[str, Any]:
        """Model and tokenizer for callbacks outside of a run: None where they are known by name only."""
        known = {"model": self._model or self._given_model, "processing_class": self._tokenizer}
        return {name: None if isinstance(value, (str, Path)) else value for name, value in known.items()}


def _check_others(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name not in TRAINER_ARGUMENTS:
            raise ConfigError(
                f"TBATrainer has no argument {name}: it takes {', '.join(TRAINER_ARGUMENTS)} and reward_weights."
            )
        found = TRAINER_ARGUMENTS[name]
        if not any(value is off or (type(value) is type(off) and value == off) for off in found.off):
            raise ConfigError(f"{name} cannot be kept: {found.words}.")


def _load(path: str, config: Config) -> Any:
    from tba.models.load import load_model

    return load_model(config.model.model_copy(update={"path": path})).model
