"""Decoding: tokens per second of the native engine, and whether they are the right ones.

Useful tokens over wall time from the first prompt to the last response, prefill and tail included, temperature 1, log-probs
returned. The first pass compiles kernels and captures graphs and is not counted. Behind every timing the log-probs that came
with some of its responses are compared with those of one pass over prompt and response; greedy equality is checked on fewer
layers in fp32, where nothing but a mistake can change it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch

from gpu_bench.models import make_engine, make_model
from gpu_bench.workloads import SHAPES, WORKLOADS, Row, Shape, Workload
from tba.engine.decoder.build import make_decoder
from tba.engine.native.engine import NativeEngine
from tba.types import Completion, Prompt, Request, Sampling

TIMED_SECONDS = 8.0
"""No further pass of a workload begins after so long."""
SCORED_TOKENS = 40_000
"""Prompt and response tokens whose log-probs are compared behind a timing."""


def requests(workload: Workload, vocabulary: int, repeat: int) -> list[Request]:
    return [
        Request(
            prompt=Prompt(id=f"{repeat}-{index}", token_ids=ids, text=""), sampling=Sampling(max_new_tokens=int(length))
        )
        for index, (ids, length) in enumerate(zip(workload.token_ids(vocabulary, repeat), workload.lengths()))
    ]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One run through a workload."""

    seconds: float
    prompts: dict[str, np.ndarray]
    completions: list[Completion]

    @property
    def rate(self) -> float:
        return sum(len(completion.token_ids) for completion in self.completions) / self.seconds

    def gap(self, engine: NativeEngine) -> float:
        """Mean difference, in nats per token, of the log-probs that came with responses to those of one pass over them."""
        chosen, tokens = [], 0
        for completion in self.completions:
            tokens += len(self.prompts[completion.prompt_id]) + len(completion.token_ids)
            if chosen and tokens > SCORED_TOKENS:
                break
            chosen.append(completion)
        scores = engine.score([self.prompts[c.prompt_id] for c in chosen], [c.token_ids for c in chosen], 1.0)
        return float(np.mean(np.abs(np.concatenate(scores) - np.concatenate([c.policy_log_probs for c in chosen]))))


def run_pass(engine: NativeEngine, workload: Workload, repeat: int) -> Pass:
    asked = requests(workload, engine.vocabulary, repeat)
    sampling = Sampling(max_new_tokens=workload.new_tokens)
    torch.cuda.synchronize()
    started = time.perf_counter()
    completions = list(engine.generate(asked, samples_per_prompt=workload.samples, sampling=sampling))
    seconds = time.perf_counter() - started
    return Pass(seconds=seconds, prompts={r.prompt.id: r.prompt.token_ids for r in asked}, completions=completions)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What a workload gave."""

    mean: float
    """Tokens/s."""
    all: list[float]
    first_seconds: float
    """Of the pass that compiles and captures."""
    gap: float
    gigabytes: float
    """Most memory of the GPU that was in use."""


def time_workload(engine: NativeEngine, workload: Workload, passes: int = 3) -> Timing:
    torch.cuda.reset_peak_memory_stats()
    first = run_pass(engine, workload, 0)
    timed, began = [], time.perf_counter()
    while not timed or (len(timed) < passes and time.perf_counter() - began < TIMED_SECONDS):
        timed.append(run_pass(engine, workload, 1 + len(timed)))
    rates = [done.rate for done in timed]
    peak = torch.cuda.max_memory_allocated() / 1e9
    return Timing(mean=fmean(rates), all=rates, first_seconds=first.seconds, gap=timed[-1].gap(engine), gigabytes=peak)


def decode_rows(shapes: Sequence[str], workloads: Sequence[str]) -> Iterator[Row]:
    for key in shapes:
        for name, timing in time_shape(SHAPES[key], workloads):
            alone, behind_prefill = WORKLOADS[name].limits(SHAPES[key])
            yield Row(
                work=f"decode {SHAPES[key].name}, {name}: {WORKLOADS[name].title}",
                figure=f"{timing.mean:,.0f} tok/s ({', '.join(f'{rate:,.0f}' for rate in timing.all)}; first pass "
                f"{timing.first_seconds:.1f} s; log-prob gap {timing.gap:.1e}; {timing.gigabytes:.0f} GB)",
                limit=f"steps alone {alone:,.0f}, with prefill {behind_prefill:,.0f}",
            )


def time_shape(shape: Shape, workloads: Sequence[str], passes: int = 3) -> Iterator[tuple[str, Timing]]:
    """Every workload of a shape. A workload that fails, as for lack of memory, is reported and left out."""
    started = time.perf_counter()
    model = make_model(shape)
    made = time.perf_counter()
    decoder = make_decoder(
        model, max_length=shape.config["max_position_embeddings"], dtype=model.dtype, device=model.device
    )
    del model
    torch.cuda.empty_cache()
    seconds = f"{made - started:.1f} s to make, {time.perf_counter() - made:.1f} s to copy and check"
    print(f"{shape.name}: {seconds}", flush=True)
    # By slots: an engine's tables and graphs are for one number of them.
    for slots in sorted({WORKLOADS[name].slots for name in workloads}, reverse=True):
        own = [name for name in workloads if WORKLOADS[name].slots == slots]
        engine = make_engine(decoder, slots=slots, max_length=max(WORKLOADS[name].max_length for name in own))
        for name in own:
            try:
                yield name, time_workload(engine, WORKLOADS[name], passes)
            except (RuntimeError, ValueError) as error:  # out of memory is one of the former
                print(f"decode {shape.name}, {name} FAILED: {type(error).__name__}: {error}"[:600], flush=True)
                torch.cuda.empty_cache()
        del engine
        torch.cuda.empty_cache()


# --- checks ------------------------------------------------------------------------------------------------------------


CHECKED = (
    Workload(name="short", slots=32, prompts=16, prompt_tokens=20, samples=1, new_tokens=48),
    Workload(name="long, shared", slots=32, prompts=4, prompt_tokens=700, samples=4, new_tokens=48),
)
"""Prompts shorter than a page of the cache, and prompts of many pages with several samples each."""


def check_rows(shapes: Sequence[str]) -> Iterator[Row]:
    """Greedy tokens of the fused engine, the plain one and transformers; log-probs of sampled ones, in fp32."""
    for key in shapes:
        shape, layers = SHAPES[key], SHAPES[key].checked_layers
        model = make_model(shape, layers=layers, dtype=torch.float32)
        fused, plain_decoder = (
            make_engine(model, slots=32, max_length=1024),
            make_decoder(model, max_length=1024, dtype=torch.float32, device=model.device),
        )
        assert fused._fused is not None, f"the fused step must serve {shape.name}"
        plain_decoder.fused_pass = None  # then the engine takes the plain step, as for a family without fused kernels
        plain = make_engine(plain_decoder, slots=32, max_length=1024)
        what = f"check {shape.name} ({layers} layers, fp32)"
        for workload in CHECKED:
            number = workload.prompts * workload.samples
            got, want = (greedy(engine, workload) for engine in (fused, plain))
            same = sum(np.array_equal(got[response], want[response]) for response in want)
            yield Row(work=f"{what}, {workload.name}, greedy: fused == plain", figure=f"{same} of {number}")
            gap = run_pass(fused, workload, 2).gap(plain)
            yield Row(
                work=f"{what}, {workload.name}, sampled: log-probs, fused - one plain pass",
                figure=f"{gap:.0e} nats per token",
            )
        found, prompts = greedy(fused, CHECKED[0]), CHECKED[0].token_ids(shape.vocabulary, 1)
        ids = torch.from_numpy(prompts).long().to(model.device)
        options = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
        out = model.generate(ids, **options)[:, ids.shape[1] :].cpu().numpy()
        equal = sum(np.array_equal(found[f"1-{i}", 0], row[: len(found[f"1-{i}", 0])]) for i, row in enumerate(out))
        yield Row(work=f"{what}, greedy: fused == transformers generate", figure=f"{equal} of 16")
        del model, fused, plain, plain_decoder
        torch.cuda.empty_cache()


def greedy(engine: NativeEngine, workload: Workload) -> dict[tuple[str, int], np.ndarray]:
    """Tokens by prompt and sample."""
    asked = [Request(prompt=request.prompt) for request in requests(workload, engine.vocabulary, 1)]
    sampling = Sampling(max_new_tokens=workload.new_tokens, greedy=True)
    found = engine.generate(asked, samples_per_prompt=workload.samples, sampling=sampling)
    return {(completion.prompt_id, completion.sample_index): completion.token_ids for completion in found}
