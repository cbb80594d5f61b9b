"""What sampling settings cost on one GPU: tokens per second where responses ask for top-p, top-k or a least length.

    python -m pytest tests/kernels && python benchmarks/sampling_settings.py       # about two minutes on an H200

The kernels choose tokens by every setting inside the CUDA graphs, so no setting takes a batch off them: the last column
counts decode steps outside of the graphs, and must be 0. Ragged responses of 32 to 320 tokens, 1,024 prompts of 128, 256
slots, random weights in the shapes of Qwen2.5-0.5B (152k tokens: the most that truncation has to look at) and TinyLlama.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from gpu_bench.decode import requests
from gpu_bench.models import make_engine, make_model
from gpu_bench.workloads import SHAPES, WORKLOADS

from tba.generate.native.engine import NativeEngine
from tba.types import Request, Sampling

RAGGED = WORKLOADS["ragged"]
SETTINGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "no setting": lambda index: {},
    "min_new_tokens=1, all": lambda index: {"min_new_tokens": 1},
    "min_new_tokens=16, all": lambda index: {"min_new_tokens": 16},
    "top_p=.9, every tenth prompt": lambda index: {"top_p": 0.9} if index % 10 == 0 else {},
    "top_p=.9, all": lambda index: {"top_p": 0.9},
    "top_k=50 and top_p=.9, all": lambda index: {"top_p": 0.9, "top_k": 50},
}


def with_settings(vocabulary: int, settings: Callable[[int], dict[str, Any]]) -> Iterator[Request]:
    """The same ragged requests whatever the settings."""
    for index, request in enumerate(requests(RAGGED, vocabulary, 0)):
        assert request.sampling is not None
        yield replace(request, sampling=replace(request.sampling, **settings(index)))


def measure(engine: NativeEngine, settings: Callable[[int], dict[str, Any]]) -> tuple[float, int]:
    """Tokens per second, and decode steps outside of the graphs."""
    plain_steps, decode_step = [0], engine._decode_step

    def counted(*arguments: Any) -> None:
        plain_steps[0] += 1
        decode_step(*arguments)

    engine._decode_step = counted  # type: ignore[method-assign]
    torch.cuda.synchronize()
    started = time.perf_counter()
    asked, sampling = with_settings(engine.vocabulary, settings), Sampling(max_new_tokens=RAGGED.new_tokens)
    found = engine.generate(asked, samples_per_prompt=1, sampling=sampling)
    tokens = sum(len(completion.token_ids) for completion in found)
    engine._decode_step = decode_step  # type: ignore[method-assign]
    return tokens / (time.perf_counter() - started), plain_steps[0]


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/sampling_settings.py needs an NVIDIA GPU.")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n| model | setting | tokens/s | of none | outside |"
    )
    print("|---|---|---|---|---|")
    for shape in (SHAPES["0.5B"], SHAPES["1.1B"]):
        engine = make_engine(make_model(shape), max_length=512)
        assert engine._fused is not None, "the fused step must serve this shape"
        measure(engine, SETTINGS["no setting"])  # compiles kernels and captures graphs
        base = 0.0
        for label, settings in SETTINGS.items():
            rate, outside = max(measure(engine, settings) for _ in range(2))
            base = base or rate
            print(f"| {shape.name} | {label} | {rate:,.0f} | {rate / base:.0%} | {outside} |", flush=True)
        del engine
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
