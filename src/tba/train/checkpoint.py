"""Checkpoints that transformers loads: weights, tokenizer and generation config, with the trainer's state beside them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tba.observe.files import RunFolder, write_json
from tba.train.optimizer import MasterAdamW


@dataclass
class Checkpoints:
    """Those of one run: checkpoints/step-N, of which the last `keep` stay, the collapse guard's healthy-step-N, and
    best-step-N, the weights whose evaluation was the best so far."""

    folder: RunFolder
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: MasterAdamW
    heads: Sequence[nn.Module]
    state: Callable[[], dict[str, Any]]
    keep: int
    """0 = none is written."""
    pinned: int | None = field(default=None, init=False)
    """Step whose checkpoint stays, whatever its age."""
    best: tuple[int, float] | None = field(default=None, init=False)
    """Step and score of the best evaluation so far."""

    def save(self, step: int) -> None:
        """Write checkpoints/step-N and drop the oldest beyond `keep`."""
        if self.keep == 0:
            return
        self._write(step, f"step-{step}")
        by_step = self.folder.checkpoints_by_step()
        for old in sorted(by_step)[: -self.keep]:
            if old != self.pinned:
                shutil.rmtree(by_step[old])

    def save_healthy(self, step: int) -> None:
        self._write(step, f"healthy-step-{step}")

    def drop_healthy(self, step: int) -> None:
        shutil.rmtree(self.folder.checkpoints / f"healthy-step-{step}")

    def save_evaluated(self, step: int) -> None:
        """Write the weights that an evaluation was asked for: they are gone when its result arrives."""
        if self.keep > 0:
            write_model(self.folder.checkpoints / f"evaluated-step-{step}", self.model, self.tokenizer)

    def keep_best(self, step: int, score: float) -> None:
        """An evaluation has come: its weights replace the best so far, or are dropped; of equal ones the later stay.

        A searcher evaluates the version it was asked for or, where it came to it late, one a few steps newer: what was saved
        when it was asked stands for both.
        """
        saved = self.folder.checkpoints_by_step("evaluated-step-")
        asked = max((found for found in saved if found <= step), default=step)  # none for the start, or with keep=0
        is_best = self.best is None or score >= self.best[1]
        if is_best:
            self.best = (asked, score)
        if is_best and asked in saved:
            for outdone in self.folder.checkpoints_by_step("best-step-").values():
                shutil.rmtree(outdone)
            os.replace(saved.pop(asked), self.folder.checkpoints / f"best-step-{asked}")
        for passed in [found for found in saved if found <= asked]:
            shutil.rmtree(saved[passed])

    def drop_unjudged(self) -> None:
        """The run is over: weights whose evaluation never came are of no use."""
        for path in self.folder.checkpoints_by_step("evaluated-step-").values():
            shutil.rmtree(path)

    def _write(self, step: int, name: str) -> None:
        write_checkpoint(
            self.folder.checkpoints / name,
            model=self.model,
            tokenizer=self.tokenizer,
            optimizer=self.optimizer,
            heads=self.heads,
            state={"step": step, **self.state()},
        )


def write_model(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """What transformers loads, without the trainer's state. The folder appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    os.replace(partial, path)


def write_checkpoint(
    path: Path,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: MasterAdamW,
    heads: Sequence[nn.Module],
    state: dict[str, Any],
) -> None:
    """The folder appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    save_file(_optimizer_tensors(optimizer), partial / "optimizer.safetensors")
    for head in heads:
        save_file(dict(head.state_dict()), partial / f"{type(head).__name__}.safetensors")
    write_json(partial / "trainer.json", state)
    if path.exists():
        shutil.rmtree(path)
    os.replace(partial, path)


def _optimizer_tensors(optimizer: MasterAdamW) -> dict[str, Tensor]:
    """Adam's moments and the master weights by index; no pickle."""
    state = optimizer.state()
    tensors = {f"master.{index}": master.contiguous() for index, master in enumerate(state["masters"])}
    for index, moments in state["adam"]["state"].items():
        tensors |= {f"adam.{index}.{name}": value.contiguous() for name, value in moments.items()}
    return tensors
