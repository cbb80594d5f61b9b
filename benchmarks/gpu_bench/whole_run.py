"""A run of `tba train` with random weights of a shape: trainer and searcher on one GPU, and the memory of each."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from gpu_bench.models import make_model
from gpu_bench.workloads import SHAPES, Row
from tba.config import ModelConfig
from tba.models.load import load_model

STEPS, WARM = 7, 3
"""Steps of the run, and the first of them, which compile and capture, and are not counted."""
RUN_SECONDS = 500.0
"""Most seconds of a run."""
SETTINGS = (
    "task.name=arithmetic", "generate.max_new_tokens=256", f"train.max_steps={STEPS}", "train.responses_per_step=128",
    "train.keep_checkpoints=0", "evaluate.every=0", "evaluate.num_prompts=8", "observe.progress=false",
    "observe.on_collapse=off",
)  # fmt: skip


def save_model(key: str, folder: Path) -> None:
    """Random weights with the tokenizer of the arithmetic task, which knows a few of the ids only: responses are noise, and
    as long as they may be."""
    make_model(SHAPES[key]).save_pretrained(folder)
    load_model(ModelConfig(device="cpu")).tokenizer.save_pretrained(folder)


def run_rows(key: str, overrides: Sequence[str] = ()) -> Iterator[Row]:
    """All weights, moments on the host; this process must not touch the GPU."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saving = multiprocessing.get_context("spawn").Process(target=save_model, args=(key, folder / "model"))
        saving.start()  # a process of its own, whose memory goes with it
        saving.join()
        settings = [f"model.path={folder / 'model'}", f"output={folder}", "name=run", *SETTINGS, *overrides]
        used, log = _watched([sys.executable, "-m", "tba", "train", *settings], folder / "log")
        yield Row(
            work=f"tba train, {SHAPES[key].name}, {' '.join(overrides) or 'defaults'}: 128 responses of 256 tokens a step",
            figure=f"{_pace(folder / 'run')}; memory in GiB, most of each process: {used}",
            limit=_planned(folder / "run", log),
        )


def _watched(command: Sequence[str], log: Path) -> tuple[str, str]:
    """The most memory that each process of a run had on the GPU and on the host, and what the run said."""
    most: dict[str, float] = {}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        deadline = time.monotonic() + RUN_SECONDS
        try:
            while process.poll() is None and time.monotonic() < deadline:
                for part, gib in _memory().items():
                    most[part] = max(gib, most.get(part, 0.0))
                time.sleep(0.5)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return ", ".join(f"{part} {gib:.0f}" for part, gib in sorted(most.items())), log.read_text(errors="replace")


def _planned(run: Path, log: str) -> str:
    """What the run had planned for the GPU; its last words where it has not come so far."""
    log += "".join(path.read_text(errors="replace") for path in sorted((run / "logs").glob("*.log")))
    planned = re.findall(r"memory of cuda:0: (.*)\.", log)
    return f"planned: {planned[0]}" if planned else log[-1500:].replace("\n", " / ")


def _memory() -> dict[str, float]:
    """GiB in use: of the GPU by process, where nvidia-smi says so, and in all; of the host what is not available."""
    found = {}
    query = ["nvidia-smi", "--format=csv,noheader,nounits"]
    if shutil.which("nvidia-smi"):
        for line in subprocess.check_output([*query, "--query-compute-apps=pid,used_memory"], text=True).splitlines():
            pid, mib = line.split(",")
            with suppress(OSError, ValueError):
                found[f"GPU {Path(f'/proc/{int(pid)}/comm').read_text().strip()}"] = float(mib) / 1024
        total = subprocess.check_output([*query, "--query-gpu=memory.used"], text=True)
        found["GPU in all"] = float(total.splitlines()[0]) / 1024
    numbers = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {name: int(numbers[name].split()[0]) for name in ("MemTotal", "MemAvailable")}
    found["host in all"] = (kib["MemTotal"] - kib["MemAvailable"]) / 2**20
    return found


def _pace(run: Path) -> str:
    """Seconds of a step after the first ones, and where they go."""
    with suppress(OSError):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if "time/step" in row and row["step"] >= WARM]
        if len(steps) > 1:
            whole = (steps[-1]["seconds"] - steps[0]["seconds"]) / (len(steps) - 1)
            names = [name for name in steps[0] if name.startswith("time/")]
            parts = {name: float(np.mean([row[name] for row in steps[1:]])) for name in names}
            of_it = ", ".join(f"{name.removeprefix('time/')} {mean:.2f}" for name, mean in parts.items())
            return f"{whole:.2f} s a step ({of_it}), {steps[-1]['perf/responses_per_second']:.1f} responses trained a second"
    return "no step was finished"
