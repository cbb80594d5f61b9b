"""Files of a script's run. Inputs for all its processes: datasets as JSONL, models as folders, rewards as functions
that can be sent to workers. Outputs: checkpoints by TRL's names, the trained model with its card."""

from __future__ import annotations

import filecmp
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tba.config import Config, ConfigError, RewardConfig
from tba.config.task import code_name
from tba.models.paths import check_named, check_there, resolve_path
from tba.observe.files import write_json
from tba.observe.run_folder import SAVED, RunFolder, saved_names

logger = logging.getLogger("tba")


def check_kind(name: str, value: Any, attribute: str, give: str) -> None:
    """Refuse an object of a wrong kind, known by what it lacks. The AttributeError of its use names no argument."""
    if not hasattr(value, attribute):
        raise ConfigError(f"{name} is a {type(value).__name__}: give {give}.")


def dataset_file(dataset: Iterable[Mapping[str, Any]] | str | Path | None, path: Path, *, what: str) -> str | None:
    """A dataset as a JSONL file; one that is a file already stays where it is. A file of other rows that has that name is of
    an earlier run, which may still go on: it is left alone, and the rows go into a folder that is named by them."""
    if dataset is None or isinstance(dataset, (str, Path)):
        return dataset if dataset is None else str(Path(dataset).expanduser())
    path.parent.mkdir(parents=True, exist_ok=True)
    # By process: two scripts may write the same dataset at once.
    written, contents = path.with_name(f".{path.name}.{os.getpid()}"), hashlib.blake2b(digest_size=8)
    try:
        with written.open("wb") as file:
            for line in _json_lines(dataset, what):
                file.write(line)
                contents.update(line)
        if path.is_file() and not filecmp.cmp(written, path, shallow=False):
            # The file's own name stays: RowNames in tasks/data/rows.py knows the script's dataset by it.
            path = path.parent / contents.hexdigest() / path.name
            path.parent.mkdir(exist_ok=True)
        if not path.is_file():
            # The whole file or none: searchers of another run may read that name now.
            os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)
    return str(path)


def _json_lines(dataset: Iterable[Mapping[str, Any]], what: str) -> Iterator[bytes]:
    rows = "give rows, which are mappings with a `prompt` of text or chat messages, and columns of plain data"
    if isinstance(dataset, Mapping):  # load_dataset without a split
        names = ", ".join(map(str, dataset))
        raise ConfigError(f"{what} is a mapping of {names}: choose one, as dataset['train'], or {rows}.")

    def plain(value: Any) -> Any:
        """Numbers and arrays of NumPy and PyTorch as Python has them."""
        if hasattr(value, "tolist"):
            return value.tolist()
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")

    # A table of pandas and a mapping of several datasets are gone through by their names, which are no rows.
    try:
        numbered = enumerate(dataset)
    except TypeError:  # PyTorch's datasets have no __iter__, and are gone through all the same
        raise ConfigError(f"{what} is a {type(dataset).__name__}: {rows}.") from None
    for number, row in numbered:
        if not isinstance(row, Mapping):
            raise ConfigError(f"row {number} of {what} is a {type(row).__name__}: {rows}.")
        try:
            yield (json.dumps(dict(row), default=plain) + "\n").encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"row {number} of {what} cannot be written as JSON ({error}): {rows}.") from None


def model_folder(model: Any, tokenizer: Any, path: Path) -> str:
    """The start model as a path; a model object, or one with a tokenizer of its own, is saved as a folder with both."""
    if isinstance(model, (str, Path)):
        if tokenizer is None or str(tokenizer) == str(model):
            return str(model)
        from transformers import AutoModelForCausalLM

        from tba.models.load import load_weights

        # Another tokenizer than the model's: both must lie in one folder, because roles load them by one path.
        model = load_weights(AutoModelForCausalLM, resolve_path(str(model)), dtype="auto")
    check_kind("model", model, "save_pretrained", "a folder, a hub name or a model of transformers")
    if not getattr(model, "can_generate", lambda: True)():
        raise ConfigError(
            f"model is a {type(model).__name__}, which has no head to generate with: load it by AutoModelForCausalLM."
        )
    _save_with_tokenizer(model, tokenizer, path)
    return str(path)


def _save_with_tokenizer(model: Any, tokenizer: Any, path: Path) -> None:
    """Save a model object with a tokenizer, its own one by its name where none is given."""
    if tokenizer is None and not (tokenizer := getattr(getattr(model, "config", None), "_name_or_path", "")):
        raise ConfigError("processing_class is missing: a model given as an object needs its tokenizer.")
    if isinstance(tokenizer, (str, Path)):
        from transformers import AutoTokenizer

        check_named("processing_class", str(tokenizer))
        tokenizer = AutoTokenizer.from_pretrained(resolve_path(str(tokenizer)))
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has one
    check_kind("processing_class", tokenizer, "save_pretrained", "a tokenizer, or its folder or hub name")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def reward_configs(
    rewards: Any, weights: Sequence[float] | None, tokenizers: Any, folder: Path, *, optional: bool = False
) -> list[dict[str, Any]]:
    """The rewards of a run: functions, `file.py:name`, and reward models by name or as objects. They are `optional` where an
    environment gives one."""
    from tba.tasks.rewards.load_function import check_reward_function

    # A single reward may be iterable itself, so only lists and tuples count as several.
    given = list(rewards) if isinstance(rewards, (list, tuple)) else [] if rewards is None else [rewards]
    own = list(tokenizers) if isinstance(tokenizers, (list, tuple)) else [tokenizers] * len(given)
    if not given and not optional:
        raise ConfigError("reward_funcs is empty: give at least one function, `file.py:name` or reward model.")
    try:
        numbers = None if weights is None else [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise ConfigError(f"reward_weights={weights!r} is no list of numbers: give one for each reward.") from None
    for name, each in (("reward_weights", numbers), ("reward_processing_classes", own)):
        if each is not None and len(each) != len(given):
            raise ConfigError(f"{name} has {len(each)} entries for {len(given)} reward_funcs: give one each.")
    found: list[dict[str, Any]] = []
    for index, reward in enumerate(given):
        function = _reward(reward, own[index], folder / f"reward-{index}")
        check_reward_function(function)  # a file or name that is wrong shows now, not when the run starts
        found.append({"function": function, "weight": 1.0 if numbers is None else numbers[index]})
    names = [RewardConfig(function=config["function"]).label for config in found]
    for index, name in enumerate(names):
        if names.count(name) > 1:  # TRL allows two of one name
            found[index]["name"] = f"{name}-{index}"
    return found


def environment_code(factory: Any, tools: Sequence[Any] | None, agent: Any) -> dict[str, Any]:
    """Classes of environments by name, tools and agent, as task.environment takes them."""
    from tba.tasks.rewards.load_function import check_code

    named = factory if isinstance(factory, Mapping) else {code_name(factory): factory}
    classes = {} if factory is None else dict(named)
    agents = () if agent is None else (agent,)
    for kind, given in (("environment_factory", classes.values()), ("tools", tools or ()), ("agent", agents)):
        for own in given:
            if not callable(own) and not isinstance(own, str):
                raise ConfigError(f"{kind} has a {type(own).__name__}: give functions or classes, or `file.py:name`.")
            check_code(own)  # what is wrong with it shows now, not when the run starts
    return {"classes": classes, "tools": list(tools or ()), "agent": agent}


def _reward(reward: Any, tokenizer: Any, folder: Path) -> str | Callable[..., Any]:
    if isinstance(reward, (str, Path)):
        name = str(reward)
        if ".py" in name:
            return name
        check_named("reward_funcs", name)
        kinds = "a reward model (a function is given itself, or as `file.py:name`)"
        check_there(f"reward_funcs={name!r} is taken for the name of {kinds}", name)
        if tokenizer is not None and not isinstance(tokenizer, (str, Path)):
            give = "tokenizers, or their folders or names"
            check_kind("reward_processing_classes", tokenizer, "save_pretrained", give)
            tokenizer.save_pretrained(folder)
            tokenizer = folder
        return ModelReward(name, tokenizer and str(tokenizer))
    # A model object is saved to disk: it would be pickled into every worker, weights and all.
    if hasattr(reward, "save_pretrained") and not hasattr(reward, "tokenizer"):
        _save_with_tokenizer(reward, tokenizer, folder)
        name = getattr(reward.config, "_name_or_path", "") or "reward_model"
        return ModelReward(str(folder), None, name=Path(name).name)
    if isinstance(reward, type):
        raise ConfigError(f"reward_funcs has the class {reward.__name__}: give an object of it, {reward.__name__}().")
    check_kind("reward_funcs", reward, "__call__", "functions, `file.py:name`, or reward models by name or as objects")
    return reward


class ModelReward:
    """A reward model: the first logit of a sequence classifier for prompt and completion together, as in TRL.

    It is loaded at the first call, in the process that computes rewards.
    """

    per_sample = True

    def __init__(self, path: str, tokenizer: str | None, *, name: str | None = None) -> None:
        self.path, self.tokenizer = path, tokenizer or path
        self.__name__ = name or Path(path).name
        self._loaded: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # Pickled on its way to a worker, which loads its own.
        return {**vars(self), "_loaded": None}

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        if self._loaded is None:
            from transformers import AutoModelForSequenceClassification

            from tba.models.load import use_cpu
            from tba.tasks.encoders import load_encoder

            use_cpu()  # a worker imports torch for this reward only, and has no device or threads set
            self._loaded = load_encoder(
                AutoModelForSequenceClassification,
                self.path,
                key="reward_funcs",
                device="cpu",
                tokenizer_path=self.tokenizer,
                num_labels=1,
                dtype="auto",
            )
        template = self._loaded.tokenizer.apply_chat_template
        chats = [isinstance(prompt, list) for prompt in prompts]
        texts = [
            template([*prompt, *completion], tokenize=False) if chat else prompt + completion
            for chat, prompt, completion in zip(chats, prompts, completions)
        ]
        # A chat template writes its special tokens itself: a second BOS would change the score.
        return self._loaded.logits(texts, special_tokens=not any(chats))[:, 0].tolist()


def lora_config(peft_config: Any) -> dict[str, Any] | None:
    """model.lora from a PEFT LoraConfig."""
    if peft_config is None:
        return None
    if type(peft_config).__name__ != "LoraConfig":
        raise ConfigError(f"peft_config is a {type(peft_config).__name__}: give a LoraConfig.")
    for name in ("use_dora", "modules_to_save", "bias", "use_rslora"):  # lora_dropout is off here
        if (value := getattr(peft_config, name, None)) and value != "none":
            raise ConfigError(
                f"peft_config: {name}={value!r} cannot be kept: the adapter is a plain LoRA. Leave it out."
            )
    # PEFT keeps target_modules as a set, whose order differs between processes: sorted, one config.
    targets = peft_config.target_modules
    return {
        "rank": peft_config.r,
        "alpha": float(peft_config.lora_alpha),
        "targets": "all-linear" if targets is None else targets if isinstance(targets, str) else tuple(sorted(targets)),
    }


def copy_model(checkpoint: Path, target: Path, run: Path) -> None:
    """Copy what `from_pretrained` loads, and the model's card, to a folder, which may be that of the run."""
    suffixes = (".safetensors", ".json", ".jinja", ".model", ".txt", ".md", ".py")
    # Optimizer state has suffixes of model files, and is left out by name.
    state = {"optimizer.safetensors", "state.safetensors", "state.json", "trainer.json", "manifest.json"}
    files = [file for file in checkpoint.iterdir() if file.name.endswith(suffixes) and file.name not in state]
    target.mkdir(parents=True, exist_ok=True)
    # Listed before they are written: a copy that breaks off leaves no file that the run does not know.
    if target.resolve() == run.resolve():
        list_as_saved(run, *(file.name for file in files))
    for file in files:
        shutil.copy2(file, target / file.name)


def list_as_saved(run: Path, *names: str) -> None:
    """List files that a script has written into the run folder, so that `overwrite_output_dir` knows them as the run's."""
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / SAVED, sorted(saved_names(run) | set(names)))


def link_checkpoints(run: Path) -> None:
    """Give the checkpoints of a run TRL's names, checkpoint-N in the run folder itself, as links; those of checkpoints that
    were dropped go."""
    for link in run.glob("checkpoint-*"):
        # exists() follows the link: False = its checkpoint is gone.
        if link.is_symlink() and not link.exists():
            link.unlink()
    for step, path in RunFolder(run).checkpoints_by_step().items():
        link = run / f"checkpoint-{step}"
        try:
            if not link.is_symlink():
                # Relative, so that a run folder can be moved.
                link.symlink_to(path.relative_to(run))
        except OSError as error:  # a folder of another user, or a disk without links
            message = f"{link} cannot be a link to {path} ({error.strerror}): the checkpoint is {path} alone."
            if message not in _warned:
                _warned.add(message)
                logger.warning("%s", message)


_warned: set[str] = set()
"""Warnings that were logged, each once."""


def model_card(config: Config, summary: Mapping[str, Any]) -> str:
    """The README of a trained model: from what, on what and how it was trained, and how well it did."""

    def cell(when: str, name: str) -> str:
        value, error = summary.get(when, {}).get(name), summary.get(f"{when}_standard_error", {}).get(name)
        return "" if value is None else f"{value:.3g}" if error is None else f"{value:.3g} +- {error:.2g}"

    rows = "".join(f"| {name} | {cell('start', name)} | {cell('final', name)} |\n" for name in summary.get("final", {}))
    rewards = ", ".join(reward.label for reward in config.task.rewards)
    table = f"\n| metric | start | end |\n|---|---|---|\n{rows}" if rows else ""
    return f"""---
base_model: {config.model.path}
library_name: {"peft" if config.model.lora is not None else "transformers"}
tags: [tba, reinforcement-learning, trajectory-balance]
---

# {config.run_name}

Trained from `{config.model.path}` with [tba](https://pypi.org/project/tba-rl/) {version("tba-rl")}: objective
`{config.objective.name}`, {summary["steps"]} optimizer steps of {config.train.responses_per_step} responses,
rewards {rewards or "of the task"}, seed {config.seed}, {summary["seconds"]:.0f} s.
{table}
Evaluated on {summary.get("evaluated", {}).get("num_prompts", 0)} held-out prompts.
"""


def flat(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Metrics as transformers prints them: those of a part of the summary are `final/reward`, what is no number is text."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, (int, float)) else str(value)
    return found
