"""What can be refused before torch is imported, a model loaded or a folder made: outputs, loggers, engines, rewards, data
files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tba.config import Config
from tba.observe.files import RunFolder, check_sinks
from tba.tasks.rewards.files import check_reward_function
from tba.tasks.rewards.functions import reward_weights


def check_before_loading(config: Config, *, resume: bool = False) -> None:
    """Refuse a config whose output cannot be written, or that names loggers, an engine, rewards or data that are not there.
    To resume a run its folder must exist, which is seen when it is opened."""
    check_sinks(config)
    for kind, searcher in config.by_kind().items():
        key = "generate" if kind is None or config.search.kinds[kind].engine is None else f"search.kinds.{kind}"
        if searcher.generate.engine == "vllm" and importlib.util.find_spec("vllm") is None:
            raise ValueError(f"{key}.engine=vllm needs vLLM, which is not installed: pip install 'tba-rl[vllm]'.")
    if not resume:
        RunFolder.check(config.run_folder, overwrite=config.overwrite)
    reward_weights(config.task.rewards)
    for reward in config.task.rewards:
        check_reward_function(reward.function)
    if config.task.name == "custom":
        for key, path in (("task.data", config.task.data), ("task.eval_data", config.task.eval_data)):
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{key}: file {path} does not exist.")
    for imported in config.replay.imports:
        if not Path(imported).is_file():
            raise ValueError(f"replay.imports: file {imported} does not exist.")
