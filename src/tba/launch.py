"""From a config to a finished run: make the roles, let them take turns, write the summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.config import Config, dump_config, load_config
from tba.evaluate.run import evaluate
from tba.generate.engine import Engine
from tba.models.load import load_model
from tba.observe.files import RunFolder, write_atomic
from tba.observe.recorder import Recorder
from tba.runtime.channels import LocalGroups, LocalWeights
from tba.search.loop import Searcher, training_sampling
from tba.search.make import make_search_engine, make_searcher
from tba.tasks.base import Task
from tba.tasks.registry import make_task
from tba.train.loop import Trainer
from tba.train.make import make_trainer
from tba.types import Prompt

def train(config: Config) -> dict[str, Any]:
    """Run a training and return what summary.json holds."""
    folder = RunFolder.create(config.run_folder, overwrite=config.overwrite)
    write_atomic(folder.config, dump_config(config))
    run = make_sync_run(config, folder)
    try:
        run.run()
        return run.trainer.recorder.finish()
    finally:
        run.trainer.recorder.close()


@dataclass
class SyncRun:
    """Searcher and trainer in one process, in turn: every step trains on responses of the current weights."""

    config: Config
    searcher: Searcher
    trainer: Trainer
    engine: Engine
    task: Task
    held_out: Sequence[Prompt]

    def run(self) -> None:
        self.evaluate()
        while not self.trainer.done:
            self.step()
            if self._evaluation_due():
                self.evaluate()

    def step(self) -> None:
        self.trainer.recorder.training_starts()
        self.searcher.step(self.config.train.prompts_per_step)
        self.trainer.step()

    def evaluate(self) -> None:
        if not self.held_out:
            return
        metrics = evaluate(
            self.engine,
            self.task,
            self.searcher.scorer.tokenizer,
            prompts=self.held_out,
            sampling=training_sampling(self.config),
            samples_per_prompt=self.config.evaluate.samples_per_prompt,
        )
        self.trainer.recorder.evaluation(self.trainer.step_index, metrics)

    def _evaluation_due(self) -> bool:
        every, step = self.config.evaluate.every, self.trainer.step_index
        return self.trainer.done or (every is not None and step % every == 0)


def make_sync_run(config: Config, folder: RunFolder) -> SyncRun:
    """Load the model once and build both roles around it; engine and reference copy its weights as they are now."""
    loaded = load_model(config.model)
    task = make_task(config.task, loaded.tokenizer, max_prompt_tokens=max_prompt_tokens(config, loaded.context))
    engine = make_search_engine(config, loaded)
    groups = LocalGroups()
    searcher = make_searcher(config, loaded, task, engine, groups)
    recorder = Recorder(config, folder, decode=searcher.scorer.group_texts)
    trainer = make_trainer(config, loaded, task, groups, LocalWeights(engine.load), recorder)
    held_out = task.prompts("held_out")[: config.evaluate.num_prompts]
    return SyncRun(config, searcher, trainer, engine, task, held_out)


def evaluate_model(target: str, overrides: Sequence[str]) -> dict[str, float]:
    """Evaluate a run's newest checkpoint with the run's own settings, or any model with the defaults."""
    folder = RunFolder(Path(target))
    if folder.config.is_file():
        config = load_config(folder.config, [*overrides, f"model.path={folder.newest_checkpoint()}"])
    else:
        config = load_config(None, [*overrides, f"model.path={target}"])
    loaded = load_model(config.model)
    task = make_task(config.task, loaded.tokenizer, max_prompt_tokens=max_prompt_tokens(config, loaded.context))
    return evaluate(
        make_search_engine(config, loaded),
        task,
        loaded.tokenizer,
        prompts=task.prompts("held_out")[: config.evaluate.num_prompts],
        sampling=training_sampling(config),
        samples_per_prompt=config.evaluate.samples_per_prompt,
    )


def max_prompt_tokens(config: Config, context: int) -> int:
    """What the model's context leaves for the prompt, or the configured limit if that is smaller."""
    room = context - config.generate.max_new_tokens
    if room < 1:
        raise ValueError(
            f"generate.max_new_tokens={config.generate.max_new_tokens} leaves no room for a prompt in the model's context "
            f"of {context} tokens: lower it."
        )
    return min(room, config.task.max_prompt_tokens or room)
