"""Model and task are loaded once for all runs that share them: on a small model, loading is most of a short run."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import replace

from tba.config import Config
from tba.launch.run import RunInputs, load_inputs


class WarmInputs:
    """Inputs of runs, each with its own copy of the start model, which training changes."""

    def __init__(self) -> None:
        self._pristine: dict[Hashable, RunInputs] = {}

    def make(self, config: Config) -> RunInputs:
        key = (config.model, config.task, config.generate.max_new_tokens)  # all that load_inputs reads
        if key not in self._pristine:
            self._pristine[key] = load_inputs(config)
        pristine = self._pristine[key]
        pristine.task.prompts(config.evaluate.split)  # a split that the task lacks is an error before the run starts
        return replace(pristine, loaded=replace(pristine.loaded, model=copy.deepcopy(pristine.loaded.model)))
