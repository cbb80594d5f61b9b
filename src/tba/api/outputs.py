"""What a script gets of a run: checkpoints by TRL's names, the trained model with its card, responses to prompts."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tba.config import Config
from tba.observe.files import write_json
from tba.observe.run_folder import SAVED, RunFolder, saved_names

logger = logging.getLogger("tba")

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.md", "*.py")
NOT_OF_THE_MODEL = {"optimizer.safetensors", "state.safetensors", "state.json", "trainer.json", "manifest.json"}


def copy_model(checkpoint: Path, target: Path, run: Path) -> None:
    """Copy what `from_pretrained` loads, and the model's card, to a folder, which may be that of the run."""
    files = {file for pattern in MODEL_FILES for file in checkpoint.glob(pattern) if file.name not in NOT_OF_THE_MODEL}
    target.mkdir(parents=True, exist_ok=True)
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
        if link.is_symlink() and not link.exists():
            link.unlink()
    for step, path in RunFolder(run).checkpoints_by_step().items():
        link = run / f"checkpoint-{step}"
        try:
            if not link.is_symlink():
                link.symlink_to(path.relative_to(run))
        except OSError as error:  # a folder of somebody else's, or a disk without links
            _warn_once(f"{link} cannot be a link to {path} ({error.strerror}): the checkpoint is {path} alone.")


@cache
def _warn_once(words: str) -> None:
    logger.warning("%s", words)


def model_card(config: Config, summary: Mapping[str, Any]) -> str:
    """The README of a trained model: from what, on what and how it was trained, and how well it did."""
    rows = "".join(
        f"| {name} | {_with_error(summary, 'start', name)} | {_with_error(summary, 'final', name)} |\n"
        for name in summary.get("final", {})
    )
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


def _with_error(summary: Mapping[str, Any], when: str, name: str) -> str:
    value, error = summary.get(when, {}).get(name), summary.get(f"{when}_standard_error", {}).get(name)
    if value is None:
        return ""
    return f"{value:.3g}" if error is None else f"{value:.3g} +- {error:.2g}"


def flat(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Metrics as transformers prints them: those of a part of the summary are `final/reward`, what is no number is text."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, (int, float)) else str(value)
    return found


def generate(
    config: Config, prompts: Sequence[str | list[dict[str, str]]], *, num_generations: int, greedy: bool
) -> list[list[str]]:
    """Responses of the engine that searchers use: texts for each prompt, in their order."""
    from tba.generate.sampling import training_sampling
    from tba.launch.memory import Machine, ModelShape
    from tba.launch.resolve import resolve
    from tba.models.cpu import use_cpu
    from tba.models.load import load_model
    from tba.runtime.placement import threads_alone
    from tba.search.make import make_search_engine
    from tba.tasks.data.prompts import make_prompt
    from tba.types import Request

    use_cpu(threads_alone(config))
    loaded = load_model(config.model)
    room = loaded.context - config.generate.max_new_tokens
    template = config.task.chat_template_kwargs
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
    found: dict[tuple[int, int], str] = {}
    requests = (Request(prompt=prompt) for prompt in made)
    engine = make_search_engine(config, loaded)
    for completion in engine.generate(requests, samples_per_prompt=num_generations, sampling=sampling):
        text = loaded.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        found[int(completion.prompt_id), completion.sample_index] = text
    return [[found[index, sample] for sample in range(num_generations)] for index in range(len(made))]
