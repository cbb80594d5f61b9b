"""From a config to a finished run: load, make the roles, run, stop everything."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tba.config import Config, ConfigError, ModelConfig, dump_config, load_config
from tba.engine.contract import Scorer
from tba.engine.make_engine import make_scorer
from tba.engine.sampling import training_sampling
from tba.models.load import base_of, is_adapter, load_model, use_cpu
from tba.objectives.registry import make_objective
from tba.observe.display import show_line, show_summary, steps_text
from tba.observe.files import WriteFailures, check_new_folder, report_failure, write_atomic
from tba.observe.recorder import RunListener
from tba.observe.run_folder import RunFolder
from tba.run.checks import (
    check_before_loading,
    check_capacity,
    check_devices,
    check_inputs,
    run_of,
    task_to_evaluate,
    with_trusted_code,
)
from tba.run.imports import import_groups
from tba.run.memory import Machine, ModelShape
from tba.run.modes import AsyncRun, RunInputs, SyncRun, load_inputs, runtimes
from tba.run.rank_processes import ranks_of
from tba.run.resolve import resolve
from tba.run.resume import check_replay, checkpoint_to_resume, resumed_config
from tba.run.status import stopped_message
from tba.run.supervise import Host, hosted
from tba.runtime.channels import WaitedTooLong
from tba.runtime.counters import SharedCounters, SharedMemory
from tba.runtime.deadlines import stacks_to
from tba.runtime.placement import lower_mps_priority, start_mps, threads_alone, threads_of
from tba.runtime.processes import prepare_roles
from tba.searcher.loop import make_search_engine
from tba.tasks.data.make_prompt import make_prompt
from tba.tasks.evaluation import AnswerEvaluator, make_evaluator, respond
from tba.tasks.rewards.pool import make_rewards
from tba.tasks.rewards.sources import copy_sources
from tba.tasks.task import KeepResponses
from tba.trainer.health import Collapsed
from tba.trainer.sharded import RankLost
from tba.types import TrajectoryGroup

logger = logging.getLogger("tba")


def train(
    config: Config,
    *,
    resume: bool | str | Path = False,
    accept_lost_replay: bool = False,
    host: Host | None = None,
    listener: RunListener | None = None,
    keep_earlier: bool = False,
) -> dict[str, Any]:
    """Run a training and return what summary.json holds. After Ctrl-C it is saved as far as it came, then raised again.

    `resume` continues the run of this config from its newest whole checkpoint, or from the one that is named, with
    `accept_lost_replay` also where its durable replay has lost groups. `host` is where the trainer runs under a supervisor;
    None = this process gets one. `listener` is called at each event. `keep_earlier`
    moves an earlier run in the folder to a folder in there, where config.overwrite does not replace it.
    """
    if host is None and config.replay.durability == "node":
        raise ConfigError(
            "replay.durability=node needs a trainer on another node, and here it is in this process: start the run with "
            "`tba train`, or use replay.durability=power."
        )
    keep_earlier = keep_earlier and not config.overwrite
    check_before_loading(config, resume=bool(resume), keep_earlier=keep_earlier)
    folder, listener = RunFolder(config.run_folder), listener or RunListener()
    folder.claim(holder=None if host is None else host.owner)  # before anything in there is looked at or changed
    try:
        return _load_and_train(config, folder, resume, accept_lost_replay, keep_earlier, host, listener)
    finally:
        if host is None:  # otherwise the supervisor has the folder, until the run is over for good
            folder.release()


def _load_and_train(
    config: Config,
    folder: RunFolder,
    resume: bool | str | Path,
    accept_lost_replay: bool,
    keep_earlier: bool,
    host: Host | None,
    listener: RunListener,
) -> dict[str, Any]:
    """Train in a folder that is claimed."""
    began = time.perf_counter()
    use_cpu(threads_of(config).trainer)
    checkpoint = None
    if resume:
        folder.reopen()
        config = resumed_config(config, folder)
        checkpoint = checkpoint_to_resume(folder, config, resume)
        check_replay(config, folder, checkpoint, accept_lost=accept_lost_replay)
    make_objective(config)  # refuses senseless combinations before a model loads
    if host is None:
        start_mps(config)  # before anything touches the GPU
        if not config.is_synchronous:
            prepare_roles()  # early, so that the roles' imports run beside the loading of the model
    else:
        lower_mps_priority(config)  # this process is the trainer's alone
    check_devices(config)
    if config.observe.progress:
        adapter = is_adapter(Path(config.model.path))
        merged = f" (an adapter, merged into {base_of(Path(config.model.path))})" if adapter else ""
        show_line(f"loading {config.model.path}{merged} and the data")
    inputs = load_inputs(config)
    # Bad train rows show here, before anything is written.
    check_capacity(config, num_prompts=len(inputs.task.prompts("train")))
    longest = partial(inputs.longest_prompt, "train", config.evaluate.split)
    config = resolve(config, ModelShape.of(inputs.loaded), Machine.found(config), longest_prompt=longest)
    use_cpu(threads_of(config).trainer)  # once more: now the number of searchers is known
    # While the model is still the reference. The replay buffer of a checkpoint holds what was imported.
    imported = import_groups(config, inputs) if checkpoint is None else []
    # Only once model, data, memory plan and imports are accepted: an earlier run is replaced or moved aside here.
    if not resume:
        folder.clear(overwrite=config.overwrite, keep_earlier=keep_earlier)
    listener.tokenizer = inputs.loaded.tokenizer
    try:
        with (
            stacks_to(folder.logs / "trainer.log"),
            ranks_of(config, folder.logs) as ranks,
            hosted(folder) if host is None else nullcontext(host) as found,
        ):
            counters = SharedCounters(SharedMemory.attach(found.counters))
            with runtimes(config, found, counters, folder.logs) as make_runtime:
                _describe(config, folder, inputs)
                run: SyncRun | AsyncRun
                if config.is_synchronous:
                    run = SyncRun.make(config, folder, inputs, counters, checkpoint, listener)
                else:
                    run = AsyncRun.make(config, folder, inputs, make_runtime, checkpoint, ranks, listener)
                run.recorder.began = began
                if checkpoint is not None:
                    run.recorder.note(f"{folder.path} goes on from {steps_text(config, run.trainer.step_index)}.")
                return _run(run, imported)
    except KeyboardInterrupt as stopped:
        raise KeyboardInterrupt(stopped_message(config, by_command=host is not None)) from stopped
    except Exception as error:
        report_failure(folder, error)
        raise
    finally:
        listener.model = listener.tokenizer = None


def _describe(config: Config, folder: RunFolder, inputs: RunInputs) -> None:
    """Write down what the run is. Here it begins: a config in its folder says that it has."""
    # Or a run that goes on would look finished.
    folder.summary.unlink(missing_ok=True)
    write_atomic(folder.config, dump_config(config))
    with WriteFailures().tolerated("copies of the rewards' files in", folder.sources):
        copy_sources(config, folder)
    message = getattr(inputs.task, "split_message", None)
    if message is not None and config.observe.progress:
        limit, number = config.evaluate.num_prompts, len(inputs.task.prompts(config.evaluate.split))
        few = f" An evaluation takes the first {limit} of these (evaluate.num_prompts)." if limit < number else ""
        show_line(f"{folder.path} {message}{few}")


def _run(run: SyncRun | AsyncRun, imported: Sequence[TrajectoryGroup]) -> dict[str, Any]:
    """Run to the end, also where that is an error; returns what summary.json holds."""
    config, folder = run.config, run.recorder.folder
    try:
        # Not counted as generated, which the replay ratio is measured by, and of no rollout of the prompt queue.
        for group in imported:
            run.trainer.add(group)
        try:
            run.run()
        except BaseException as error:
            if isinstance(error, WaitedTooLong) and isinstance(run, AsyncRun):
                # While the searchers still live: their stacks show where they stand still.
                run.runtime.pool.show_stacks()
            # It leaves what it has: weights, where they are sound, and a summary of how it ended.
            at_once, collapsed = not isinstance(error, Exception), isinstance(error, Collapsed)  # asked to end twice
            step = run.trainer.step_index
            try:
                if not at_once and not collapsed and step > 0 and run.trainer.weights_are_consistent:
                    run.trainer.checkpoints.save(step)
            except Exception as lost:  # logged only: it must not hide the error that ended the run
                logger.error("step %d could not be saved: %s: %s", step, type(lost).__name__, lost)
            shown = None if at_once else error
            run.recorder.finish("collapsed" if collapsed else "interrupted" if at_once else "failed", shown)
            raise
        if run.interrupt.asked:
            run.trainer.checkpoints.save(run.trainer.step_index)
        with run.recorder.failures.tolerated("checkpoints to drop in", folder.checkpoints):
            run.trainer.checkpoints.drop_outdone()
        summary = run.recorder.finish("interrupted" if run.interrupt.asked else "finished")
    finally:
        try:
            with run.recorder.failures.tolerated("checkpoints in", folder.checkpoints):
                run.trainer.checkpoints.drop_unjudged()
            run.trainer.checkpoints.close()
        finally:
            run.close()
    run.listener.ends(run.trainer.step_index)
    if run.interrupt.asked:
        run.recorder.failures.raise_lost(interrupted=True)
        raise KeyboardInterrupt
    if config.observe.progress:
        show_summary(summary, run.recorder.curve(), folder.path, config=config)
    # Last: the results are written and shown, and the exit status still says that files are missing.
    run.recorder.failures.raise_lost()
    return summary


def is_retryable(error: RuntimeError) -> bool:
    """Whether a new trainer may not meet an error again: the GPU failed, or a rank is gone."""
    lost = isinstance(error, (RankLost, *filter(None, [getattr(torch, "AcceleratorError", None)])))
    return lost or "CUDA error" in str(error)


def merge_adapter(target: str, output: Path) -> dict[str, str]:
    """Write the base model with a run's newest (or a given) LoRA adapter merged in."""
    folder = RunFolder(Path(target))
    path = Path(folder.newest_checkpoint()) if folder.config.is_file() else Path(target)
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}: give a LoRA checkpoint, or the run that made it.")
    if not is_adapter(path):
        raise ValueError(f"{path} holds no LoRA adapter (adapter_config.json): nothing to merge.")
    check_new_folder(output)
    loaded = load_model(ModelConfig(path=str(path), device="cpu"))
    loaded.model.save_pretrained(output)
    loaded.tokenizer.save_pretrained(output)
    return {"adapter": str(path), "base": base_of(path), "model": str(output)}


def evaluate_model(target: str, overrides: Sequence[str], *, keep: KeepResponses | None = None) -> dict[str, float]:
    """Evaluate a run's newest checkpoint, or the one that is named, with the run's own settings, or any model with the
    defaults, on the task that is given or its own; see `evaluate`."""
    if any(override.startswith("model.path=") for override in overrides):
        raise ConfigError(f"model.path cannot be set here: the model is {target}. Give another one in its place.")
    task, path, folder = task_to_evaluate(target, overrides), Path(target), run_of(target)
    start: Callable[[], Scorer] | None = None
    if folder is not None:
        weights = folder.newest_checkpoint() if folder.path == path else path
        if not folder.config.stat().st_size:  # the defaults would be another task
            raise ConfigError(f"{folder.config} is empty: copy it again, or evaluate {weights} elsewhere with --task.")
        config = load_config(folder.config, [*overrides, f"model.path={weights}"])
        config = with_trusted_code(config, folder, overrides)
        model = load_config(folder.config, overrides).model

        def start() -> Scorer:
            loaded = load_model(model)
            return make_scorer(loaded.model, max_length=loaded.context)

    else:
        own = [] if task is None else [f"task.name={task}"]
        config = load_config(None, [*overrides, *own, f"model.path={target}"])
    return evaluate(config, start=start, keep=keep)


def evaluate(
    config: Config, *, start: Callable[[], Scorer] | None = None, keep: KeepResponses | None = None
) -> dict[str, float]:
    """Evaluate the model of a config. `start` gives a scorer with the start model, for KL; `keep` is given all responses."""
    check_inputs(config)
    use_cpu(threads_alone(config))
    check_devices(config)
    inputs = load_inputs(config, trains=False)
    longest = partial(inputs.longest_prompt, config.evaluate.split)
    shape, machine = ModelShape.of(inputs.loaded), Machine.found(config)
    config = resolve(config, shape, machine, longest_prompt=longest, trains=False)
    with tempfile.TemporaryDirectory() as logs:
        rewards = make_rewards(inputs.task, config, log=Path(logs) / "rewards.log")
        try:
            evaluator = make_evaluator(config, inputs.loaded, inputs.task, rewards, start=start, keep=keep)
            if keep is not None and not isinstance(evaluator, AnswerEvaluator):
                raise ConfigError(
                    f"--responses needs a task whose responses are right or wrong, or have rewards of your own: "
                    f"{config.task.name} is judged otherwise. Leave --responses and --against out."
                )
            if not evaluator.prompts:
                logger.warning(
                    "nothing was measured: %s has no prompts in evaluate.split=%s. Give some, for your own data as "
                    "task.eval_data=FILE.jsonl.",
                    *(config.task.label, config.evaluate.split),
                )
            with closing(make_search_engine(config, inputs.loaded)) as engine:
                return evaluator(engine)
        finally:
            rewards.close()


def generate(
    config: Config, prompts: Sequence[str | list[dict[str, str]]], *, num_generations: int, greedy: bool
) -> list[list[str]]:
    """Responses of the engine that searchers use: texts for each prompt, in their order."""
    use_cpu(threads_alone(config))
    loaded = load_model(config.model)
    room, template = loaded.context - config.generate.max_new_tokens, config.task.chat_template_kwargs
    made = [
        make_prompt(
            id=str(index), text=text, columns={}, tokenizer=loaded.tokenizer, max_tokens=room, template=template
        )
        for index, text in enumerate(prompts)
    ]
    longest = max((len(prompt.token_ids) for prompt in made), default=1)
    shape, machine = ModelShape.of(loaded), Machine.found(config)
    config = resolve(config, shape, machine, longest_prompt=lambda: longest, trains=False)
    sampling = replace(training_sampling(config), greedy=greedy)
    with closing(make_search_engine(config, loaded)) as engine:
        groups = respond(engine, loaded.tokenizer, made, num_generations, sampling)
    return [list(group.texts) for group in groups]
