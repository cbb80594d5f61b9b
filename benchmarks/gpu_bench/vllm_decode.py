"""The workloads through vLLM: compiled, with full CUDA graphs and prefix caching, log-probs of the sampled tokens returned.

Random weights (load_format=dummy) from a config folder that is written on the spot; end-of-sequence is ignored, so the
number of tokens is known beforehand. Every pass has new prompts: the prefix cache never holds those of an earlier one.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_bench.workloads import SHAPES, WORKLOADS, Workload

TIMED_SECONDS = 12.0
"""No further pass of a workload begins after so long."""
MEMORY_SHARE = 0.85
"""Share of the GPU's memory that vLLM may use: it is alone there."""


def set_environment(work: Path, *, own_process: bool) -> None:
    """Before vLLM is imported; what is set already stays."""
    defaults = {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_CACHE_ROOT": str(work / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), "TRITON_CACHE_DIR": str(work / "triton"),
    }  # fmt: skip
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(own_process))
    try:
        assert ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2() == 0
    except (OSError, AssertionError):
        os.environ.setdefault("VL_NVML_SHIM", "1")  # known to a copy that ../shared/tools/vllm_pack.py made


def time_vllm(
    key: str, workloads: Sequence[str], *, own_process: bool, work: Path, passes: int = 3
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rates by workload. One engine serves them all, with as many sequences at once as the most slots of one of them."""
    set_environment(work, own_process=own_process)
    started = time.perf_counter()
    from vllm import LLM

    slots = max(WORKLOADS[name].slots for name in workloads)
    llm = LLM(
        model=str(SHAPES[key].write(work / f"model-{key}")),
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="bfloat16",
        max_model_len=max(WORKLOADS[name].max_length for name in workloads) + 16,
        max_num_seqs=slots,
        gpu_memory_utilization=MEMORY_SHARE,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
    )
    ready = time.perf_counter() - started
    print(f"vLLM, {key}, {slots} slots: ready in {ready:.0f} s; {settings(llm)}", flush=True)
    for name in workloads:
        rates: list[float] = []
        first = run_pass(llm, WORKLOADS[name], SHAPES[key].vocabulary, 0)
        began = time.perf_counter()
        while not rates or (len(rates) < passes and time.perf_counter() - began < TIMED_SECONDS):
            rates.append(run_pass(llm, WORKLOADS[name], SHAPES[key].vocabulary, 1 + len(rates)))
        yield name, {"best": max(rates), "all": rates, "first": first, "ready_seconds": ready, "sequences": slots}


def run_pass(llm: Any, workload: Workload, vocabulary: int, repeat: int) -> float:
    """Tokens/s of one run through a workload."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": row.tolist()} for row in workload.token_ids(vocabulary, repeat)]
    lengths = workload.lengths()
    sampling = [
        SamplingParams(
            n=workload.samples, temperature=1.0, max_tokens=int(length), ignore_eos=True, logprobs=0, detokenize=False
        )
        for length in lengths
    ]
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    responses = [response for output in outputs for response in output.outputs]
    tokens = sum(len(response.token_ids) for response in responses)
    wanted = int(lengths.sum()) * workload.samples
    assert tokens == wanted, f"vLLM gave {tokens} tokens, not {wanted}"
    assert all(len(response.logprobs) == len(response.token_ids) for response in responses)
    return tokens / seconds


def settings(llm: Any) -> str:
    """What vLLM chose; it is only shown, so that another version may have other names."""
    try:
        config = llm.llm_engine.vllm_config
        scheduler, compilation = config.scheduler_config, config.compilation_config
        return (
            f"at most {scheduler.max_num_seqs} sequences and {scheduler.max_num_batched_tokens} tokens a step, async "
            f"{scheduler.async_scheduling}, compile mode {compilation.mode}, graphs {compilation.cudagraph_mode}"
        )
    except AttributeError as error:
        return f"settings unknown ({error})"
