"""Checkpoints that transformers loads: weights, tokenizer and generation config, with the trainer's state beside them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tba.observe.files import RunFolder, write_json
from tba.train.optim import MasterAdamW


def save_checkpoint(
    folder: RunFolder,
    *,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: MasterAdamW,
    heads: Sequence[nn.Module] = (),
    state: dict[str, Any],
    keep: int,
) -> Path | None:
    """Write checkpoints/step-N and drop all but the last `keep`; 0 writes none. The folder appears whole or not at all."""
    if keep == 0:
        return None
    final = folder.checkpoints / f"step-{step}"
    partial = folder.checkpoints / f".step-{step}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    save_file(_optimizer_tensors(optimizer), partial / "optimizer.safetensors")
    for head in heads:
        save_file(dict(head.state_dict()), partial / f"{type(head).__name__}.safetensors")
    write_json(partial / "trainer.json", {"step": step, **state})
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    for old in sorted(folder.checkpoints.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))[:-keep]:
        shutil.rmtree(old)
    return final


def _optimizer_tensors(optimizer: MasterAdamW) -> dict[str, Tensor]:
    """Adam's moments and the master weights by index; no pickle."""
    state = optimizer.state()
    tensors = {f"master.{index}": master.contiguous() for index, master in enumerate(state["masters"])}
    for index, moments in state["adam"]["state"].items():
        tensors |= {f"adam.{index}.{name}": value.contiguous() for name, value in moments.items()}
    return tensors
