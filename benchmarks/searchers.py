"""Red-teaming with 1 to 12 searchers, read off a finished study at equal responses and at equal minutes:

    tba compare configs/studies/red_team_searchers.yaml
    python benchmarks/searchers.py [runs/studies/red_team_searchers]

Each run's evaluations on the way are (seconds, responses generated, success, modes); a reading is the last evaluation
within the budget, which is what the slowest run reached.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev


@dataclass(frozen=True)
class Reading:
    seconds: float
    responses: float
    success: float
    modes: float


def readings(metrics: Path) -> list[Reading]:
    """The evaluations of a run; responses generated are those known at the step that was evaluated."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    generated = {record["step"]: record["buffer/generated"] for record in records if "buffer/generated" in record}
    return [
        Reading(
            record["seconds"],
            generated.get(record["step"], 0.0),
            record["eval/red_team/success"],
            record["eval/red_team/modes"],
        )
        for record in records
        if "eval/red_team/success" in record
    ]


def within(run: list[Reading], key: str, budget: float) -> Reading:
    return [reading for reading in run if getattr(reading, key) <= budget][-1]


def shown(values: list[float], digits: int) -> str:
    error = f" ± {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{error} ({', '.join(f'{value:.{digits}f}' for value in values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", type=Path, default=Path("runs/studies/red_team_searchers"))
    rows: dict[str, list[list[Reading]]] = {}
    for metrics in sorted(parser.parse_args().study.glob("runs/*/*/seed-*/metrics.jsonl")):
        rows.setdefault(metrics.parents[2].name, []).append(readings(metrics))
    if not rows:
        raise SystemExit("no finished runs there: tba compare configs/studies/red_team_searchers.yaml makes them.")
    everything = [run for runs in rows.values() for run in runs]
    budgets = {
        "responses": min(run[-1].responses for run in everything),
        "seconds": min(run[-1].seconds for run in everything),
    }
    print("| searchers | seconds in all | responses in all |", end="")
    for key, budget in budgets.items():
        print(f" success, %, at {budget:,.0f} {key} | modes, the same |", end="")
    print("\n|" + "---|" * 7)
    for row, runs in rows.items():
        print(
            f"| {row} | {shown([r[-1].seconds for r in runs], 0)} | {shown([r[-1].responses for r in runs], 0)} |",
            end="",
        )
        for key, budget in budgets.items():
            found = [within(run, key, budget) for run in runs]
            print(f" {shown([100 * r.success for r in found], 1)} | {shown([r.modes for r in found], 1)} |", end="")
        print()


if __name__ == "__main__":
    main()
