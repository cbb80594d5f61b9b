"""Methods on one task at equal wall clock: each gets as many optimizer steps as fit into the same minutes.

    python benchmarks/equal_minutes.py --minutes 1.5 --seeds 0 1 2                      the embedded word problems, two cores
    python benchmarks/equal_minutes.py configs/gsm8k_one_gpu.yaml --minutes 2.5 --set model.path=MODEL task.data=FOLDER \\
        --methods "tb async" "tb sync" "dr_grpo async" --report 8 --num-prompts 1319 --metric avg@8
    python benchmarks/equal_minutes.py --table runs/equal_minutes.jsonl

A short run first tells the seconds of a step (its first steps, which compile and fill, left out), and a whole run of another
seed, which no table shows, corrects them: responses change their length as a policy learns. The number of steps follows, so
that what depends on the end of a run, the falling learning rate, comes to its end too. Everything else is at its default for
the objective. Seconds are of training, without start-up and the evaluation after the end. One run after the
other, seeds outermost, one JSON line each, so that an interrupted study goes on where it was. Nothing else should run.

With --report k the last weights of a run are scored by `tba evaluate` on held-out problems with k samples of each, and the
table has the difference to the first method with the interval of a bootstrap over problems, paired by problem (the seeds'
mean of each problem first): it tells how far the problems carry the difference, the column before it how far the seeds do.
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

from tba.tasks.responses_file import difference, read_shares

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
PACE_SEED = 1000
"""Seed of the runs that tell how long a step takes."""
BESIDE_REPORT = 100
"""Problems of the evaluations at both ends of a run, where --report scores it."""


def run(
    config: str, settings: Sequence[str], *, report: Sequence[str] = ()
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """One training in a process of its own: its summary, its metrics, and what `tba evaluate` with the arguments `report`
    says of its last weights (nothing without them)."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [
            f"output={folder}",
            "name=run",
            "observe.progress=false",
            "observe.log_every=1",
            "evaluate.every=0",
            f"train.keep_checkpoints={1 if report else 0}",
        ]
        summary = tba("train", config, *settings, *fixed)
        records = read_lines(Path(folder) / "run" / "metrics.jsonl")
        reported = tba("evaluate", str(Path(folder) / "run"), *report) if report else {}
    return summary, [record for record in records if "completions/mean_length" in record], reported


def tba(*arguments: str) -> dict[str, Any]:
    """A command of tba, by its last line."""
    command = [sys.executable, "-m", "tba", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    if done.returncode:
        raise SystemExit(f"tba {' '.join(arguments)} failed:\n{done.stderr[-FAILED_TAIL:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def seconds_per_step(steps: Sequence[dict[str, Any]], skip: int) -> float:
    """Mean of the steps behind the first `skip`."""
    first, last = steps[skip - 1], steps[-1]
    return (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])


def study(arguments: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines that are not there yet, as they come: trials first, then seed by seed."""
    key = {"config": arguments.config, "minutes": arguments.minutes, "set": list(arguments.set)}
    found = [line for line in done if all(line[name] == value for name, value in key.items())]
    paces = {line["method"]: line["seconds_per_step"] for line in found if line["kind"] == "pace"}
    for method in arguments.methods:
        if method not in paces:
            settings = [*METHODS[method], *arguments.set, f"seed={PACE_SEED}", "evaluate.num_prompts=8"]
            _, steps, _ = run(arguments.config, [*settings, f"train.max_steps={TRIAL_STEPS}"])
            trial = seconds_per_step(steps, TRIAL_SKIP)
            planned = max(1, int(60 * arguments.minutes / trial))
            summary, _, _ = run(arguments.config, [*settings, f"train.max_steps={planned}"])
            paces[method] = summary["seconds"] / planned
            yield {**key, "kind": "pace", "method": method, "trial": trial, "seconds_per_step": paces[method]}
    scored = {"report": arguments.report, "num_prompts": arguments.num_prompts}
    finished = {
        (line["method"], line["seed"])
        for line in found
        if line["kind"] == "run" and all(line.get(name, value) == value for name, value in scored.items())
    }
    for seed in arguments.seeds:
        for method in arguments.methods:
            if (method, seed) in finished:
                continue
            steps = max(1, int(60 * arguments.minutes / paces[method]))
            settings = [*METHODS[method], *arguments.set, f"seed={seed}", f"train.max_steps={steps}"]
            report, responses = [], arguments.out.with_suffix("") / f"{method.replace(' ', '_')}-{seed}.jsonl"
            if arguments.report:
                responses.parent.mkdir(parents=True, exist_ok=True)
                report = [f"--num-prompts={arguments.num_prompts}", f"--samples={arguments.report}"]
                report += [f"--responses={responses}", "evaluate.split=held_out"]
            looked_at = BESIDE_REPORT if arguments.report else arguments.num_prompts
            summary, _, reported = run(
                arguments.config, [*settings, f"evaluate.num_prompts={looked_at}"], report=report
            )
            yield {
                **key, **scored, "kind": "run", "method": method, "seed": seed, "steps": steps,
                "seconds": summary["seconds"], "responses_trained": summary["responses_trained"], "start": summary["start"],
                "final": summary["final"] | reported, "commit": commit_of_checkout(),
                "responses": str(responses) if report else None,
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
        cells = [method, str(first["steps"]), f"{seconds:.0f}", str(first["responses_trained"])]
        cells += [mean_and_error(values), "" if method == methods[0] else mean_and_error(gaps)]
        cells += [] if first.get("responses") is None else [by_problem(found[method], found[methods[0]], metric)]
        rows.append((statistics.mean(values), cells))
    head = ["method", "steps", "seconds", "responses", metric, f"against {methods[0]}" if methods else ""]
    head += ["the same, by problem (95%)"] * (len(rows[0][1]) - len(head) if rows else 0)
    lines_out = [head, ["---"] * len(head), *(cells for _, cells in sorted(rows, key=lambda row: -row[0]))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines_out)


def by_problem(own: dict[int, dict[str, Any]], first: dict[int, dict[str, Any]], metric: str) -> str:
    """The difference to the first method over problems, each by its mean over the seeds of both, and its bootstrap
    interval."""
    seeds = [seed for seed in own if seed in first]
    if own is first or not seeds:
        return ""
    ours, theirs = (mean_shares([lines[seed]["responses"] for seed in seeds], metric) for lines in (own, first))
    found = difference([ours[prompt] - theirs[prompt] for prompt in sorted(ours) if prompt in theirs])
    return f"{found['difference']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f})"


def mean_shares(paths: Sequence[str], metric: str) -> dict[str, float]:
    """By problem: the share that is solved, mean over runs."""
    of_runs = [read_shares(Path(path))[metric] for path in paths]
    return {prompt: statistics.mean(shares[prompt] for shares in of_runs) for prompt in of_runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="configs/arithmetic.yaml")
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=DEFAULT_METHODS, metavar="METHOD")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], help="more settings of all runs, key=value")
    parser.add_argument("--num-prompts", type=int, default=1000, help="problems of the evaluation after the end")
    parser.add_argument(
        "--report", type=int, default=0, metavar="K", help="samples of each held-out problem at the end"
    )
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
