"""Our engine and vLLM on the same workloads, one after the other on one GPU: tokens per second, and the ratios.

    python benchmarks/vllm_side_by_side.py                                              all; needs vLLM 0.26 or later
    python benchmarks/vllm_side_by_side.py --shapes 0.5B --workloads 256 shared ragged  about 4 minutes on an H200
    python benchmarks/vllm_side_by_side.py --shapes 7B --workloads 1k 8k-shared         about 4 minutes
    python benchmarks/vllm_side_by_side.py --engines native                             ours alone
    python benchmarks/vllm_side_by_side.py --json FILE --reuse FILE                     with theirs as measured before

Random weights in bf16, sampled at temperature 1 with log-probs, prefill and tail included, best of up to three passes behind
one that compiles (gpu_bench/workloads.py says what is asked for). vLLM has prefix caching and compiled full graphs, as many
sequences at once as we have slots, and what remains of the GPU's memory. It runs in the process that asks and, as it does by
default, in one of its own; the better of the two counts. From 7B on, where its steps are long, only the latter is tried
(`--vllm both` tries both everywhere). Each engine has the GPU to itself, in a process of its own. vLLM's first start for a
shape compiles for about 70 s; --work keeps what was compiled, for later starts of about 20 s. Our greedy tokens are checked
first.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_bench.processes import run_alone
from gpu_bench.workloads import MUST, SHAPES, WORKLOADS, Row, print_table

WAYS = {"both": ("in-process", "process"), "in-process": ("in-process",), "process": ("process",)}


@dataclass(frozen=True)
class Job:
    """One process: Job("vllm", "7B", ("1k",), "process")"""

    engine: str
    shape: str
    workloads: tuple[str, ...]
    way: str = ""


def jobs(arguments: argparse.Namespace) -> Iterator[Job]:
    for shape in arguments.shapes:
        if "native" in arguments.engines:
            yield Job("native", shape, tuple(arguments.workloads))
        if "vllm" not in arguments.engines:
            continue
        default = "process" if shape == "7B" else "both"
        # An engine of vLLM is made for one number of sequences: that of our slots, unless it may be started once only.
        by_slots: dict[int, list[str]] = {}
        for name in arguments.workloads:
            by_slots.setdefault(0 if arguments.one_start else WORKLOADS[name].slots, []).append(name)
        for own in by_slots.values():
            for way in WAYS[arguments.vllm or default]:
                yield Job("vllm", shape, tuple(own), way)


def run(job: Job, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the job measured, by workload; whatever it had written when its time was over, or when it failed."""
    found = Path(tempfile.mkdtemp()) / "found.json"
    command = [sys.executable, __file__, "--job", json.dumps(asdict(job)), "--json", str(found)]
    command += [
        "--work",
        str(arguments.work),
        "--passes",
        str(arguments.passes),
        *(["--no-check"] if arguments.no_check else []),
    ]
    started = time.monotonic()
    status = run_alone(command, seconds=arguments.seconds)
    said = "" if status == 0 else f", exit status {status}"
    if status is None:
        said = f", stopped after {arguments.seconds:.0f} s (--seconds)"
    print(
        f"{job.engine} {job.way} {job.shape} {' '.join(job.workloads)}: {time.monotonic() - started:.0f} s{said}",
        flush=True,
    )
    return json.loads(found.read_text()) if found.exists() else {}


def do(job: Job, arguments: argparse.Namespace) -> None:
    """The work of one process."""
    found: dict[str, Any] = {}
    for name, figures in measure(job, arguments):
        found[name] = figures
        arguments.json.write_text(json.dumps(found))
        best = f"{figures['best']:,.0f} tok/s ({', '.join(f'{rate:,.0f}' for rate in figures['all'])})"
        print(f"  {job.engine} {job.way} {job.shape}, {name}: {best}", flush=True)


def measure(job: Job, arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    if job.engine == "vllm":
        from gpu_bench.vllm_decode import time_vllm

        yield from time_vllm(
            job.shape, job.workloads, own_process=job.way == "process", work=arguments.work, passes=arguments.passes
        )
        return
    from gpu_bench.decode import check_rows, time_shape

    if not arguments.no_check:
        list(check_rows([job.shape]))  # it prints what it found
    for name, timing in time_shape(SHAPES[job.shape], job.workloads, arguments.passes):
        yield name, asdict(timing)


def rows(results: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> Iterator[Row]:
    for shape in arguments.shapes:
        for name in arguments.workloads:
            ours = results.get(f"native {shape}", {}).get(name)
            ways = {way: results.get(f"vllm {shape} {way}", {}).get(name) for way in WAYS["both"]}
            theirs = {way: figures["best"] for way, figures in ways.items() if figures}
            best = max(theirs.values(), default=0.0)
            most = max((figures["sequences"] for figures in ways.values() if figures), default=0)
            more = f" with up to {most} sequences at once" if most > WORKLOADS[name].slots else ""
            ratio = f"{ours['best'] / best:.2f}x" if ours and best else "-"
            shown = ", ".join(f"{way} {rate:,.0f}" for way, rate in theirs.items()) or "not measured"
            gap = f" (log-prob gap {ours['gap']:.1e})" if ours else ""
            yield Row(
                work=f"{SHAPES[shape].name}, {name}: {WORKLOADS[name].title}",
                figure=f"**{ratio}**: ours {ours['best'] if ours else 0:,.0f} tok/s{gap}, vLLM {shown}{more}",
                must=MUST.get((shape, name), ""),
                limit=f"with prefill {WORKLOADS[name].limits(SHAPES[shape])[1]:,.0f}",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.5B", "7B"])
    parser.add_argument(
        "--workloads", nargs="+", choices=list(WORKLOADS), default=["256", "shared", "ragged", "1k", "8k-shared"]
    )
    parser.add_argument("--engines", nargs="+", choices=["native", "vllm"], default=["native", "vllm"])
    parser.add_argument("--vllm", choices=list(WAYS), help="where vLLM runs; without: see above")
    parser.add_argument(
        "--one-start",
        action="store_true",
        help="start vLLM once for all workloads, with the most sequences that one asks for",
    )
    parser.add_argument("--passes", type=int, default=3, help="most timed passes of a workload")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tba-vllm", help="vLLM's caches")
    parser.add_argument("--seconds", type=float, default=300.0, help="most seconds for one engine of one shape")
    parser.add_argument("--no-check", action="store_true", help="without the greedy check of our engine")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--reuse", type=Path, help="such a file: what it has is not measured again")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.job:
        do(Job(**{**arguments.job, "workloads": tuple(arguments.job["workloads"])}), arguments)
        return
    results: dict[str, dict[str, Any]] = json.loads(arguments.reuse.read_text()) if arguments.reuse else {}
    for job in jobs(arguments):
        known = results.setdefault(" ".join(filter(None, (job.engine, job.shape, job.way))), {})
        if not set(job.workloads) <= set(known):
            known.update(run(job, arguments))
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))
    print_table(list(rows(results, arguments)), "ours and vLLM, tokens per second")


if __name__ == "__main__":
    main()
