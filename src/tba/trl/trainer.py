"""TBATrainer: a script's model, data and rewards as a run, with the methods and attributes that TRL's users know.

The run is the one of `tba train`: a trainer in this process, searchers in processes of their own, a run folder. What a
script asks for afterwards (the trained model, an evaluation, samples) is read from the run folder.
"""

from __future__ import annotations

import difflib
import logging
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import TrainerState, trainer_pt_utils
from transformers.trainer_utils import TrainOutput as TransformersOutput

from tba.config import Config, ConfigError, TaskConfig, load_config
from tba.config.trl_names import ARGUMENTS, REFUSED_ARGUMENTS, with_python_messages
from tba.observe.files import check_sinks, read_summary
from tba.observe.recorder import past_lines
from tba.observe.run_folder import CARD, RunFolder
from tba.tasks.custom import is_chat, num_train_prompts
from tba.tasks.data.rows import SCRIPT_FOLDER
from tba.trl.callbacks import Callbacks
from tba.trl.config import TBAConfig
from tba.trl.files import (
    copy_model,
    dataset_file,
    environment_code,
    flat,
    link_checkpoints,
    list_as_saved,
    lora_config,
    model_card,
    model_folder,
    reward_configs,
)

logger = logging.getLogger("tba")


class TrainOutput(TransformersOutput):
    """transformers' TrainOutput: global_step, training_loss, metrics. By name it gives a metric: `output["final"]`."""

    def __getitem__(self, key: Any) -> Any:
        return self.metrics[key] if isinstance(key, str) else super().__getitem__(key)


class TBATrainer:
    """Trains a model on your data with your rewards: the same run as `tba train --model --data --reward`."""

    @with_python_messages()
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
        tools: Sequence[Any] | None = None,
        environment_factory: Any = None,
        agent: Any = None,
        **others: Any,
    ) -> None:
        """`model` is a folder, a hub name or a transformers model; `reward_funcs` are functions, `file.py:name`, or reward
        models by name or as objects; datasets are JSONL files, lists of rows or Hugging Face datasets. `tools` and
        `environment_factory` are what the policy talks to, `agent` is a function that talks to it (docs/environments.md)."""
        _refuse(others)
        environment = environment_code(environment_factory, tools, agent)
        plays = bool(environment["classes"] or agent)
        if train_dataset is None and not plays:
            raise ConfigError("train_dataset is missing: give a JSONL file, a list of rows or a dataset with `prompt`.")
        # Order: refuse what is cheap to see, write the data, count its rows, resolve steps and epochs by them.
        self.args = TBAConfig.of(args)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._tokenizer = processing_class
        # Beside the run folder, not in it: a run that begins anew moves or removes its folder, and these are read again.
        folder = self.args.run_folder
        self._inputs = inputs = folder.with_name(folder.name + SCRIPT_FOLDER)
        weights = reward_weights if reward_weights is not None else self.args.reward_weights
        task = self.args.config.task.model_dump() | {
            "name": "custom",
            "data": dataset_file(train_dataset, inputs / "train.jsonl", what="train_dataset"),
            "eval_data": dataset_file(eval_dataset, inputs / "eval.jsonl", what="eval_dataset"),
            "rewards": reward_configs(reward_funcs, weights, reward_processing_classes, inputs, optional=plays),
        }
        task["environment"] = task["environment"] | environment
        # Epochs become steps by the rows that are trained on, held-out ones not counted.
        rows = num_train_prompts(TaskConfig(**task))
        settings = self.args.resolved(num_rows=rows).model_dump(mode="json")
        # The dumped task would have functions by name only; `task` holds the functions themselves.
        settings |= {"task": task, "output": str(folder.parent), "name": folder.name}
        # A model object is saved: searchers are other processes and load it from there.
        settings["model"]["path"] = model_folder(model, processing_class, inputs / "model")
        settings["model"]["lora"] = lora_config(peft_config) or settings["model"]["lora"]
        self.config: Config = load_config(None, (), **settings)
        """The config of the run, in our names."""
        check_sinks(self.config)
        self._by_name = isinstance(model, (str, Path))
        # A script's own object is kept, so that it holds the trained weights after train(), as in TRL.
        self._model: Any = None if self._by_name else self._adapted(model)
        self._has_trained = False
        """Whether the checkpoints of the run folder are of this trainer, and not of an earlier run of that name."""
        self.hub_model_id: str | None = None
        """The repository on the hub, once it is there."""
        if self.args.push_to_hub:
            self._make_repository()  # what is wrong with the hub shows before training
        train = self.config.train
        # Optimizer steps that draw every row once; None = the rows are not known.
        epoch = rows / train.prompts_per_step * train.updates_per_batch if rows else None
        steps = train.max_steps or 0
        state = TrainerState(max_steps=steps, logging_steps=1)
        state.num_train_epochs = 0 if epoch is None else math.ceil(steps / epoch)
        given = callbacks if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
        self._handler = Callbacks(given, args=self.args, state=state, context=self._context, steps_per_epoch=epoch)

    # Training

    @with_python_messages()
    def train(
        self, resume_from_checkpoint: bool | str | Path | None = None, *, accept_lost_replay: bool = False
    ) -> TrainOutput:
        """Run to the end. `resume_from_checkpoint` continues this run from its newest checkpoint (True) or from the one that
        is named, with `accept_lost_replay` also where stored groups are lost; without it an earlier run in the folder is
        moved aside."""
        from tba.run import train
        from tba.run.resume import RunFinished

        if resume_from_checkpoint is None:
            resume_from_checkpoint = self.args.resume_from_checkpoint
        if resume_from_checkpoint:
            link_checkpoints(self.run_folder)  # a run that was killed may lack one
        if self._by_name:
            self._model = None  # its memory is the run's now
        try:
            summary = train(
                self.config,
                resume=resume_from_checkpoint or False,
                accept_lost_replay=accept_lost_replay,
                listener=self._handler,
                keep_earlier=True,
            )
        except RunFinished:  # as in TRL: there is no step left to make
            folder = RunFolder(self.run_folder)
            summary = read_summary(folder) or {}
            self._handler.recall(past_lines(self.config, folder))
            self.state.global_step = summary["steps"]
        finally:
            link_checkpoints(self.run_folder)
        # Also after RunFinished: the checkpoints are those of this config's run.
        self._has_trained = True
        best = RunFolder(self.run_folder).checkpoints_by_step("best-step-")
        self.state.best_model_checkpoint = str(best[max(best)]) if best else None
        if (path := self._trained_path()) is not None:
            (path / CARD).write_text(model_card(self.config, summary), encoding="utf-8")
        # Not loaded otherwise: most scripts only save, and the model may be large.
        if self._model is not None:
            self._load_trained()
        if self.args.push_to_hub:
            try:
                self.push_to_hub()
            except Exception as error:  # the hub's trouble must not cost the script the rest of its lines
                message = (
                    "the trained model could not be pushed to %s (%s): it is %s. Call trainer.push_to_hub() again."
                )
                logger.error(message, self.hub_model_id, error, self._trained_path())
        losses = [record["loss"] for record in self.state.log_history if "loss" in record]
        loss, seconds = sum(losses) / max(1, len(losses)), summary["seconds"]
        metrics = {
            "train_runtime": seconds,
            "train_samples_per_second": round(summary["responses_trained"] / seconds, 3) if seconds else 0.0,
            "train_steps_per_second": round(summary["steps"] / seconds, 3) if seconds else 0.0,
            "train_loss": loss,
            **summary,
        }
        return TrainOutput(summary["steps"], loss, metrics)

    @property
    def state(self) -> Any:
        """transformers' TrainerState."""
        return self._handler.state

    @property
    def run_folder(self) -> Path:
        return self.config.run_folder

    def log(self, logs: Mapping[str, float]) -> None:
        """Add a record to `state.log_history` and call on_log."""
        self._handler.log(self.state.global_step, logs)

    def is_world_process_zero(self) -> bool:
        """Whether this process saves and reports. It always does: it starts the other processes of a run."""
        return True

    is_local_process_zero = is_world_process_zero

    @cached_property
    def accelerator(self) -> Any:
        """accelerate's Accelerator of this process. The run needs none: it is for scripts that print or wait by it."""
        from accelerate import Accelerator

        return Accelerator(cpu=self.args.use_cpu)

    def end(self) -> None:
        """Nothing to do: all processes of a run have ended when train() returns."""

    def add_callback(self, callback: Any) -> None:
        self._handler.add(callback)

    def remove_callback(self, callback: Any) -> None:
        self._handler.remove(callback)

    def pop_callback(self, callback: Any) -> Any:
        return self._handler.remove(callback)

    # The model, before and after

    @property
    def model(self) -> Any:
        """The start model before train(), with the trained weights after it; with peft_config a PeftModel."""
        if self._model is None:
            start = self.config.model.path
            # With LoRA the checkpoint is an adapter: base first, its trained weights by _load_trained.
            path = start if self.config.model.lora is not None else self._trained_path() or start
            self._model = self._adapted(self._loaded(str(path)))
            self._load_trained()
        return self._model

    def _loaded(self, path: str) -> Any:
        from tba.models.load import load_model

        return load_model(self.config.model.model_copy(update={"path": path})).model

    def _adapted(self, model: Any) -> Any:
        if self.config.model.lora is None:
            return model
        from tba.models.load import add_lora

        return add_lora(model, self.config.model.lora, base=self.config.model.path, seed=self.config.seed)

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        if self._tokenizer is None or isinstance(self._tokenizer, (str, Path)):
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(str(self._tokenizer or self.config.model.path))
        return self._tokenizer

    @with_python_messages()
    def evaluate(
        self,
        eval_dataset: Iterable[Mapping[str, Any]] | str | Path | None = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """The metrics of the weights there are, on the evaluation rows or on others: `eval_reward`, `eval_accuracy` ...
        `ignore_keys` is TRL's, and has no meaning here."""
        from tba.run import evaluate

        config = self._config_of_weights()
        if eval_dataset is not None:
            data = dataset_file(eval_dataset, self._inputs / "evaluate.jsonl", what="eval_dataset")
            config = config.model_copy(update={"task": config.task.model_copy(update={"eval_data": data})})
        metrics, prefix = evaluate(config), f"{metric_key_prefix}_"
        self._handler.report_evaluation(self.state.global_step, metrics, prefix=prefix)
        return {f"{prefix}{name}": value for name, value in metrics.items()}

    @with_python_messages()
    def generate(
        self, prompts: Sequence[str | list[dict[str, str]]], *, num_generations: int = 1, greedy: bool | None = None
    ) -> list[list[str]]:
        """Responses of the weights there are to prompts, of text or chat messages: for each prompt `num_generations` texts,
        greedy where one is asked for and sampled otherwise."""
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise ConfigError(f"prompts is a {type(prompts).__name__}: give a list of prompts, also for one.")
        for index, prompt in enumerate(prompts):
            if not isinstance(prompt, str) and not is_chat(prompt):
                raise ConfigError(f"prompts[{index}] is {prompt!r:.80}: give text or a list of chat messages.")
        if not isinstance(num_generations, int) or num_generations < 1:
            raise ConfigError(f"num_generations={num_generations!r} must be a whole number, at least 1.")
        from tba.run import generate

        greedy = num_generations == 1 if greedy is None else greedy
        return generate(self._config_of_weights(), prompts, num_generations=num_generations, greedy=greedy)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the trained model with its tokenizer and card, as `from_pretrained` loads it. Without a folder it is written
        into the run folder, as in TRL."""
        source = self._trained_path()
        if source is None:
            raise ConfigError("there is no trained model yet: call train() first.")
        copy_model(source, Path(output_dir) if output_dir is not None else self.run_folder, self.run_folder)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics, such as those of train() or evaluate()."""
        trainer_pt_utils.log_metrics(self, split, flat(metrics))

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write them to SPLIT_results.json in the run folder and, `combined`, into all_results.json there."""
        list_as_saved(self.run_folder, f"{split}_results.json", *(["all_results.json"] if combined else []))
        trainer_pt_utils.save_metrics(self, split, dict(metrics), combined)

    def save_state(self) -> None:
        """Write `state` to trainer_state.json in the run folder."""
        list_as_saved(self.run_folder, "trainer_state.json")
        trainer_pt_utils.save_state(self)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> Any:
        """Upload the trained model to the hub, through huggingface_hub; returns the commit, once it is done. `card` is
        for TRL's model card: the card here is made of the run."""
        hub = self._make_repository(token, private)
        # The checkpoint's folder also holds optimizer state: what is pushed is what save_model writes.
        with tempfile.TemporaryDirectory() as folder:
            self.save_model(folder)
            return hub.upload_folder(
                repo_id=str(self.hub_model_id),
                folder_path=folder,
                commit_message=commit_message,
                revision=revision or self.args.hub_revision,
            )

    def _make_repository(self, token: str | None = None, private: bool | None = None) -> HfApi:
        """The hub, with the repository of the trained model on it."""
        hub = HfApi(token=token or self.args.hub_token)
        if self.hub_model_id is None:
            name = self.args.hub_model_id or self.run_folder.absolute().name
            private = self.args.hub_private_repo if private is None else private
            self.hub_model_id = hub.create_repo(name, private=private, exist_ok=True).repo_id
        return hub

    def create_model_card(self, *arguments: Any, **options: Any) -> None:
        """Nothing to do: train() writes a card beside the trained model, and save_model() copies it."""

    def _trained_path(self) -> Path | None:
        """The checkpoint whose weights count: the newest, or the best with load_best_model_at_end; None before train()."""
        if not self._has_trained:
            return None
        folder = RunFolder(self.run_folder)
        if not folder.checkpoints.is_dir():
            raise ConfigError(
                f"the trained weights are gone: {folder.checkpoints} is not there any more. Call train() again."
            )
        best = folder.checkpoints_by_step("best-step-") if self.args.load_best_model_at_end else {}
        found = best or folder.checkpoints_by_step()
        return found[max(found)] if found else None

    def _config_of_weights(self) -> Config:
        """The config of the run with the trained weights as its model, the start model before train()."""
        path, model = str(self._trained_path() or self.config.model.path), self.config.model
        # A trained adapter is loaded by its own config: `lora` would put a new one on top.
        lora = None if (Path(path) / "adapter_config.json").is_file() else model.lora
        return self.config.model_copy(update={"model": model.model_copy(update={"path": path, "lora": lora})})

    def _load_trained(self) -> None:
        """Put the trained weights into the model that a script has, as in TRL."""
        path = self._trained_path()
        if path is None:
            return
        if self.config.model.lora is not None:
            from peft import load_peft_weights, set_peft_model_state_dict

            set_peft_model_state_dict(self._model, load_peft_weights(str(path), device="cpu"))
        elif not self._by_name:  # by its name it was loaded from there
            # In place: the script's other references to the object see the trained weights.
            self._model.load_state_dict(self._loaded(str(path)).state_dict())

    def _context(self) -> dict[str, Any]:
        """Model and tokenizer for callbacks outside of a run: None where they are known by name only."""
        by_name = isinstance(self._tokenizer, (str, Path))
        return {"model": self._model, "processing_class": None if by_name else self._tokenizer}


def _refuse(others: Mapping[str, Any]) -> None:
    """Refuse arguments of GRPOTrainer that ask for something that there is not here."""
    for name, value in others.items():
        if name not in REFUSED_ARGUMENTS:
            meant = difflib.get_close_matches(name, ARGUMENTS, n=1)
            meant += [
                known for known, text in ARGUMENTS.items() if text.startswith(name)
            ]  # tokenizer: processing_class
            hint = f"did you mean {meant[0]}?" if meant else f"it takes {', '.join(ARGUMENTS)} and reward_weights."
            raise ConfigError(f"TBATrainer has no argument {name}: {hint}")
        if value and value != (None, None):
            raise ConfigError(f"{name} cannot be kept: {REFUSED_ARGUMENTS[name]}.")
