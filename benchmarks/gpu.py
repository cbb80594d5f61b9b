"""What one GPU does: decoding and TB training on random weights of real shapes, with the limits beside the figures.

    python benchmarks/gpu.py [PARTS]       roles publish check decode train
    python benchmarks/gpu.py decode --shapes 7B --workloads 1k 8k-shared             parts of it
    python benchmarks/gpu.py decode --shapes 0.5B 1.1B --workloads 256 shared ragged --json FILE

The workloads are those of gpu_bench/workloads.py; `decode` checks greedy equality first (`--no-check`: not). Timings are of
later passes: the first compiles kernels and captures graphs. One table at the end; lines as they come. On an H200 a shape
takes 10 to 20 seconds to be checked, and each short workload 5 to 10 more; 7B 15 to make, and its long ones up to 40 each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from gpu_bench.decode import check_rows, decode_rows
from gpu_bench.publish import publish_rows
from gpu_bench.roles import role_rows
from gpu_bench.train import train_rows
from gpu_bench.workloads import SHAPES, WORKLOADS, Row, print_table

PARTS = ("roles", "publish", "check", "decode", "train")
OWN_PROCESS = ("roles", "publish")
"""Parts in a process of their own, and first: they must run before it touches the GPU, and `roles` kills clients of its MPS
daemon in the middle of their work, after which that daemon serves no others."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), help="of decode")
    parser.add_argument("--no-check", action="store_true", help="decode without the checks before it")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    arguments = parser.parse_args()
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown or not torch.cuda.is_available():
        raise SystemExit(f"unknown part {unknown[0]}" if unknown else "benchmarks/gpu.py needs an NVIDIA GPU.")
    chosen = set(arguments.parts or PARTS)
    if "decode" in chosen and not arguments.no_check:
        chosen.add("check")
    shapes: list[str] = arguments.shapes
    trained = [shape for shape in shapes if shape != "7B"]  # with fp32 masters and moments it does not fit
    makers: dict[str, Callable[[], Iterator[Row]]] = {
        "check": lambda: check_rows(shapes),
        "decode": lambda: decode_rows(shapes, arguments.workloads),
        "train": lambda: train_rows(trained),
    }
    rows: list[Row] = []
    for part in PARTS:
        if part in chosen:
            for row in rows_of_process(part) if part in OWN_PROCESS else makers[part]():
                rows.append(row)
                if arguments.json:  # at once: a run that is cut off has written what it measured
                    arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print_table(rows, f"{torch.cuda.get_device_name()}, torch {torch.__version__}")


def rows_of_process(part: str) -> Iterator[Row]:
    """The rows of a part, from a process of its own; its MPS daemon ends with it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=send_rows, args=(part, theirs))
    process.start()
    theirs.close()  # so that its end is seen here
    try:
        while True:
            yield ours.recv()
    except EOFError:
        process.join()
    if process.exitcode:
        raise SystemExit(f"{part} ended with exit status {process.exitcode}; its error is above.")


def send_rows(part: str, rows: Connection) -> None:
    makers: dict[str, Callable[[], Iterator[Row]]] = {"roles": role_rows, "publish": publish_rows}
    for row in makers[part]():
        rows.send(row)


if __name__ == "__main__":
    main()
