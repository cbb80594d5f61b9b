"""Responses per CPU second: the native engine against transformers' `generate`, in one run.

    OMP_NUM_THREADS=1 python benchmarks/engine.py            # about three minutes; --quick for one repeat

Model: Llama shape, random weights, 1.05M parameters: 5 layers, hidden 128, 4 heads over 2 key/value heads of 32, MLP
384, vocabulary 512 (tied). Sampling at T = 1 without truncation, one thread, prompts of 24 to 56 tokens. With random
weights all tokens are nearly equally likely, so 16 of the 512 ids as stop ids end a response with probability 1/32 per
token after the first 16: lengths 17 to 96, mean about 46. Both sides return a log-prob for every token, and only tokens
up to and including the stop token count. CPU time is process_time; repeats of the same work alternate between the sides
and the best of each is shown, because other work on the machine only ever slows one down.

Cases:
    one batch      256 prompts, one response each, 256 side by side: `generate` ends with its longest response
    stream         512 prompts: `generate` in batches of 256, the native engine refills 256 slots
    equal lengths  as one batch, but every response has 48 tokens: nothing ragged to win on
    shared prompt  32 prompts with 8 samples each
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tba.generate.native.engine import NativeEngine
from tba.models.cpu import use_cpu
from tba.types import Prompt, Request, Sampling

BATCH = 256
VOCABULARY = 512
STOP_IDS = tuple(range(2, 18))
LAYERS, HIDDEN, HEADS, KV_HEADS, MLP = 5, 128, 4, 2, 384


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of work."""

    name: str
    num_prompts: int = BATCH
    samples_per_prompt: int = 1
    min_new_tokens: int = 16
    max_new_tokens: int = 96
    stop_ids: tuple[int, ...] = STOP_IDS


CASES = (
    Case(name="one batch"),
    Case(name="stream", num_prompts=2 * BATCH),
    Case(name="equal lengths", min_new_tokens=48, max_new_tokens=48),
    Case(name="shared prompt", num_prompts=32, samples_per_prompt=8),
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one run did."""

    responses: int
    tokens: int
    """Useful ones: up to and including the stop token."""
    seconds: float
    """CPU seconds."""
    log_prob: float
    """Mean per token: both sides must agree on it."""

    @property
    def rate(self) -> float:
        return self.responses / self.seconds


def make_model(dtype: torch.dtype) -> LlamaForCausalLM:
    """The same weights for both sides."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def make_prompts(count: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(24, 57, size=count)
    return [
        Prompt(id=str(index), token_ids=rng.integers(18, VOCABULARY, size=length).astype(np.int32), text="")
        for index, length in enumerate(lengths)
    ]


@torch.inference_mode()
def run_generate(model: LlamaForCausalLM, prompts: Sequence[Prompt], case: Case, seed: int) -> Work:
    """transformers: left-padded batches, log-probs from the logits of every step."""
    torch.manual_seed(seed)
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=case.min_new_tokens,
        max_new_tokens=case.max_new_tokens,
        eos_token_id=list(case.stop_ids),
        pad_token_id=0,
        num_return_sequences=case.samples_per_prompt,
        return_dict_in_generate=True,
        output_logits=True,
    )
    per_batch = BATCH // case.samples_per_prompt
    start, lengths, log_probs = time.process_time(), [], []
    for first in range(0, len(prompts), per_batch):
        ids, mask = left_padded(prompts[first : first + per_batch])
        output = model.generate(ids, attention_mask=mask, generation_config=settings)
        tokens = output.sequences[:, ids.shape[1] :]
        chosen = torch.stack(
            [
                logits.float().gather(1, column[:, None]).squeeze(1) - torch.logsumexp(logits.float(), dim=-1)
                for logits, column in zip(output.logits, tokens.unbind(1))
            ],
            dim=1,
        )
        for row, values in zip(tokens.tolist(), chosen):
            stop = next((index for index, token in enumerate(row) if token in case.stop_ids), len(row) - 1)
            lengths.append(stop + 1)
            log_probs.append(values[: stop + 1].numpy())
    seconds = time.process_time() - start
    return Work(
        responses=len(lengths),
        tokens=sum(lengths),
        seconds=seconds,
        log_prob=float(np.concatenate(log_probs).mean()),
    )


def left_padded(prompts: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(prompt.token_ids) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt.token_ids) :] = torch.from_numpy(prompt.token_ids.astype(np.int64))
    return ids, (ids != 0).long()


def run_native(engine: NativeEngine, prompts: Sequence[Prompt], case: Case, seed: int) -> Work:
    engine.seed = seed
    sampling = Sampling(max_new_tokens=case.max_new_tokens, min_new_tokens=case.min_new_tokens)
    start = time.process_time()
    completions = list(
        engine.generate(
            (Request(prompt=prompt) for prompt in prompts),
            samples_per_prompt=case.samples_per_prompt,
            sampling=sampling,
        )
    )
    seconds = time.process_time() - start
    return Work(
        responses=len(completions),
        tokens=sum(len(completion.token_ids) for completion in completions),
        seconds=seconds,
        log_prob=float(np.concatenate([completion.policy_log_probs for completion in completions]).mean()),
    )


def make_engine(model: LlamaForCausalLM, dtype: torch.dtype) -> NativeEngine:
    return NativeEngine(model, stop_ids=STOP_IDS, seed=0, slots=BATCH, max_length=160, dtype=dtype)


def best(works: Sequence[Work]) -> Work:
    return max(works, key=lambda work: work.rate)


def measure(
    case: Case, sides: dict[str, Callable[[Sequence[Prompt], Case, int], Work]], repeats: int
) -> dict[str, Work]:
    prompts = make_prompts(case.num_prompts)
    warm = replace(case, min_new_tokens=4, max_new_tokens=4)
    for run in sides.values():
        run(prompts[:BATCH], warm, 0)
    found: dict[str, list[Work]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            found[name].append(run(prompts, case, 0))
    return {name: best(works) for name, works in found.items()}


def report(case: Case, works: dict[str, Work], peaks: dict[torch.dtype, float], bandwidth: float) -> None:
    base = works["generate fp32"].rate
    print(f"\n{case.name}: {case.num_prompts} prompts x {case.samples_per_prompt}")
    print(f"  {'':16} {'responses/CPU s':>16} {'tokens/CPU s':>13} {'mean length':>12} {'log-prob':>9} {'ratio':>7}")
    for name, work in works.items():
        print(
            f"  {name:16} {work.rate:16.0f} {work.tokens / work.seconds:13.0f} {work.tokens / work.responses:12.1f} "
            f"{work.log_prob:9.4f} {work.rate / base:6.2f}x"
        )
    work = works["native fp32"]
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        print(f"  limit of arithmetic alone, {name}: {arithmetic_limit(case, work, peaks[dtype]):.0f} responses/CPU s")
    print(f"  limit of reading keys and values alone (fp32): {cache_limit(work, bandwidth):.0f} responses/CPU s")


def arithmetic_limit(case: Case, work: Work, peak: float) -> float:
    """Weight matrices only, prompt tokens once per prompt, response tokens once, at the speed of a large product."""
    head_dim = HIDDEN // HEADS
    layer = HIDDEN * head_dim * (HEADS + 2 * KV_HEADS) + HIDDEN * HIDDEN + 3 * HIDDEN * MLP
    per_token = 2 * LAYERS * layer
    length = work.tokens / work.responses
    per_response = per_token * (40 / case.samples_per_prompt + length) + 2 * HIDDEN * VOCABULARY * length
    return peak / per_response


def cache_limit(work: Work, bandwidth: float) -> float:
    """Each token reads all keys and values before it: prompt of 40 on average and half its response."""
    length = work.tokens / work.responses
    row = 2 * LAYERS * KV_HEADS * (HIDDEN // HEADS) * 4
    return bandwidth / (row * length * (40 + length / 2))


def peak_flops(dtype: torch.dtype) -> float:
    a, b = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    return 2 * 1024**3 / _fastest(lambda: a @ b)


def read_bandwidth() -> float:
    """Bytes per second of summing 64 MB, the size of a busy cache."""
    table = torch.zeros(16 * 2**20)
    return table.numel() * 4 / _fastest(lambda: table.sum())


def _fastest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(10):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat instead of three")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="only this case")
    arguments = parser.parse_args()
    use_cpu(1)
    transformers.logging.set_verbosity_error()
    model, model_bf16 = make_model(torch.float32), make_model(torch.bfloat16)
    fp32, bf16 = make_engine(model, torch.float32), make_engine(model, torch.bfloat16)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, batch {BATCH}, one thread")
    peaks = {dtype: peak_flops(dtype) for dtype in (torch.float32, torch.bfloat16)}
    bandwidth = read_bandwidth()
    print(
        f"machine: fp32 {peaks[torch.float32] / 1e9:.0f} GFLOP/s, bf16 {peaks[torch.bfloat16] / 1e9:.0f} GFLOP/s, "
        f"reads {bandwidth / 1e9:.1f} GB/s"
    )
    sides = {
        "generate fp32": lambda prompts, case, seed: run_generate(model, prompts, case, seed),
        "generate bf16": lambda prompts, case, seed: run_generate(model_bf16, prompts, case, seed),
        "native fp32": lambda prompts, case, seed: run_native(fp32, prompts, case, seed),
        "native bf16": lambda prompts, case, seed: run_native(bf16, prompts, case, seed),
    }
    for case in CASES:
        if arguments.case in (None, case.name):
            report(case, measure(case, sides, 1 if arguments.quick else 3), peaks, bandwidth)


if __name__ == "__main__":
    main()
