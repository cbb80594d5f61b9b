"""The engine over transformers, for models that the native one does not know: 32 prompts x 8 responses decoded together,
against one prompt at a time (as it was before), in one run.

    OMP_NUM_THREADS=1 python benchmarks/fallback.py                     # a small Cohere shape on the CPU, about a minute
    python benchmarks/fallback.py --device cuda --layers 16 --hidden 2048 --mlp 8192 --vocabulary 32768    # 1.2B, bf16

Weights are random. Responses have 16 to 64 tokens, prompts 8 to 40. In fp32 the tokens of both ways are compared, too.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from transformers import CohereConfig, CohereForCausalLM

from tba.generate.transformers_engine import TransformersEngine
from tba.types import Prompt, Request, Sampling

PROMPTS, SAMPLES, LONGEST = 32, 8, 64


def make_requests(vocabulary: int) -> list[Request]:
    """Prompts of many lengths; each has its own limit, so that responses end at different times."""
    rng = np.random.default_rng(0)
    requests = []
    for index in range(PROMPTS):
        ids = rng.integers(6, vocabulary, size=rng.integers(8, 41)).astype(np.int32)
        new = int(rng.integers(16, LONGEST + 1))
        sampling = Sampling(max_new_tokens=new, min_new_tokens=new)
        requests.append(Request(prompt=Prompt(id=f"p{index}", token_ids=ids, text=""), sampling=sampling))
    return requests


def run(
    model: torch.nn.Module, requests: list[Request], *, slots: int
) -> tuple[float, dict[tuple[str, int], list[int]]]:
    """Seconds, and the tokens of every response."""
    engine = TransformersEngine(model, stop_ids=[2], seed=0, max_length=128, slots=slots)
    started = time.perf_counter()
    found = list(engine.generate(requests, samples_per_prompt=SAMPLES, sampling=Sampling(max_new_tokens=LONGEST)))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, {(c.prompt_id, c.sample_index): c.token_ids.tolist() for c in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--mlp", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    shape = CohereConfig(
        vocab_size=arguments.vocabulary, hidden_size=arguments.hidden, intermediate_size=arguments.mlp,
        num_hidden_layers=arguments.layers, num_attention_heads=arguments.hidden // 64, max_position_embeddings=256,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    model = CohereForCausalLM(shape).to(arguments.device, dtype).eval()
    requests = make_requests(arguments.vocabulary)
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters, {dtype}, {PROMPTS} x {SAMPLES} responses"
    )
    seconds, tokens = {}, {}
    for way, slots in (("together", PROMPTS * SAMPLES), ("one prompt at a time", 1)) * arguments.repeats:
        taken, tokens[way] = run(model, requests, slots=slots)
        seconds[way] = min(taken, seconds.get(way, taken))
    num_tokens = sum(map(len, tokens["together"].values()))
    for way, taken in seconds.items():
        print(f"{way:>22}: {taken:7.2f} s, {num_tokens / taken:9.0f} tokens/s")
    print(f"ratio {seconds['one prompt at a time'] / seconds['together']:.1f}")
    if dtype == torch.float32:
        same = sum(tokens["together"][key] == own for key, own in tokens["one prompt at a time"].items())
        print(f"{same} of {len(tokens['together'])} responses have the same tokens")


if __name__ == "__main__":
    main()
