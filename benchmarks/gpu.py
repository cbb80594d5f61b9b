"""What one GPU does: decoding and TB training on random weights of real shapes, with the limits beside the figures.

    python benchmarks/gpu.py [check] [decode] [train] [publish]      all parts without arguments

Useful tokens over wall time from the first prompt to the last response, prefill and tail included, temperature 1, log-probs
returned. Greedy equality is checked in the same run. Timings are of the second pass: the first compiles kernels and
captures graphs, and is printed too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tba.config import TrainConfig
from tba.generate.native import NativeEngine
from tba.generate.scoring import ReferenceScorer
from tba.models.compiled import compile_layers
from tba.models.policy import PolicyModel
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.train.collate import Budget
from tba.train.optim import MasterAdamW
from tba.train.step import TrainStep
from tba.types import Batch, Prompt, Request, Sampling, Totals

DEVICE = torch.device("cuda")
BYTES_PER_SECOND = 4.8e12
"""Of an H200's memory."""
FLOPS = 790e12
"""bf16 matrix products as measured on an H200."""


def qwen_05b(layers: int = 24) -> PreTrainedModel:
    """The shape of Qwen2.5-0.5B: tied head of 152k tokens."""
    return _make(
        Qwen2ForCausalLM,
        Qwen2Config(
            vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers, num_attention_heads=14,
            num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=0.02,
        ),
    )  # fmt: skip


def llama_11b(layers: int = 22) -> PreTrainedModel:
    """The shape of TinyLlama and RhoMath-1B."""
    return _make(
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=32,
            num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=False, initializer_range=0.02,
        ),
    )  # fmt: skip


SHAPES: dict[str, Callable[..., PreTrainedModel]] = {"0.5B Qwen2.5": qwen_05b, "1.1B Llama": llama_11b}


def _make(kind: type[PreTrainedModel], config: object) -> PreTrainedModel:
    torch.manual_seed(0)
    with DEVICE:
        return kind(config).to(torch.bfloat16).eval()


def say(*parts: object) -> None:
    print(*parts, flush=True)


# --- decoding ----------------------------------------------------------------------------------------------------------


def requests(
    num_prompts: int, prompt_tokens: int, vocabulary: int, *, lengths: np.ndarray | None = None
) -> Iterator[Request]:
    rng = np.random.default_rng(0)
    for index in range(num_prompts):
        ids = rng.integers(3, vocabulary, prompt_tokens).astype(np.int32)
        sampling = None if lengths is None else Sampling(max_new_tokens=int(lengths[index]))
        yield Request(prompt=Prompt(id=f"p{index}", token_ids=ids, text=""), sampling=sampling)


def make_engine(model: PreTrainedModel, slots: int = 256, **options: object) -> NativeEngine:
    settings = {"stop_ids": [2], "seed": 0, "slots": slots, "max_length": 512, "dtype": model.dtype, "device": DEVICE}
    return NativeEngine(model, **(settings | options))  # type: ignore[arg-type]


def timed_generation(
    engine: NativeEngine, make: Callable[[], Iterator[Request]], samples: int, longest: int
) -> tuple[int, float]:
    torch.cuda.synchronize()
    started = time.perf_counter()
    tokens = sum(
        len(completion.token_ids)
        for completion in engine.generate(make(), samples_per_prompt=samples, sampling=Sampling(max_new_tokens=longest))
    )
    torch.cuda.synchronize()
    return tokens, time.perf_counter() - started


def decode_limit(model: PreTrainedModel, slots: int, mean_length: float) -> float:
    """Tokens/s if every step did nothing but read the weights and the keys and values once."""
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters()) * 2
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size * 2  # a look-up reads no more than its rows
    head_dim = config.hidden_size // config.num_attention_heads
    cache = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim * mean_length * slots
    return slots / ((weights + cache) / BYTES_PER_SECOND)


def decode() -> None:
    must = {"0.5B Qwen2.5": (110_000, 200_000), "1.1B Llama": (90_000, 130_000)}
    for name, make in SHAPES.items():
        model = make()
        engine = make_engine(model)
        vocabulary = model.config.vocab_size
        for work, samples in (("256 prompts", 1), ("32 prompts x 8", 8)):
            build = partial(requests, 256 // samples, 128, vocabulary)
            first = timed_generation(engine, build, samples, 128)
            tokens, seconds = min(
                (timed_generation(engine, build, samples, 128) for _ in range(3)), key=lambda r: r[1] / r[0]
            )
            limit = decode_limit(model, 256, 192)
            say(
                f"decode {name}, 256 slots, 128 + 128, {work}: {tokens / seconds:,.0f} tok/s ({seconds * 1e3 / 128:.2f} ms a "
                f"step; first pass {first[1]:.1f} s; must {must[name][0]:,}, stretch {must[name][1]:,}; bandwidth limit "
                f"{limit:,.0f})"
            )
            rate = tokens / seconds
        lengths = np.random.default_rng(1).integers(32, 321, 1024)
        ragged = partial(requests, 1024, 128, vocabulary, lengths=lengths)
        timed_generation(engine, ragged, 1, 320)
        tokens, seconds = timed_generation(engine, ragged, 1, 320)
        say(
            f"ragged decode {name}, lengths 32 to 320, 1,024 prompts: {tokens / seconds:,.0f} tok/s, {tokens / seconds / rate:.0%} (must 80%, stretch 90%)"
        )
        del engine, model
        torch.cuda.empty_cache()


def check() -> None:
    """Greedy tokens of the fused engine, the plain one and transformers; sampled tokens of fused and plain, fp32."""
    for name, make in SHAPES.items():
        model = make(layers=3).float()
        fused, plain = (make_engine(model, slots=32, dtype=torch.float32) for _ in range(2))
        plain._fused = None
        assert fused._fused is not None, "the fused step must serve this shape"
        prompts = list(requests(16, 20, model.config.vocab_size))
        for label, sampling in (
            ("greedy", Sampling(max_new_tokens=48, greedy=True)),
            ("sampled", Sampling(max_new_tokens=48)),
        ):
            found = [
                {c.prompt_id: c for c in e.generate(prompts, samples_per_prompt=1, sampling=sampling)}
                for e in (fused, plain)
            ]
            same = sum(np.array_equal(found[0][key].token_ids, found[1][key].token_ids) for key in found[0])
            gap = max(np.abs(found[0][key].policy_log_probs - found[1][key].policy_log_probs).max() for key in found[0]
                      if np.array_equal(found[0][key].token_ids, found[1][key].token_ids))  # fmt: skip
            say(
                f"check {name} (3 layers, fp32), {label}: fused == plain for {same} of 16, largest log-prob gap {gap:.1e}"
            )
            if label == "greedy":
                ids = torch.tensor(np.stack([r.prompt.token_ids for r in prompts]), device=DEVICE, dtype=torch.long)
                with torch.no_grad():
                    out = (
                        model.generate(ids, max_new_tokens=48, do_sample=False, eos_token_id=2, pad_token_id=0)[:, 20:]
                        .cpu()
                        .numpy()
                    )
                equal = sum(
                    np.array_equal(found[0][f"p{i}"].token_ids, out[i][: len(found[0][f"p{i}"].token_ids)])
                    for i in range(16)
                )
                say(f"check {name}: fused == transformers generate, greedy, for {equal} of 16")
        del fused, plain, model
        torch.cuda.empty_cache()


# --- training ----------------------------------------------------------------------------------------------------------


def ragged_batch(vocabulary: int, *, prompts: int, samples: int) -> Batch:
    """Prompts of 50 to 150 tokens, responses of 50 to 450: sequences of 100 to 600."""
    rng = np.random.default_rng(0)
    lengths = torch.from_numpy(rng.integers(50, 451, prompts * samples))
    N = int(lengths.sum())
    shape = (prompts, samples)
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


def train() -> None:
    must = {"0.5B Qwen2.5": (130_000, 180_000), "1.1B Llama": (80_000, 95_000)}
    for name, make in SHAPES.items():
        for compiled in (False, True):
            model = make()
            batch = ragged_batch(model.config.vocab_size, prompts=16, samples=8)
            useful = int(batch.lengths.sum()) + 8 * sum(len(tokens) for tokens in batch.prompt_tokens)
            policy = PolicyModel(model)
            if compiled:
                compile_layers(model)
            optimizer = MasterAdamW(model.parameters(), TrainConfig())
            for share in (True, False):
                step = TrainStep(policy, TrajectoryBalance(), optimizer, temperature=1.0,
                                 budget=Budget(max_tokens=32_768, share_prompts=share))  # fmt: skip
                started = time.perf_counter()
                step(batch, beta=0.05, learning_rate=1e-6)
                torch.cuda.synchronize()
                first = time.perf_counter() - started
                times = []
                for _ in range(6):
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                    step(batch, beta=0.05, learning_rate=1e-6)
                    torch.cuda.synchronize()
                    times.append(time.perf_counter() - started)
                rate = useful / np.median(times)
                flops = 6 * sum(p.numel() for p in model.parameters()) * rate
                say(
                    f"train {name}, TB, 128 responses of 100 to 600 tokens, {'compiled' if compiled else 'eager'}, prompts "
                    f"{'shared' if share else 'not shared'}: {rate:,.0f} useful tok/s ({np.median(times) * 1e3:.0f} ms a step, "
                    f"{flops / FLOPS:.0%} of {FLOPS / 1e12:.0f} TFLOP/s by 6 x parameters; first {first:.0f} s; must "
                    f"{must[name][0]:,}, stretch {must[name][1]:,}; {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB)"
                )
            del model, policy, optimizer, step
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def check_train() -> None:
    """Gradients through FlashAttention, shared prompts and fused log-probs against plain fp32 attention, same weights."""
    for name, make in SHAPES.items():
        grads = {}
        for label, dtype, share in (
            ("fp32", torch.float32, False),
            ("bf16", torch.bfloat16, False),
            ("bf16 shared", torch.bfloat16, True),
        ):
            model = make(layers=2).to(dtype)
            batch = replace(
                ragged_batch(model.config.vocab_size, prompts=2, samples=4),
                reward_PK=torch.tensor([[1.0, 0, 0, 1], [0, 0, 1, 0]]),
            )
            policy = PolicyModel(model)
            optimizer = MasterAdamW(model.parameters(), TrainConfig())
            step = TrainStep(
                policy,
                TrajectoryBalance(),
                optimizer,
                temperature=1.0,
                budget=Budget(max_tokens=32_768, share_prompts=share),
            )
            result = step.gradients(batch, beta=0.05)
            grads[label] = (torch.cat([m.grad.flatten().float() for m in optimizer.masters]), result.said.log_pi_N)
            assert policy.packed
        for label in ("bf16", "bf16 shared"):
            a, b = grads["fp32"][0], grads[label][0]
            cosine = float(torch.nn.functional.cosine_similarity(a, b, dim=0))
            gap = float((grads["fp32"][1] - grads[label][1]).abs().max())
            say(
                f"check train {name} (2 layers), {label} against fp32: cosine of gradients {cosine:.5f}, log_pi gap {gap:.3f} per token"
            )


def score() -> None:
    """The reference pass of a searcher."""
    for name, make in SHAPES.items():
        model = make()
        scorer = ReferenceScorer(model, max_length=1024, token_budget=32_768, dtype=model.dtype, device=DEVICE)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(3, 1000, 128) for _ in range(32)]
        owners = [prompts[i // 8] for i in range(256)]
        answers = [rng.integers(3, 1000, rng.integers(50, 400)) for _ in range(256)]
        for _ in range(2):
            torch.cuda.synchronize()
            started = time.perf_counter()
            scorer.score(owners, answers, 1.0)
            seconds = time.perf_counter() - started
        say(f"score {name}: {sum(map(len, answers)) / seconds:,.0f} response tok/s")


PARTS = {"check": check, "decode": decode, "check_train": check_train, "train": train, "score": score}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    chosen = parser.parse_args().parts or list(PARTS)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py needs an NVIDIA GPU.")
    say(torch.cuda.get_device_name(), torch.__version__)
    for part in chosen:
        started = time.perf_counter()
        PARTS[part]()
        say(f"-- {part}: {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
