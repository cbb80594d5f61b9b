"""Models of the shapes with random weights, made on the GPU."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gpu_bench.workloads import LONGEST, SHAPES, Shape
from tba.engine.decoder.decoder import Decoder
from tba.engine.native.engine import NativeEngine

STOP_ID = 2


def device() -> torch.device:
    return torch.device("cuda")


def make_model(shape: Shape, *, layers: int | None = None, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Random weights in their dtype from the start: on a CPU, or in fp32 first, 7B would take minutes."""
    config = AutoConfig.for_model(shape.model_type, **shape.numbers(layers))
    torch.manual_seed(0)
    with device():
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def small(name: str = "0.5B") -> PreTrainedModel:
    """The model of the parts that two processes share."""
    return make_model(SHAPES[name])


def make_engine(model: PreTrainedModel | Decoder, *, slots: int = 256, max_length: int = LONGEST) -> NativeEngine:
    dtype, place = model.dtype, model.device
    return NativeEngine(
        model, stop_ids=[STOP_ID], seed=0, slots=slots, max_length=max_length, dtype=dtype, device=place
    )
