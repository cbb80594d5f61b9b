"""Checks before torch is imported, a model loads or a folder is made, of outputs, loggers, engines, rewards and data."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from tba.config import Config, ConfigError
from tba.models.paths import SHIPPED, check_there, resolve_path
from tba.observe.files import check_sinks, read_summary
from tba.observe.run_folder import RunFolder, others_entry, step_of
from tba.serve import check_web
from tba.tasks.data.rows import SUFFIXES, may_be_hub_name, refuse_other_formats
from tba.tasks.reasoning_gym.generators import require_reasoning_gym
from tba.tasks.rewards.functions import named_rewards
from tba.tasks.rewards.load_function import check_reward_function
from tba.tasks.rewards.sources import with_sources
from tba.tasks.verifiers.tasksets import require_verifiers

logger = logging.getLogger("tba")

HUB_COMMAND = (
    "A dataset of the hub is written to one first, with the question as `prompt`: python -c 'from datasets import "
    """load_dataset; load_dataset("NAME", split="train").rename_column("question", "prompt").to_json("prompts.jsonl")'"""
)
TASK_NAMES = ("arithmetic", "gsm8k", "math", "tldr", "red_team", "reasoning_gym:NAME", "verifiers:NAME", "custom")
"""Names of the registered tasks, `custom` last: the registry itself needs torch."""
REQUIRED = {"reasoning_gym": require_reasoning_gym, "verifiers": require_verifiers}
"""Checks that a task's package is installed."""


def check_before_loading(config: Config, *, resume: bool = False, keep_earlier: bool = False) -> None:
    """Refuse a config whose output cannot be written, or that names loggers, an engine, rewards or data that are not there.
    To resume a run its folder must exist, which is checked when it is opened."""
    check_sinks(config)
    if config.generate.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ValueError("generate.engine=vllm needs vLLM, which is not installed: pip install 'tba-rl[vllm]'.")
    if not resume:
        RunFolder.check(config.run_folder, overwrite=config.overwrite, keep_earlier=keep_earlier)
    elif config.run_folder.is_dir():
        RunFolder.check_writable(config.run_folder)
        for key, path in _inputs(config).items():  # their paths are settings, which may not change
            if Path(path).is_absolute() and not Path(path).exists():
                raise ValueError(
                    f"{key}: {path} is not there any more, and the run was started with it: move it back, or put a link "
                    "there."
                )
    check_inputs(config)
    for imported in config.replay.imports:
        if (Path(imported) / "replay.sqlite").is_file() or imported.endswith(".sqlite"):
            raise ValueError(
                f"replay.imports: {imported} is of a run, and JSONL is needed: `tba replay {imported} --export "
                "groups.jsonl` writes it."
            )
        if not Path(imported).is_file():
            found = "is a folder" if Path(imported).is_dir() else "does not exist"
            raise ValueError(f"replay.imports: file {imported} {found}. Give a JSONL file.")
    if (config.overwrite or keep_earlier) and not resume and config.run_folder.is_dir():
        for key, path in [*_inputs(config).items(), *(("replay.imports", str(path)) for path in config.replay.imports)]:
            place = Path(path).expanduser().resolve()
            if config.run_folder.resolve() in (place, *place.parents):
                raise ValueError(
                    f"{key}={path} is part of the run in {config.run_folder}, which a new run there replaces: choose "
                    "another name (name=...), or copy it elsewhere first."
                )


def _inputs(config: Config) -> dict[str, str]:
    """Paths that a run starts from, by the setting."""
    paths = {"model.path": config.model.path, "task.data": config.task.data, "task.eval_data": config.task.eval_data}
    return {key: path for key, path in paths.items() if path is not None}


def check_devices(config: Config) -> None:
    """Refuse devices that are not there, by the name of the setting; warn of those that are not used."""
    # Here, because the other checks of this module run before torch is imported.
    import torch

    devices = config.search.devices
    named = [("model.device", config.model.device), *(("search.devices", device) for device in devices)]
    gpus = [(key, device) for key, device in named if re.fullmatch(r"cuda(:\d+)?", device)]
    count = torch.cuda.device_count() if gpus else 0
    for key, device in gpus:
        if int(device.partition(":")[2] or 0) >= count:
            there = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
            raise ConfigError(
                f"{key}={device} is not there: this machine has {there}"
                f"{'' if count else ' and no GPU that torch can use'}. Name one of them; `tba doctor` says what torch sees."
            )
    ranks, cores = config.train.ranks, os.cpu_count() or 1
    is_here = config.runtime.kind == "local" and "TORCHELASTIC_RUN_ID" not in os.environ
    if is_here and ranks > cores and (config.model.device == "cpu" or not torch.cuda.device_count()):
        raise ConfigError(
            f"train.ranks={ranks} are as many processes of the trainer on {cores} cores, and no GPU is used: give {cores} "
            "at most. The rank of a LoRA adapter is model.lora.rank."
        )
    if config.search.count < len(devices):
        message = "search.devices names %d devices for search.num_searchers=%d: the others stay idle."
        logger.warning(message, len(devices), config.search.count)


def check_capacity(config: Config, *, num_prompts: int) -> None:
    """Refuse a replay buffer that cannot hold what a step generates of one prompt, where prompts are few."""
    rollouts, room = -(-config.train.prompts_per_step // num_prompts), config.replay.capacity_per_prompt
    if room is not None and room < (needed := rollouts * config.samples_generated_per_prompt):
        raise ValueError(
            f"replay.capacity_per_prompt={room} cannot hold a step: with {num_prompts} prompts one is drawn {rollouts} "
            f"times for the {config.train.prompts_per_step} of a step, {needed} responses. Raise it, or "
            "train.samples_per_prompt."
        )


def check_inputs(config: Config) -> None:
    check_there(f"model.path={config.model.path!r}", config.model.path)
    if unset := [name for name in config.search.reward_environment if name not in os.environ]:
        raise ValueError(f"search.reward_environment: {', '.join(unset)} is not set here: export it, or leave it out.")
    if require := REQUIRED.get(config.task.name.partition(":")[0]):
        require()
    if config.task.environment.agent is not None:
        check_web("task.environment.agent")
    named_rewards(config.task.rewards)
    for reward in config.task.rewards:
        check_reward_function(reward.function)
    own = config.task.name == "custom"
    for key, path in _inputs(config).items():
        place = Path(path).expanduser()
        if key == "model.path":
            continue
        if place.is_file():
            refuse_other_formats(place)
        elif not place.exists() and (own or path.endswith(SUFFIXES) or path.startswith((".", "/", "~"))):
            hub = f" {HUB_COMMAND.replace('NAME', path)}" if may_be_hub_name(path) else ""
            raise ValueError(
                f"{key}: file {path} does not exist. Give a JSONL file, relative to {Path.cwd()} or in full.{hub}"
            )
        elif own:
            what = "a folder" if place.is_dir() else "a pipe or device, and it is read more than once"
            raise ValueError(f"{key}: {path} is {what}: give a JSONL file with a `prompt` column.")


def with_trusted_code(config: Config, folder: RunFolder, overrides: Sequence[str]) -> Config:
    """The config of a run that is to be evaluated, with the copies of files that are gone. Where another user may have
    written the run folder, code that its config names is refused unless the command names it too."""
    found = with_sources(config, folder)
    others = others_entry(folder.path, *folder.path.rglob("*"))
    if others is None:
        return found
    given = {override.partition("=")[0] for override in overrides}
    code = {}
    if found.model.trust_remote_code:
        code["model.trust_remote_code"] = "true"
    if found.task.is_own_file:
        code["task.name"] = found.task.name
    if found.task.rewards:
        code["task.rewards"] = json.dumps(found.task.model_dump(mode="json", exclude_defaults=True)["rewards"])
    if found.task.environment.is_there:
        environment = found.task.environment.model_dump(mode="json", exclude_defaults=True)
        code["task.environment"] = json.dumps(environment)
    unnamed = [f"{key}={value}" for key, value in code.items() if not {key, key.partition(".")[0]} & given]
    if unnamed:
        raise ConfigError(
            f"{others}, and config.yaml of this run names code to run here. Look at that code first; what you name on the "
            f"command is run: tba evaluate ... {shlex.join(unnamed)}"
        )
    return config


def check_evaluated(target: str) -> None:
    """Refuse what `tba evaluate` cannot find, before torch is imported."""
    if Path(target).is_file():
        raise ValueError(f"{target} is a file: give the folder of a run or a model, or a hub name.")
    if not (Path(target) / "config.yaml").is_file():
        check_there(f"{target!r} is no run folder", target)


def task_to_evaluate(target: str, overrides: Sequence[str]) -> str | None:
    """The task of a model of the package, where no task is given; None = the overrides name one, or the run that the target
    is of knows its own. A ConfigError where nothing says what the model is to be evaluated on."""
    if any(override.startswith(("task.name=", "task=")) for override in overrides) or run_of(target) is not None:
        return None
    if target not in SHIPPED:
        raise ConfigError(
            f"nothing says what {target} is to be evaluated on: it is no run folder, which knows its task. Give one with "
            f"--task: {', '.join(TASK_NAMES)}, or file.py:Class. For your own data and reward: --task custom "
            "task.data=prompts.jsonl 'task.rewards=[{function: rewards.py:score}]'."
        )
    return target.removeprefix("tba:")


def task_to_train(model: str) -> str:
    """The task of a model of the package, for a run that names a model and no task. A ConfigError where the model is
    another one: it would learn the problems of the default task, for which the command did not ask."""
    if model not in SHIPPED:
        resolve_path(model)  # a missing folder is the first error
        raise ConfigError(
            f"nothing says what {model} is to be trained on. For your own problem: --data prompts.jsonl --reward "
            f"rewards.py:score. Or name a task by task.name=NAME: {', '.join(TASK_NAMES[:-1])}, or file.py:Class."
        )
    return model.removeprefix("tba:")


def collapse_message(target: str) -> str | None:
    """Warning where a run that collapsed is evaluated by its newest checkpoint; None = there is nothing to say."""
    folder = run_of(target)
    if folder is None or folder.path != Path(target) or not folder.checkpoints_by_step():
        return None
    newest = folder.newest_checkpoint()
    kept, since = before_collapse(folder, newest) or (None, 0)
    if kept is None:
        return None
    return (
        f"{target} collapsed, since about step {since}: its newest checkpoint is evaluated, of step {step_of(newest)}. The "
        f"one from before the collapse is {kept}."
    )


def before_collapse(folder: RunFolder, newest: Path) -> tuple[Path, int] | None:
    """The checkpoint from before the collapse that has ended a run, and the step since which it collapsed. None = the run
    has not collapsed, or this checkpoint is not from after the collapse either."""
    summary = read_summary(folder) or {}
    collapse = summary.get("collapse") or {}
    kept = folder.path / (collapse.get("checkpoint") or "")
    if summary.get("outcome") != "collapsed" or kept == folder.path or not kept.is_dir():
        return None
    return (kept, collapse["since"]) if step_of(kept) < step_of(newest) else None


def run_of(target: str) -> RunFolder | None:
    """The run that a folder is, or is a checkpoint of; None = it is neither. The folder, or the one that holds a run's
    checkpoints, may be a link."""
    if RunFolder(Path(target)).config.is_file():
        return RunFolder(Path(target))
    # First as it is written, then with all links followed.
    for path in (Path(os.path.abspath(target)), Path(target).resolve()):
        above = RunFolder(path.parent.parent)
        if path.is_dir() and path.parent == above.checkpoints and above.config.is_file():
            return above
    return None
