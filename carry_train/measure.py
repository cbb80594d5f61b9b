"""Where a TB training step's time goes on one GPU: host and device clocks at every mark, profile, and each change alone.

    python carry_train/measure.py [--shapes qwen,llama] [--seconds 190]

Every part is printed as soon as it is there; a part that fails prints its error and the script goes on. The same model, batch
and optimizer serve all variants of a shape, which differ in switches only, so figures of one shape compare within 1 or 2%.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in ("src", "carry_train")]

import shapes as gpu  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from switches import VARIANTS, only  # noqa: E402

from tba.models.load import compile_layers  # noqa: E402

STARTED = time.perf_counter()
SHAPES = {"qwen": gpu.qwen, "llama": gpu.llama}


SAID: list[str] = []
"""Figures, which are printed once more at the end."""


def say(text: str) -> None:
    if "tok/s" in text or "gradients, relative" in text or text.startswith("tests"):
        SAID.append(text)
    print(f"[{time.perf_counter() - STARTED:5.0f} s] {text}", flush=True)


class Marks:
    """Host clock and device event at named places of one step, in milliseconds since its start."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float, torch.cuda.Event]] = []

    def __call__(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.found.append((name, time.perf_counter(), event))

    def show(self) -> None:
        torch.cuda.synchronize()
        _, start, first = self.found[0]
        before_host = before_device = 0.0
        for name, clock, event in self.found[1:]:
            host, device = 1e3 * (clock - start), first.elapsed_time(event)
            print(
                f"    {name:34s} host {host:7.1f} (+{host - before_host:6.1f})   device {device:7.1f} "
                f"(+{device - before_device:6.1f})   device is behind by {device - host:7.1f}",
                flush=True,
            )
            before_host, before_device = host, device


def marked(step: Any, batch: Any) -> Marks:
    """One step with marks at its parts."""
    import tba.train.step as module

    marks, undo = Marks(), []

    def wrap(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)
        had = name in vars(owner)

        def wrapped(*args: Any, **options: Any) -> Any:
            found = original(*args, **options)
            marks(label)
            return found

        setattr(owner, name, wrapped)
        undo.append(lambda: setattr(owner, name, original) if had else delattr(owner, name))

    wrap(step, "_pack", "packed")
    wrap(step.policy, "_hidden", "trunk forward")
    wrap(step, "_forward", "log-probs forward")
    wrap(step.optimizer, "accumulate", "gradients accumulated")
    wrap(module, "_read", "metrics read")
    wrap(step.optimizer, "clip_gradients", "clipped")
    wrap(step.optimizer, "step", "optimizer step")
    objective = step.objective

    def marked_objective(*args: Any, **options: Any) -> Any:
        found = objective(*args, **options)
        marks("objective")
        return found

    marked_objective.coupling = objective.coupling  # type: ignore[attr-defined]
    step.objective = marked_objective
    original_backward = step._backward

    def backward(value: torch.Tensor) -> None:
        handle = step.policy.model.get_input_embeddings().weight
        original_backward(value)
        del handle

    step._backward = backward
    try:
        torch.cuda.synchronize()
        marks("start")
        step(batch, beta=0.05, learning_rate=1e-6)
        marks("returned")
    finally:
        step.objective = objective
        del step._backward
        for one in reversed(undo):
            one()
    return marks


def rate(step: Any, batch: Any, *, times: int = 6) -> tuple[float, float, list[float]]:
    """Useful tokens/s and median seconds."""
    for _ in range(2):
        gpu.step_seconds(step, batch)
    seconds = [gpu.step_seconds(step, batch) for _ in range(times)]
    median = float(np.median(seconds))
    return gpu.useful_tokens(batch) / median, median, seconds


KINDS = (
    ("matrix products", ("gemm", "cutlass", "nvjet", "splitk", "cublas", "gemv")),
    ("attention", ("flash", "_merge")),
    ("log-prob kernels", ("_row_sums", "_to_gradients")),
    ("compiled elementwise", ("triton",)),
    ("optimizer and foreach", ("adam", "multi_tensor", "lpnorm", "foreach")),
    ("copies", ("memcpy", "memset", "copy")),
)


def kind_of(name: str) -> str:
    lower = name.lower()
    for kind, parts in KINDS:
        if any(part in lower for part in parts):
            return kind
    return "others (eager)"


def profile(step: Any, batch: Any, *, lines: int = 24) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        seconds = gpu.step_seconds(step, batch)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    kinds: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    runtime: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    spans = []
    for event in found.profiler.kineto_results.events():
        start, length = event.start_ns(), event.duration_ns()
        name = event.name()
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            if length and not name.startswith(("Optimizer", "ProfilerStep", "## ", "Torch-Compiled")):
                spans.append((start, start + length))
                for table, key in ((kernels, name), (kinds, kind_of(name))):
                    table[key][0] += 1
                    table[key][1] += length / 1e6
        elif name.startswith("cu"):
            entry = runtime[name]
            entry[0] += 1
            entry[1] += length / 1e6
            entry[2] = max(entry[2], length / 1e6)
    spans.sort()
    busy, end, gaps = 0, 0, []
    for start, stop in spans:
        if start > end:
            if end:
                gaps.append((start - end) / 1e6)
            busy += stop - start
            end = stop
        elif stop > end:
            busy += stop - end
            end = stop
    print(f"    profiled step {1e3 * seconds:.0f} ms; device busy {busy / 1e6:.1f} ms, {len(spans)} kernels and copies; "
          f"gaps {sum(gaps):.1f} ms in all, {sum(1 for gap in gaps if gap > 0.1)} over .1 ms: "
          f"{', '.join(f'{gap:.1f}' for gap in sorted(gaps)[:-13:-1])}", flush=True)  # fmt: skip
    for kind, (count, ms) in sorted(kinds.items(), key=lambda item: -item[1][1]):
        print(f"    {ms:8.2f} ms {count:6.0f} x  {kind}")
    print("    -- kernels")
    for name, (count, ms) in sorted(kernels.items(), key=lambda item: -item[1][1])[:lines]:
        print(f"    {ms:8.2f} ms {count:6.0f} x  {name[:90]}")
    print("    -- CUDA calls of the host (count, total ms, longest)")
    for name, (count, ms, longest) in sorted(runtime.items(), key=lambda item: -item[1][1])[:9]:
        print(f"    {ms:8.2f} ms {count:6.0f} x  longest {longest:7.2f}  {name}", flush=True)


def attempt(name: str, work: Any) -> Any:
    try:
        return work()
    except Exception:
        say(f"{name} FAILED: {traceback.format_exc(limit=-6)}")
        return None


def measure(shape: str, deadline: float) -> None:
    torch.cuda.reset_peak_memory_stats()
    model = SHAPES[shape]()
    batch = gpu.ragged_batch(model.config.vocab_size)
    step = gpu.make_step(model, share=True)
    attempt("against fp32", lambda: against_fp32(shape))
    torch.cuda.empty_cache()
    with only():
        compare_gradients(shape, step, batch)
        found = attempt("eager", lambda: rate(step, batch, times=3))
        if found:
            say(f"{shape} eager, as before: {found[0]:,.0f} tok/s, {1e3 * found[1]:.1f} ms")
        base = measure_base(shape, model, step, batch)
    if base is not None:
        variants(shape, model, step, batch, base, deadline)
        attempt("larger first", lambda: larger_first(shape, step, batch, base))
        if shape == "qwen":
            attempt("slow host", lambda: slow_host(shape, step, batch, base))
    del model, step
    torch.cuda.empty_cache()


def compare_gradients(shape: str, step: Any, batch: Any) -> None:
    """Gradients of the step with each change against those as before: equal but for rounding."""

    def found() -> torch.Tensor:
        step.gradients(batch, beta=0.05)
        gradient = torch.cat([master.grad.flatten() for master in step.optimizer.masters])
        step.optimizer.drop_gradients()
        return gradient

    def gap(got: torch.Tensor, want: torch.Tensor) -> float:
        return float((got - want).norm() / want.norm())

    def compare() -> None:
        want = found()
        text = [f"again {gap(found(), want):.1e}"]
        for name, on in VARIANTS.items():
            with only(*on):
                text.append(f"{name} {gap(found(), want):.1e}")
        say(f"{shape} gradients, relative distance to those as before: {', '.join(text)}")

    attempt("gradients", compare)
    torch.cuda.empty_cache()


def against_fp32(shape: str) -> None:
    """Gradients of two layers in bf16 against those in fp32 through plain attention: "again" above says only how far two
    runs of the same step differ, which hides errors of that size."""
    found: dict[str, torch.Tensor] = {}
    for name, dtype, on in (("fp32", torch.float32, ()), ("before", torch.bfloat16, ()), *(
        (name, torch.bfloat16, on) for name, on in VARIANTS.items())):  # fmt: skip
        model = SHAPES[shape](layers=2).to(dtype)
        batch = gpu.ragged_batch(model.config.vocab_size, prompts=4, samples=4)
        with only(*on):
            step = gpu.make_step(model, share=True, max_tokens=3000)
            step.gradients(batch, beta=0.05)
        found[name] = torch.cat([master.grad.flatten().float() for master in step.optimizer.masters])
    want = found.pop("fp32")
    gaps = [f"{name} {float((got - want).norm() / want.norm()):.3e}" for name, got in found.items()]
    say(f"{shape} gradients, relative distance to fp32 (2 layers): {', '.join(gaps)}")


def measure_base(shape: str, model: Any, step: Any, batch: Any) -> float | None:
    """Useful tokens/s as before the changes, with marks and profile."""
    compile_layers(model)
    started = time.perf_counter()
    attempt("first compiled step", lambda: gpu.step_seconds(step, batch))
    say(f"{shape} first compiled step: {time.perf_counter() - started:.1f} s")
    base = attempt("base", lambda: rate(step, batch))
    if base is None:
        return None
    say(f"{shape} BASE compiled: {base[0]:,.0f} tok/s, {1e3 * base[1]:.1f} ms ({', '.join(f'{1e3 * s:.0f}' for s in base[2])}), "
        f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, reserved {torch.cuda.memory_reserved() / 2**30:.1f}")  # fmt: skip
    say(f"{shape} marks of one step:")
    attempt("marks", lambda: marked(step, batch).show())
    say(f"{shape} profile of one step:")
    attempt("profile", lambda: profile(step, batch, lines=4))
    return float(base[0])


def variants(shape: str, model: Any, step: Any, batch: Any, base: float, deadline: float) -> None:
    for name, on in VARIANTS.items():
        if time.perf_counter() - STARTED > deadline:
            say(f"{shape} {name}: no time left")
            continue

        def once(name: str = name, on: Any = on) -> None:
            torch.cuda.reset_peak_memory_stats()
            with only(*on):
                first = gpu.step_seconds(step, batch)
                found, seconds, _ = rate(step, batch)
                say(f"{shape} {name}: {found:,.0f} tok/s, {1e3 * seconds:.1f} ms, {found / base:.3f} of base, "
                    f"first {first:.1f} s, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")  # fmt: skip
                if name == "all":
                    marked(step, batch).show()
                    profile(step, batch)

        attempt(f"{shape} {name}", once)


def larger_first(shape: str, step: Any, batch: Any, base: float) -> None:
    """All changes, with a first micro-batch of 1.2 times the mean: the host has more time to get ahead of the device."""
    import tba.train.batch
    from unittest.mock import patch

    with patch.object(tba.train.batch, "EVEN_SHARES", (1.2, 1.25, 1.5)):
        found, seconds, _ = rate(step, batch)
    say(
        f"{shape} all, first micro-batch larger: {found:,.0f} tok/s, {1e3 * seconds:.1f} ms, {found / base:.3f} of base"
    )


def slow_host(shape: str, step: Any, batch: Any, base: float) -> None:
    """All changes while two other threads of Python take turns with the step: a host of about half the speed."""
    import threading

    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(2000))

    threads = [threading.Thread(target=spin, daemon=True)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    for thread in threads:
        thread.start()
    try:
        for name in ("", "all"):
            with only(*VARIANTS.get(name, ())):
                found, seconds, _ = rate(step, batch, times=4)
            say(f"{shape} {name or 'base'}, with a slowed host: {found:,.0f} tok/s, {1e3 * seconds:.1f} ms")
    finally:
        stop.set()
        sys.setswitchinterval(switch)


def run_tests() -> None:
    """What is marked cuda, and the kernels, of what changed."""
    import subprocess

    root = Path(__file__).resolve().parents[1]
    files = ["tests/models/test_flash_attention.py", "tests/kernels/test_sum_copies_kernel.py",
             "tests/kernels/test_gradients_kernel.py", "tests/train/test_step.py"]  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", "cuda or not cuda", *files,
               "-k", "cuda or plain or copies or sums or host_waits or one_token or half_precision"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=150, check=False)
    lines = (found.stdout + found.stderr).splitlines()
    say(f"tests: exit status {found.returncode}")
    print(
        "\n".join(
            f"    {line[:170]}" for line in lines if line.startswith(("E  ", "FAILED", "ERROR")) or "passed" in line
        )
    )


def with_cpp_wrapper() -> None:
    """Layers whose launches are compiled C++ instead of Python: how much of the host's time that saves."""
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    inductor.cpp_wrapper = True
    try:
        model = gpu.qwen()
        batch = gpu.ragged_batch(model.config.vocab_size)
        step = gpu.make_step(model, share=True)
        compile_layers(model)
        first = gpu.step_seconds(step, batch)
        found, seconds, _ = rate(step, batch)
        say(f"qwen all, C++ wrapper: {found:,.0f} tok/s, {1e3 * seconds:.1f} ms, first step {first:.1f} s")
        marked(step, batch).show()
    finally:
        inductor.cpp_wrapper = False


def seven() -> None:
    """A step of the 7B Qwen2.5 shape with LoRA of rank 16 on all linear layers: speed, and memory by part."""
    from tba.config import LoraConfig
    from tba.models.load import add_lora
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def gib() -> float:
        torch.cuda.synchronize()
        return float(torch.cuda.memory_allocated()) / 2**30

    torch._dynamo.reset()
    torch.cuda.empty_cache()
    config = Qwen2Config(
        vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    before = gib()
    torch.set_default_dtype(torch.bfloat16)
    with gpu.device():
        model = Qwen2ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    weights = gib() - before
    add_lora(model, LoraConfig(rank=16), base="random", seed=0)
    batch = gpu.ragged_batch(config.vocab_size)
    for budget in (32_768, 16_384):
        step = gpu.make_step(model, share=True, max_tokens=budget)
        if budget == 32_768:
            compile_layers(model)
        torch.cuda.reset_peak_memory_stats()
        first = gpu.step_seconds(step, batch)
        found, seconds, _ = rate(step, batch, times=3)
        say(f"7B LoRA, micro-batches of at most {budget}: {found:,.0f} tok/s, {1e3 * seconds:.0f} ms, first {first:.0f} s; "
            f"weights {weights:.1f} GiB, adapter and optimizer {gib() - before - weights:.1f}, "
            f"activations and logits {torch.cuda.max_memory_allocated() / 2**30 - gib():.1f} at the peak")  # fmt: skip


def products() -> None:
    """Rates of the matrix products of a layer and of the head, by number of tokens; what wider ones would give."""

    def teraflops(make: Any, flops: float) -> float:
        for _ in range(3):
            make()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(8):
            make()
        end.record()
        torch.cuda.synchronize()
        return 8 * flops / start.elapsed_time(end) / 1e9

    def line(label: str, T: int, N: int, K: int) -> None:
        x, w, dy = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((T, K), (N, K), (T, N)))
        found = [teraflops(make, 2.0 * T * N * K) for make in (lambda: x @ w.t(), lambda: dy @ w, lambda: dy.t() @ x)]
        ms = sum(2.0 * T * N * K / rate / 1e9 for rate in found)
        print(f"    {label:28s} T {T:6d}  forward {found[0]:4.0f}  d input {found[1]:4.0f}  d weight {found[2]:4.0f} TFLOP/s,"
              f" {ms:6.3f} ms in all", flush=True)  # fmt: skip

    for T in (31197, 31232, 16384, 3093):
        for label, N, K in (("0.5B q or o", 896, 896), ("0.5B k or v", 128, 896), ("0.5B qkv", 1152, 896),
                            ("0.5B gate or up", 4864, 896), ("0.5B gate+up", 9728, 896), ("0.5B down", 896, 4864)):  # fmt: skip
            line(label, T, N, K)
    for T in (31197, 31232):
        for label, N, K in (("1.1B q or o", 2048, 2048), ("1.1B k or v", 256, 2048), ("1.1B qkv", 2560, 2048),
                            ("1.1B gate or up", 5632, 2048), ("1.1B gate+up", 11264, 2048), ("1.1B down", 2048, 5632)):  # fmt: skip
            line(label, T, N, K)
    for M in (7067, 7040, 29696):
        line("0.5B head", M, 151_936, 896)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="qwen,llama")
    parser.add_argument("--seconds", type=float, default=190.0)
    parser.add_argument("--products", action="store_true", help="rates of matrix products, 2 s")
    parser.add_argument("--seven", action="store_true", help="7B with LoRA, about a minute more")
    parser.add_argument("--cpp", action="store_true", help="layers with C++ wrappers, about a minute more")
    options = parser.parse_args()
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    torch._logging.set_logs(recompiles=True)
    shapes = options.shapes.split(",")
    for index, shape in enumerate(shapes):
        share = options.seconds * (index + 1) / len(shapes)
        attempt(shape, lambda shape=shape, share=share: measure(shape, share))  # type: ignore[misc]
    attempt("tests", run_tests)
    if options.products:
        say("matrix products:")
        attempt("products", products)
    if options.seven:
        attempt("7B", seven)
    if options.cpp:
        attempt("C++ wrapper", with_cpp_wrapper)
    print("\n---- all figures once more")
    print("\n".join(SAID), flush=True)


if __name__ == "__main__":
    main()
