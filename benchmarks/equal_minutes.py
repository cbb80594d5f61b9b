"""Methods on one task at equal wall clock: each gets as many optimizer steps as fit into the same minutes.

    python benchmarks/equal_minutes.py --minutes 1.5 --seeds 0 1 2                      the embedded word problems, two cores
    python benchmarks/equal_minutes.py configs/gsm8k_one_gpu.yaml --minutes 5 --set model.path=MODEL task.data=FOLDER \\
        --methods "tb async" "tb sync" "dr_grpo async"
    python benchmarks/equal_minutes.py --table runs/equal_minutes.jsonl

A short run first tells the seconds of a step (its first steps, which compile and fill, left out); the number of steps
follows, so that what depends on the end of a run, the falling learning rate, comes to its end too. Everything else is at its
default for the objective. Seconds are of training, without start-up and the evaluation after the end. One run after the
other, seeds outermost, one JSON line each, so that an interrupted study goes on where it was. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from own_bench.runs import FAILED_TAIL, commit_of_checkout, environment, mean_and_error, read_lines

OBJECTIVES = (
    "tb",
    "rloo",
    "grpo",
    "dr_grpo",
    "ppo",
    "vineppo",
    "tba_prime",
    "proximal_rloo",
    "reinforce",
    "online_dpo",
)
METHODS = {
    f"{name} {mode}": [f"objective.name={name}", f"mode={mode}"] for name in OBJECTIVES for mode in ("async", "sync")
}
DEFAULT_METHODS = ["tb async", "tb sync", "rloo sync", "grpo sync", "ppo sync", "vineppo sync"]
TRIAL_STEPS, TRIAL_SKIP = 12, 4
"""Steps of the short run, and how many of them are left out."""


def run(config: str, settings: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One training in a process of its own: its summary and its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [
            f"output={folder}",
            "name=run",
            "observe.progress=false",
            "observe.log_every=1",
            "evaluate.every=0",
            "train.keep_checkpoints=0",
        ]
        command = [sys.executable, "-m", "tba", "train", config, *settings, *fixed]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        if done.returncode:
            raise SystemExit(f"training with {' '.join(settings)} failed:\n{done.stderr[-FAILED_TAIL:]}")
        records = read_lines(Path(folder) / "run" / "metrics.jsonl")
    return json.loads(done.stdout.strip().splitlines()[-1]), [
        record for record in records if "completions/mean_length" in record
    ]


def seconds_per_step(steps: Sequence[dict[str, Any]], skip: int) -> float:
    """Mean of the steps behind the first `skip`."""
    first, last = steps[skip - 1], steps[-1]
    return (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])


def study(arguments: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines that are not there yet, as they come: trials first, then seed by seed."""
    key = {"config": arguments.config, "minutes": arguments.minutes, "set": list(arguments.set)}
    found = [line for line in done if all(line[name] == value for name, value in key.items())]
    paces = {line["method"]: line["seconds_per_step"] for line in found if line["kind"] == "trial"}
    for method in arguments.methods:
        if method not in paces:
            settings = [*METHODS[method], *arguments.set, "seed=1000", "evaluate.num_prompts=8"]
            _, steps = run(arguments.config, [*settings, f"train.max_steps={TRIAL_STEPS}"])
            paces[method] = seconds_per_step(steps, TRIAL_SKIP)
            yield {**key, "kind": "trial", "method": method, "seconds_per_step": paces[method]}
    finished = {(line["method"], line["seed"]) for line in found if line["kind"] == "run"}
    for seed in arguments.seeds:
        for method in arguments.methods:
            if (method, seed) in finished:
                continue
            steps = max(1, int(60 * arguments.minutes / paces[method]))
            settings = [*METHODS[method], *arguments.set, f"seed={seed}", f"train.max_steps={steps}"]
            summary, _ = run(arguments.config, [*settings, f"evaluate.num_prompts={arguments.num_prompts}"])
            yield {
                **key, "kind": "run", "method": method, "seed": seed, "steps": steps, "seconds": summary["seconds"],
                "responses_trained": summary["responses_trained"], "start": summary["start"], "final": summary["final"],
                "commit": commit_of_checkout(),
            }  # fmt: skip


def key_of(line: dict[str, Any]) -> tuple[str, float, tuple[str, ...]]:
    """What lines of one table have in common: config, minutes and further settings."""
    return line["config"], line["minutes"], tuple(line["set"])


def table(lines: Sequence[dict[str, Any]], metric: str) -> str:
    """A line for each method, best first; differences are paired by seed with the first method that was asked for."""
    runs = [line for line in lines if line["kind"] == "run"]
    methods = list(dict.fromkeys(line["method"] for line in runs))
    found = {method: {line["seed"]: line for line in runs if line["method"] == method} for method in methods}
    rows = []
    for method in methods:
        values = [line["final"][metric] for line in found[method].values()]
        common = [seed for seed in found[method] if seed in found[methods[0]]]
        gaps = [found[method][seed]["final"][metric] - found[methods[0]][seed]["final"][metric] for seed in common]
        first = next(iter(found[method].values()))
        seconds = statistics.mean(line["seconds"] for line in found[method].values())
        start = statistics.mean(line["start"][metric] for line in found[method].values())
        cells = [method, str(first["steps"]), f"{seconds:.0f}", str(first["responses_trained"]), f"{start:.3f}"]
        cells += [mean_and_error(values), "" if method == methods[0] else mean_and_error(gaps)]
        rows.append((statistics.mean(values), cells))
    head = ["method", "steps", "seconds", "responses", "start", metric, f"against {methods[0]}" if methods else ""]
    lines_out = [head, ["---"] * len(head), *(cells for _, cells in sorted(rows, key=lambda row: -row[0]))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="configs/arithmetic.yaml")
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=DEFAULT_METHODS, metavar="METHOD")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], help="more settings of all runs, key=value")
    parser.add_argument("--num-prompts", type=int, default=1000, help="problems of the evaluation after the end")
    parser.add_argument("--metric", default="accuracy")
    parser.add_argument("--out", type=Path, default=Path("runs/equal_minutes.jsonl"))
    parser.add_argument("--table", type=Path, help="print the table of a file and end")
    arguments = parser.parse_args()
    path = arguments.table or arguments.out
    lines = read_lines(path)
    if arguments.table is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in study(arguments, list(lines)):
            lines.append(line)
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            shown = {name: value for name, value in line.items() if name not in ("config", "set", "minutes")}
            print(json.dumps(shown), flush=True)
    for study_of in dict.fromkeys(map(key_of, lines)):
        print(f"{study_of[0]}, {study_of[1]:g} minutes {' '.join(study_of[2])}")
        print(table([line for line in lines if key_of(line) == study_of], arguments.metric))


if __name__ == "__main__":
    main()
