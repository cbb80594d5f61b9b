"""What one GPU does: decoding and TB training on random weights of real shapes, with the limits beside the figures.

    python benchmarks/gpu.py [check] [decode] [experts] [check_train] [train] [score] [roles] [publish]    without: all

Useful tokens over wall time from the first prompt to the last response, prefill and tail included, temperature 1, log-probs
returned. Greedy equality is checked in the same run. Timings are of later passes: the first compiles kernels and captures
graphs. One table at the end; lines as they come.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tba.config import TrainConfig, load_config
from tba.generate.native.engine import NativeEngine
from tba.generate.scoring import ReferenceScorer
from tba.models.load import compile_layers
from tba.models.policy import PolicyModel
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.runtime.links import Link
from tba.runtime.mps import start_mps
from tba.runtime.processes import RoleProcess
from tba.runtime.slot_memory import SlotsHandle
from tba.runtime.weight_slots import WeightSlots
from tba.search.role import WeightLoader
from tba.train.batch import Budget
from tba.train.optimizer import MasterAdamW
from tba.train.step import TrainStep
from tba.types import Batch, Prompt, Request, Sampling, Totals

BYTES_PER_SECOND = 4.8e12
"""Of an H200's memory."""
FLOPS = 790e12
"""bf16 matrix products as measured on an H200."""
QWEN, LLAMA = "0.5B Qwen2.5", "1.1B Llama"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    work: str
    figure: str
    must: str = ""
    limit: str = ""

    def __post_init__(self) -> None:
        print(f"{self.work}: {self.figure}  [must {self.must or '-'}; {self.limit or 'no limit stated'}]", flush=True)


def device() -> torch.device:
    return torch.device("cuda")


def qwen(layers: int = 24) -> PreTrainedModel:
    """The shape of Qwen2.5-0.5B: tied head of 152k tokens."""
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return _make(Qwen2ForCausalLM, config)


def llama(layers: int = 22) -> PreTrainedModel:
    """The shape of TinyLlama and RhoMath-1B."""
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    return _make(LlamaForCausalLM, config)


SHAPES: dict[str, Callable[..., PreTrainedModel]] = {QWEN: qwen, LLAMA: llama}


def _make(kind: Any, config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    with device():
        return kind(config).to(torch.bfloat16).eval()


# --- decoding ----------------------------------------------------------------------------------------------------------


def requests(
    num_prompts: int, prompt_tokens: int, vocabulary: int, lengths: np.ndarray | None = None
) -> Iterator[Request]:
    rng = np.random.default_rng(0)
    for index in range(num_prompts):
        ids = rng.integers(3, vocabulary, prompt_tokens).astype(np.int32)
        sampling = None if lengths is None else Sampling(max_new_tokens=int(lengths[index]))
        yield Request(prompt=Prompt(id=f"p{index}", token_ids=ids, text=""), sampling=sampling)


def make_engine(model: PreTrainedModel, *, slots: int = 256) -> NativeEngine:
    return NativeEngine(
        model, stop_ids=[2], seed=0, slots=slots, max_length=512, dtype=model.dtype, device=model.device
    )


def tokens_per_second(engine: NativeEngine, make: Callable[[], Iterator[Request]], samples: int, longest: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    found = engine.generate(make(), samples_per_prompt=samples, sampling=Sampling(max_new_tokens=longest))
    tokens = sum(len(completion.token_ids) for completion in found)
    return tokens / (time.perf_counter() - started)


def decode_limit(model: PreTrainedModel, slots: int, mean_length: float) -> float:
    """Tokens/s if every step did nothing but read the weights and the keys and values once."""
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters()) * 2
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size * 2  # a look-up reads no more than its rows
    head_dim = config.hidden_size // config.num_attention_heads
    cache = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim * mean_length * slots
    return slots / ((weights + cache) / BYTES_PER_SECOND)


def decode() -> Iterator[Row]:
    must = {QWEN: "110k, stretch 200k", LLAMA: "90k, stretch 130k"}
    for name, make in SHAPES.items():
        model = make()
        engine, vocabulary = make_engine(model), model.config.vocab_size
        limit = f"bandwidth {decode_limit(model, 256, 192):,.0f}"
        rates = {}
        for work, samples in (("256 prompts", 1), ("32 prompts x 8", 8)):
            build = partial(requests, 256 // samples, 128, vocabulary)
            tokens_per_second(engine, build, samples, 128)
            rates[samples] = max(tokens_per_second(engine, build, samples, 128) for _ in range(3))
            yield Row(
                work=f"decode {name}, 256 slots, 128 + 128 tokens, {work}",
                figure=f"{rates[samples]:,.0f} tok/s",
                must=must[name],
                limit=limit,
            )
        build = partial(requests, 1024, 128, vocabulary, np.random.default_rng(1).integers(32, 321, 1024))
        tokens_per_second(engine, build, 1, 320)
        ragged = max(tokens_per_second(engine, build, 1, 320) for _ in range(2))
        yield Row(
            work=f"decode {name}, ragged 32 to 320, 1,024 prompts",
            figure=f"{ragged:,.0f} tok/s, {ragged / rates[1]:.0%} of the rate above",
            must="80%, stretch 90%",
        )
        del engine, model
        torch.cuda.empty_cache()


def experts() -> Iterator[Row]:
    """A mixture of experts, the shape of OLMoE-1B-7B: the engine against transformers' `generate` of 32 tokens."""
    config = OlmoeConfig(
        vocab_size=50_304, hidden_size=2048, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=16,
        num_experts=64, num_experts_per_tok=8, max_position_embeddings=4096,
    )  # fmt: skip
    model = _make(OlmoeForCausalLM, config)
    engine, build = make_engine(model), partial(requests, 256, 128, config.vocab_size)
    tokens_per_second(engine, build, 1, 128)
    rate = max(tokens_per_second(engine, build, 1, 128) for _ in range(2))
    ids = torch.tensor(np.stack([r.prompt.token_ids for r in build()]), device=model.device, dtype=torch.long)
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        model.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=True, pad_token_id=0)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    own = 256 * 32 / min(seconds)
    yield Row(
        work="decode OLMoE 1B-7B, 256 slots, 128 + 128 tokens",
        figure=f"{rate:,.0f} tok/s; transformers' generate {own:,.0f}",
    )


def check() -> Iterator[Row]:
    """Greedy tokens of the fused engine, the plain one and transformers; sampled tokens of fused and plain, fp32."""
    for name, make in SHAPES.items():
        model = make(layers=3).float()
        fused, plain = (make_engine(model, slots=32) for _ in range(2))
        assert fused._fused is not None, "the fused step must serve this shape"
        plain._fused = None
        prompts = list(requests(16, 20, model.config.vocab_size))
        greedy = Sampling(max_new_tokens=48, greedy=True)
        for label, sampling in (("greedy", greedy), ("sampled", Sampling(max_new_tokens=48))):
            got, want = (
                {c.prompt_id: c for c in engine.generate(prompts, samples_per_prompt=1, sampling=sampling)}
                for engine in (fused, plain)
            )
            same = [key for key in want if np.array_equal(got[key].token_ids, want[key].token_ids)]
            gap = max(np.abs(got[key].policy_log_probs - want[key].policy_log_probs).max() for key in same)
            yield Row(
                work=f"check {name} (3 layers, fp32), {label}: fused == plain",
                figure=f"{len(same)} of 16, log-prob gap {gap:.0e}",
                must="16" if label == "greedy" else "",
                limit="sums in another order" if label == "sampled" else "",
            )
        found = {c.prompt_id: c.token_ids for c in fused.generate(prompts, samples_per_prompt=1, sampling=greedy)}
        ids = torch.tensor(np.stack([r.prompt.token_ids for r in prompts]), device=model.device, dtype=torch.long)
        out = (
            model.generate(ids, max_new_tokens=48, do_sample=False, eos_token_id=2, pad_token_id=0)[:, 20:]
            .cpu()
            .numpy()
        )
        equal = sum(np.array_equal(found[f"p{i}"], out[i][: len(found[f"p{i}"])]) for i in range(16))
        yield Row(work=f"check {name}, greedy: fused == transformers generate", figure=f"{equal} of 16", must="16")


# --- training ----------------------------------------------------------------------------------------------------------


def ragged_batch(vocabulary: int, *, prompts: int = 16, samples: int = 8) -> Batch:
    """Prompts of 50 to 150 tokens, responses of 50 to 450: sequences of 100 to 600."""
    rng = np.random.default_rng(0)
    lengths = torch.from_numpy(rng.integers(50, 451, prompts * samples))
    N, shape = int(lengths.sum()), (prompts, samples)
    return Batch(
        prompt_ids=tuple(f"p{p}" for p in range(prompts)),
        prompt_tokens=tuple(torch.from_numpy(rng.integers(3, vocabulary, rng.integers(50, 151))) for _ in range(prompts)),
        token_ids_N=torch.from_numpy(rng.integers(3, vocabulary, N)),
        offsets=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
        loss_mask_N=torch.ones(N, dtype=torch.bool),
        log_ref_N=torch.full((N,), -10.0), behaviour_N=torch.full((N,), -10.0), policy_N=torch.full((N,), -10.0),
        rewards={}, reward_PK=torch.from_numpy(rng.integers(0, 2, shape)).float(), weight_PK=torch.ones(shape),
        version_PK=torch.zeros(shape, dtype=torch.long), truncated_PK=torch.zeros(shape, dtype=torch.bool),
        rows_PK=torch.zeros(shape, dtype=torch.long), totals=Totals(prompts=prompts, responses=prompts * samples, tokens=N),
    )  # fmt: skip


def useful_tokens(batch: Batch) -> int:
    """Prompt and response of every response."""
    return int(batch.lengths.sum()) + batch.shape[1] * sum(len(tokens) for tokens in batch.prompt_tokens)


def make_step(model: PreTrainedModel, *, share: bool, max_tokens: int = 32_768) -> TrainStep:
    optimizer = MasterAdamW(model.parameters(), TrainConfig())
    budget = Budget(max_tokens=max_tokens, share_prompts=share)
    return TrainStep(PolicyModel(model), TrajectoryBalance(), optimizer, budget=budget, temperature=1.0)


def step_seconds(step: TrainStep, batch: Batch) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    step(batch, beta=0.05, learning_rate=1e-6)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def train() -> Iterator[Row]:
    must = {QWEN: "130k, stretch 180k", LLAMA: "80k, stretch 95k"}
    for name, make in SHAPES.items():
        for compiled, share in ((False, True), (True, True), (True, False)):
            model = make()
            batch = ragged_batch(model.config.vocab_size)
            step = make_step(model, share=share)
            if compiled:
                compile_layers(model)
            first = step_seconds(step, batch)
            seconds = float(np.median([step_seconds(step, batch) for _ in range(6)]))
            rate = useful_tokens(batch) / seconds
            mfu = 6 * sum(parameter.numel() for parameter in model.parameters()) * rate / FLOPS
            yield Row(
                work=f"TB training {name}, 128 sequences of 100 to 600 tokens, {'compiled' if compiled else 'eager'}, "
                f"prompts {'shared' if share else 'not shared'}",
                figure=f"{rate:,.0f} useful tok/s ({seconds * 1e3:.0f} ms a step, the first {first:.0f} s)",
                must=must[name],
                limit=f"{mfu:.0%} of {FLOPS / 1e12:.0f} TFLOP/s by 6 x parameters",
            )
            del model, step
            torch.cuda.empty_cache()


def check_train() -> Iterator[Row]:
    """Gradients through FlashAttention, shared prompts and fused log-probs against plain fp32 attention, same weights."""
    for name, make in SHAPES.items():
        found = {}
        for label, dtype, share in (
            ("fp32", torch.float32, False),
            ("", torch.bfloat16, False),
            (", shared", torch.bfloat16, True),
        ):
            model = make(layers=2).to(dtype)
            reward_PK = torch.tensor([[1.0, 0, 0, 1], [0, 0, 1, 0]])
            batch = replace(ragged_batch(model.config.vocab_size, prompts=2, samples=4), reward_PK=reward_PK)
            step = make_step(model, share=share)
            step.gradients(batch, beta=0.05)
            found[label] = torch.cat([master.grad.flatten().float() for master in step.optimizer.masters])
        for label in ("", ", shared"):
            cosine = float(torch.nn.functional.cosine_similarity(found["fp32"], found[label], dim=0))
            yield Row(
                work=f"check {name} (2 layers): gradient, bf16{label} against fp32", figure=f"cosine {cosine:.5f}"
            )


def score() -> Iterator[Row]:
    """The reference pass of a searcher."""
    for name, make in SHAPES.items():
        model = make()
        scorer = ReferenceScorer(model, max_length=1024, token_budget=32_768, dtype=model.dtype, device=model.device)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(3, 1000, 128) for _ in range(32)]
        answers = [rng.integers(3, 1000, rng.integers(50, 400)) for _ in range(256)]
        rates = []
        for _ in range(3):
            started = time.perf_counter()
            scorer.score([prompts[i // 8] for i in range(256)], answers, 1.0)
            rates.append(sum(map(len, answers)) / (time.perf_counter() - started))
        yield Row(work=f"reference scores {name}, 256 responses", figure=f"{max(rates):,.0f} response tok/s")


# --- both roles --------------------------------------------------------------------------------------------------------


def _search_role(tokens: Any, go: Any) -> None:
    """Decodes without end while `go` is set, counting tokens."""
    model = qwen()
    engine = make_engine(model)

    def endless() -> Iterator[Request]:
        while True:
            yield from requests(256, 128, model.config.vocab_size)

    for completion in engine.generate(endless(), samples_per_prompt=8, sampling=Sampling(max_new_tokens=128)):
        tokens.value += len(completion.token_ids)
        go.wait()


def _train_role(tokens: Any, go: Any) -> None:
    model = qwen()
    batch = ragged_batch(model.config.vocab_size)
    step = make_step(model, share=True, max_tokens=16_384)
    while True:
        step_seconds(step, batch)
        tokens.value += useful_tokens(batch)
        go.wait()


def roles() -> Iterator[Row]:
    """Each alone, then both on the GPU, with MPS where it can be started. This process must not touch the GPU."""
    yield _measure_roles("without MPS")
    if start_mps(load_config(None, [])):
        yield _measure_roles("with MPS")
    else:
        yield Row(work="both roles on one GPU, MPS", figure="MPS could not be started")


def _measure_roles(label: str, seconds: float = 10.0) -> Row:
    context = multiprocessing.get_context("spawn")
    counts, gates = [context.Value("q", 0) for _ in range(2)], [context.Event() for _ in range(2)]
    targets = (_search_role, _train_role)
    processes = [context.Process(target=t, args=(c, g), daemon=True) for t, c, g in zip(targets, counts, gates)]
    for process, gate in zip(processes, gates):
        gate.set()
        process.start()
    while not all(count.value for count in counts):  # both are warm
        time.sleep(0.2)

    def rates(working: tuple[int, ...]) -> list[float]:
        for index, gate in enumerate(gates):
            gate.set() if index in working else gate.clear()
        time.sleep(2.0)
        before = [count.value for count in counts]
        time.sleep(seconds)
        return [(count.value - value) / seconds for count, value in zip(counts, before)]

    alone_search, alone_train, both = rates((0,))[0], rates((1,))[1], rates((0, 1))
    for process in processes:  # both at once: under MPS the end of one is a fault in the other
        process.kill()
    for process in processes:
        process.join()
    share = both[0] / alone_search + both[1] / alone_train
    rates_of = f"search {both[0]:,.0f} of {alone_search:,.0f}, train {both[1]:,.0f} of {alone_train:,.0f}"
    return Row(
        work=f"both roles on one GPU, {QWEN}, {label}",
        figure=f"{share:.2f} (tok/s: {rates_of})",
        must="1.2, stretch 1.4",
    )


# --- weights -----------------------------------------------------------------------------------------------------------


def _use_weights(link: Link, *, weights: SlotsHandle) -> None:
    """A searcher that decodes without end, and says when it has newer weights in use."""
    model = qwen()
    engine = make_engine(model)
    ends: Any = SimpleNamespace(weights=WeightSlots.attach(weights))  # all that a loader wants of a searcher's ends
    loader = WeightLoader(ends, engine)

    def tick() -> None:
        before = engine.version
        loader.load_newer()
        if engine.version != before:
            torch.cuda.synchronize()
            link.send((engine.version, time.monotonic()))

    def endless() -> Iterator[Request]:
        while True:
            yield from requests(32, 128, model.config.vocab_size)

    for _ in engine.generate(
        endless(), samples_per_prompt=8, sampling=Sampling(max_new_tokens=128), between_steps=tick
    ):
        pass


def publish(times: int = 30) -> Iterator[Row]:
    """From the trainer's call to the searcher's engine holding the weights, while it decodes 256 slots."""
    model = qwen()
    policy, tensors = PolicyModel(model), dict(model.named_parameters())
    slots = WeightSlots.create(tensors, model.dtype, device=device())
    log = Path(tempfile.mkdtemp()) / "searcher.log"
    process = RoleProcess("searcher", _use_weights, {"weights": slots.handle()}, log=log)
    latencies, writing = [], []
    for version in range(1, times + 6):
        started = time.monotonic()
        published = slots.publish(tensors, version=version)
        written = time.monotonic()
        slots.add_canary(policy.canary(published.tensors))
        found = process.link.receive(timeout_seconds=120.0)
        process.check()
        assert found is not None, "the searcher said nothing"
        assert found[0] == version, f"the searcher has version {found[0]} in use, not {version}"
        if version > 5:  # the first ones compile and capture
            latencies.append(1e3 * (found[1] - started))
            writing.append(1e3 * (written - started))
        time.sleep(0.05)
    process.kill()
    size = sum(tensor.numel() for tensor in tensors.values()) * model.dtype.itemsize
    yield Row(
        work=f"publish to in-use, {QWEN}, same GPU, in flight, {times} times",
        figure=f"median {np.median(latencies):.1f} ms, longest {max(latencies):.1f} (writing {np.median(writing):.1f})",
        must="30 ms, stretch 10 ms",
        limit=f"three copies and two checksums of {size / 1e9:.1f} GB by bandwidth {8e3 * size / BYTES_PER_SECOND:.1f} ms, "
        "and at most 8 decode steps until the searcher looks",
    )


PARTS = {"roles": roles, "check": check, "decode": decode, "experts": experts, "check_train": check_train, "train": train,
         "score": score, "publish": publish}  # fmt: skip
"""`roles` first: it must run before this process touches the GPU."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    chosen = parser.parse_args().parts or list(PARTS)
    unknown = [part for part in chosen if part not in PARTS]
    if unknown or not torch.cuda.is_available():
        raise SystemExit(f"unknown part {unknown[0]}" if unknown else "benchmarks/gpu.py needs an NVIDIA GPU.")
    rows = [row for part in PARTS if part in chosen for row in PARTS[part]()]
    print(
        f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n| work | figure | must | limit |\n|---|---|---|---|"
    )
    for row in rows:
        print(f"| {row.work} | {row.figure} | {row.must} | {row.limit} |")


if __name__ == "__main__":
    main()
