"""What only a GPU can say of pages: PYTHONPATH=src python carry_pages/check_pages.py [small]      (about 4 minutes on an H200)

Goes on after a part that fails. Needs kernels/paged_attention.py (branch attend) merged with branch pages.
"""

import sys
import time
import traceback
from collections import defaultdict

import numpy as np
import torch
import transformers

from tba.generate.native.engine import NativeEngine
from tba.generate.native.paged_cache import PagedCache
from tba.types import Prompt, Request, Sampling

SMALL = "small" in sys.argv or not torch.cuda.is_available()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
started = time.time()


def say(*words):
    print(f"[{time.time() - started:6.1f}s]", *words, flush=True)


def qwen(layers=24, hidden=896, heads=14, kv=2, inner=4864, vocab=151_936):
    if SMALL:
        layers, vocab, hidden, heads, inner = 2, 1000, 64, 4, 64
    config = transformers.Qwen2Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, max_position_embeddings=40_000, tie_word_embeddings=hidden < 2000, eos_token_id=2,
        bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(DEVICE):
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPE)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        torch.set_default_dtype(before)
    return model


def prompts(count, length, vocab, name="p", seed=0):
    rng = np.random.default_rng([seed, length, count])
    lengths = [length] * count if isinstance(length, int) else rng.integers(*length, size=count)
    return [
        Request(prompt=Prompt(id=f"{name}{i}", token_ids=rng.integers(5, vocab, size=n).astype(np.int32), text=""))
        for i, n in enumerate(lengths)
    ]


def engine_of(model, **changes):
    settings = {"stop_ids": [2], "seed": 0, "slots": 256, "max_length": 1024, "dtype": DTYPE, "device": DEVICE, **changes}
    engine = NativeEngine(model, **settings)
    if DEVICE.type == "cuda":
        assert isinstance(engine.cache, PagedCache) and engine._fused is not None, "pages and fused steps must serve"
    return engine


def by_key(found):
    return {(c.prompt_id, c.sample_index): c for c in found}


def sync():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def timed(engine, requests, samples, sampling):
    sync()
    start = time.perf_counter()
    found = list(engine.generate(requests, samples_per_prompt=samples, sampling=sampling))
    sync()
    return found, sum(len(c.token_ids) - c.num_prefix_tokens for c in found) / (time.perf_counter() - start)


def equality(model):
    """Greedy tokens and log-probs: pages and fused steps against slots and plain steps; short, and long with shared prompts."""
    for length, samples, new, slots in ((20, 2, 24, 16), (700, 8, 24, 16), (3000, 4, 12, 8)):
        fused, plain = (engine_of(model, slots=slots, max_length=4096) for _ in range(2))
        plain._fused = None
        plain._make_cache(0)
        sampling = Sampling(max_new_tokens=new, min_new_tokens=new, greedy=True)
        requests = prompts(3, length, model.config.vocab_size)
        a, b = (by_key(e.generate(requests, samples_per_prompt=samples, sampling=sampling)) for e in (fused, plain))
        same = sum(a[k].token_ids.tolist() == b[k].token_ids.tolist() for k in b)
        first = np.mean([abs(a[k].policy_log_probs[0] - b[k].policy_log_probs[0]) for k in b])
        plans = sorted({(s, p.splits, p.shared) for s, p in getattr(fused._fused, "_graphs", {})})
        say(f"greedy, prompts of {length} x {samples}: {same} of {len(b)} the same to the end, first log-prob off {first:.4f}; graphs {plans}")


def memory(model):
    """Little memory: responses are taken out, and the greedy ones say the same in the end."""
    requests, sampling = prompts(24, (100, 400), model.config.vocab_size), Sampling(max_new_tokens=200, min_new_tokens=200, greedy=True)
    ample = engine_of(model, slots=64)
    expected = by_key(ample.generate(requests, samples_per_prompt=2, sampling=sampling))
    tight = engine_of(model, slots=64, max_cache_bytes=100 * ample.cache.pool.page_bytes)
    taken = []
    take_out = tight._running._take_out
    tight._running._take_out = lambda slot, queue: (taken.append(slot), take_out(slot, queue))
    found = by_key(tight.generate(requests, samples_per_prompt=2, sampling=sampling))
    same = sum(found[k].token_ids.tolist() == expected[k].token_ids.tolist() for k in expected)
    say(f"memory for 99 pages: {len(taken)} taken out, {same} of {len(expected)} responses as with memory for all")
    graphs = dict(ample._fused._graphs) if ample._fused else {}
    chunks = len(ample.cache.pool.chunks)
    list(ample.generate(prompts(64, 700, model.config.vocab_size), samples_per_prompt=1, sampling=Sampling(max_new_tokens=64)))
    kept = sum(ample._fused._graphs.get(k) is g for k, g in graphs.items()) if graphs else 0
    say(f"growth from {chunks} to {len(ample.cache.pool.chunks)} chunks: {kept} of {len(graphs)} graphs kept")


def stall(model):
    """A long prompt arrives while 64 responses run: the longest time between two turns, with and without it."""
    length = 6000 if SMALL else 32_000
    engine = engine_of(model, slots=80, max_length=length + 600)
    new = 60 if SMALL else 512
    sampling = Sampling(max_new_tokens=new, min_new_tokens=new)
    for long in (0, 1, 1):
        calls = []

        def stream():
            yield from prompts(64, 100, model.config.vocab_size)
            for _ in range(6):
                yield None
            yield from prompts(long, length, model.config.vocab_size, name="long")

        def between():
            sync()
            calls.append(time.perf_counter())

        found = list(engine.generate(stream(), samples_per_prompt=1, sampling=sampling, between_steps=between))
        gaps = np.diff(calls) * 1e3
        say(f"{len(found)} responses, {long} prompt of {length}: turns of 8 steps take {np.median(gaps):.1f} ms, the longest {gaps.max():.1f}")


def exactness(model):
    """Log-probs after a prompt that was computed in parts, against the scorer's one pass."""
    length = 1000 if SMALL else 10_000
    engine = engine_of(model, slots=8, max_length=length + 200)
    requests = prompts(4, 60, model.config.vocab_size), prompts(2, length, model.config.vocab_size, name="long")
    stream = iter([*requests[0], None, None, *requests[1]])
    found = by_key(engine.generate(stream, samples_per_prompt=2, sampling=Sampling(max_new_tokens=64, min_new_tokens=64)))
    ids = {r.prompt.id: r.prompt.token_ids for part in requests for r in part}
    for name in ("p", "long"):
        chosen = [c for c in found.values() if c.prompt_id.startswith(name)]
        scores = engine.score([ids[c.prompt_id] for c in chosen], [c.token_ids for c in chosen], 1.0)
        gap = np.mean([np.abs(c.policy_log_probs - s).mean() for c, s in zip(chosen, scores)])
        say(f"log-probs of {name}: mean distance to one pass {gap:.4f}")


def host(engine, requests, samples, sampling):
    """Host milliseconds a turn, by part."""
    spent, running = defaultdict(float), engine._running
    originals = {}
    for owner, name in ((running, "admit"), (running, "make_room"), (running, "take_finished"), (engine.cache, "plan"), (engine._prefill, "batch")):
        method = originals[owner, name] = getattr(owner, name)

        def wrapped(*a, _method=method, _name=name, **k):
            start = time.perf_counter()
            try:
                return _method(*a, **k)
            finally:
                spent[_name] += time.perf_counter() - start

        setattr(owner, name, wrapped)
    turns = [0]
    list(engine.generate(requests, samples_per_prompt=samples, sampling=sampling, between_steps=lambda: turns.__setitem__(0, turns[0] + 1)))
    for owner, name in originals:
        delattr(owner, name)
    say("  host ms a turn (take_finished waits for the device; admit has batch in it):", {k: round(v / turns[0] * 1e3, 3) for k, v in spent.items()}, f"{turns[0]} turns")


def speed(model):
    """Decode speeds at 0.5B."""
    vocab, engine = model.config.vocab_size, engine_of(model)
    new = 16 if SMALL else 128
    fixed = Sampling(max_new_tokens=new, min_new_tokens=new)
    rng = np.random.default_rng(0)
    ragged = [
        Request(prompt=r.prompt, sampling=Sampling(max_new_tokens=int(n), min_new_tokens=int(n)))
        for r, n in zip(prompts(64 if SMALL else 1024, (64, 192), vocab), rng.integers(new // 4, 2 * new, size=1024))
    ]
    for name, requests, samples in (("256 x 1", prompts(64 if SMALL else 256, 128, vocab), 1), ("32 x 8", prompts(8 if SMALL else 32, 128, vocab), 8), ("ragged", ragged, 1)):
        best = max(timed(engine, requests, samples, fixed)[1] for _ in range(3))
        say(f"decode {name}, 128 + {new}: {best:,.0f} tok/s")
        host(engine, requests, samples, fixed)


def long_contexts(model):
    """16 prompts x 8 samples, 64 slots: shared pages against each for itself."""
    from tba.generate.native import page_plan

    length, new = (500, 8) if SMALL else (8192, 128)
    least = page_plan.LEAST_SHARED_PAGES
    for shared in (True, False):
        page_plan.LEAST_SHARED_PAGES = least if shared else 10**9
        engine = engine_of(model, slots=64, max_length=length + 600)
        sampling = Sampling(max_new_tokens=new, min_new_tokens=new)
        requests = prompts(16, length, model.config.vocab_size)
        rates = [timed(engine, requests, 8, sampling)[1] for _ in range(2)]
        used = engine.cache.pool.num_pages * engine.cache.pool.page_bytes / 2**30
        plans = sorted({(s, p.splits, p.shared) for s, p in getattr(engine._fused, "_graphs", {})})
        say(f"16 x {length} x 8 x {new}, shared={shared}: {max(rates):,.0f} tok/s with prefill, {used:.2f} GiB of pages, graphs {plans}")
    page_plan.LEAST_SHARED_PAGES = least


def main():
    say(DEVICE, torch.__version__, torch.cuda.get_device_name() if DEVICE.type == "cuda" else "")
    model = qwen()
    say("model made")
    for part in (equality, speed, memory, exactness, stall, long_contexts):
        try:
            part(model)
        except Exception:
            say(part.__name__, "FAILED")
            traceback.print_exc()
            sys.stdout.flush()
    say("done")


main()
