"""Newer weights of a run that goes on: its newest checkpoint is watched, and loaded between two decode steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from tba.config import ModelConfig
from tba.models.load import load_model
from tba.models.weights import make_weights
from tba.observe.run_folder import RunFolder, step_of
from tba.types import Weights

logger = logging.getLogger("tba.serve")

WATCH_SECONDS = 2.0
"""Time between two looks into the run folder."""


class CheckpointWatch:
    """Loads each newer checkpoint of a run."""

    def __init__(self, folder: RunFolder, loaded: Path, model: ModelConfig, load: Callable[[Weights], object]) -> None:
        """`loaded` is the checkpoint in use; `model` says how to load others."""
        self.folder, self.loaded, self._model, self._load = folder, loaded, model, load
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(WATCH_SECONDS):
            try:
                self.look()
            except Exception as error:  # the run may have dropped it while it was read: the next is newer
                logger.warning("%s: its newest checkpoint was not loaded: %s", self.folder.path, error)

    def look(self) -> bool:
        """Load the newest checkpoint if it is another one -> whether it is."""
        newest = self.folder.newest_checkpoint()
        if newest == self.loaded:
            return False
        # On the CPU, and loaded as any model is: a checkpoint of an adapter comes with its base.
        config = self._model.model_copy(update={"path": str(newest), "device": "cpu"})
        self._load(make_weights(load_model(config).model, version=step_of(newest)))
        self.loaded = newest
        return True
