"""New weights for vLLM, each way that there is: how long an update takes, and what an adapter beside the weights costs.

    python benchmarks/vllm_updates.py                                   on a GPU: a random model in the shape of Qwen2.5-0.5B
    python benchmarks/vllm_updates.py --hidden 64 --layers 4 --slots 8  on a CPU

    whole        our own backend, tensors in this process (`tba_in_process`)
    ipc          vLLM's backend: it opens what another process has published on the same GPU
    merged       an adapter of rank --rank, merged into the whole weights and handed over as `whole`
    unmerged     the same adapter beside the weights, through a folder in memory

The searcher's own copy and its checksum, which every update from another process has before, are timed by themselves
(`fetch`). Updates are given to an engine whose slots are all at work. Log-probs of given tokens under `merged` and
`unmerged` are compared: they are two ways to the same numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from tba.config import GenerateConfig, LoraConfig
from tba.generate.engine import Engine, LoraEngine, make_engine
from tba.models.load import add_lora
from tba.runtime.weight_slots import WeightSlots
from tba.types import Prompt, Request, Sampling, Weights

WAIT_SECONDS = 120
PROMPT_TOKENS = 64
RESPONSE_TOKENS = 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def make_model(arguments: argparse.Namespace) -> PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 38 // 7,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64 or 1,
        num_key_value_heads=2 if arguments.hidden >= 128 else 1,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=DTYPE).to(DEVICE).eval()


def wait_for_device() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds until the device has done it too."""
    wait_for_device()
    started = time.perf_counter()
    found = work()
    wait_for_device()
    return 1e3 * (time.perf_counter() - started), found


def endless(vocabulary: int) -> Iterator[Request]:
    rng = np.random.default_rng(0)
    for index in itertools.count():
        tokens = rng.integers(10, vocabulary, size=PROMPT_TOKENS).astype(np.int32)
        yield Request(prompt=Prompt(id=f"p{index}", token_ids=tokens, text=""))


def measure(engine: Engine, slots: int, updates: Iterator[Weights], count: int) -> dict[str, float]:
    """Tokens per second with every slot at work, and milliseconds of an update among them."""
    sampling = Sampling(max_new_tokens=RESPONSE_TOKENS, min_new_tokens=RESPONSE_TOKENS)
    stream = engine.generate(endless(engine.vocabulary), samples_per_prompt=1, sampling=sampling)
    for _ in range(slots):
        next(stream)
    wait_for_device()
    started = time.perf_counter()
    tokens = sum(len(next(stream).token_ids) for _ in range(2 * slots))
    speed = tokens / (time.perf_counter() - started)
    loads = []
    for _ in range(count):
        weights = next(updates)
        milliseconds, _ = timed(lambda weights=weights: engine.load(weights))
        loads.append(milliseconds)
        next(stream)
    stream.close()
    later = loads[2:]
    return {"tokens/s": speed, "first ms": loads[0], "median ms": float(np.median(later)), "longest ms": max(later)}


def changed(tensors: dict[str, torch.Tensor], version: int) -> Weights:
    generator = torch.Generator(DEVICE).manual_seed(version)
    noisy = {
        name: t.detach() + 0.02 * torch.randn(t.shape, device=t.device, generator=generator).to(t.dtype)
        for name, t in tensors.items()
    }
    return Weights(version=version, tensors=noisy)


def trainer(pipe: Any, arguments: argparse.Namespace) -> None:
    """Another process on the GPU, which publishes when it is asked to."""
    model = make_model(arguments)
    tensors = dict(model.named_parameters())
    slots = WeightSlots.create(tensors, DTYPE, device=torch.device(DEVICE))
    pipe.send(slots.handle())
    while (version := pipe.recv()) is not None:
        with torch.no_grad():
            slots.publish(changed(tensors, version).tensors, version=version)
        pipe.send(version)
    pipe.recv()


def ipc(arguments: argparse.Namespace, model: PreTrainedModel, settings: GenerateConfig) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=trainer, args=(its, arguments), daemon=True)
    process.start()

    def answer() -> Any:
        if not mine.poll(WAIT_SECONDS):
            raise TimeoutError(f"the publishing process did not answer for {WAIT_SECONDS} seconds.")
        return mine.recv()

    slots, fetches = WeightSlots.attach(answer()), []

    def published() -> Iterator[Weights]:
        for version in itertools.count(1):
            mine.send(version)
            answer()
            milliseconds, weights = timed(slots.fetch)
            fetches.append(milliseconds)
            yield weights

    engine = make_engine(model, [1], settings, seed=0, max_length=arguments.length, beside_trainer=True)
    figures = measure(engine, arguments.slots, published(), arguments.updates)
    figures["fetch ms"] = float(np.median(fetches[2:]))
    mine.send(None)
    mine.send(None)
    process.join(WAIT_SECONDS)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=["whole", "merged", "unmerged", "ipc"])
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--begin-when", type=Path, help="time nothing before this file is there")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    settings, lora = GenerateConfig(engine="vllm", slots=arguments.slots), LoraConfig(rank=arguments.rank)
    found: dict[str, dict[str, float]] = {}

    def make(**options: Any) -> tuple[PreTrainedModel, Engine]:
        model = make_model(arguments)
        return model, make_engine(model, [1], settings, seed=0, max_length=arguments.length, **options)

    def adapter(model: PreTrainedModel, version: int) -> Weights:
        return changed({name: p for name, p in model.named_parameters() if ".lora_" in name}, version)

    made = {way: make(**({"lora": lora} if way == "unmerged" else {})) for way in arguments.ways if way != "ipc"}
    print("engines made", flush=True)
    while arguments.begin_when is not None and not arguments.begin_when.exists():
        time.sleep(0.2)
    tokens = np.random.default_rng(1).integers(10, arguments.vocabulary, size=200).astype(np.int32)
    scores: dict[str, np.ndarray] = {}
    for way, (model, engine) in made.items():
        updates = (changed(dict(model.named_parameters()), version) for version in itertools.count(1))
        if way != "whole":
            add_lora(model, lora, base="random", seed=0)
            engine = engine if way == "unmerged" else LoraEngine(engine, model)
            updates = (adapter(model, version) for version in itertools.count(1))
        found[way] = measure(engine, arguments.slots, updates, arguments.updates)
        if way != "whole":
            engine.load(adapter(model, 1))
            scores[way] = engine.score([tokens[:100]], [tokens[100:]], 1.0)[0]
        print(way, {name: round(value, 1) for name, value in found[way].items()}, flush=True)
    if len(scores) == 2:
        gap = np.abs(scores["merged"] - scores["unmerged"])
        found["merged against unmerged"] = {"mean": float(gap.mean()), "max": float(gap.max())}
        print("merged against unmerged: log-probs differ by", found["merged against unmerged"], flush=True)
    if "ipc" in arguments.ways and DEVICE == "cuda":
        found["ipc"] = ipc(arguments, make_model(arguments), settings)
        print("ipc", {name: round(value, 1) for name, value in found["ipc"].items()}, flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
