"""Draw the README's figure from docs/staleness_rates.jsonl: accuracy by lag, each objective at its best of three rates.

python benchmarks/staleness_figure.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev

from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
ROWS = {
    "tb": ("tb (tba's default)", "C0"), "dr_grpo": ("Dr. GRPO", "C2"), "proximal_rloo": ("Proximal RLOO", "C8"),
    "ppo": ("PPO", "C1"), "grpo": ("GRPO", "C4"), "tba_prime": ("TBA', as published", "C5"),
    "tb exact": ("TB, as published", "C3"), "rloo": ("RLOO", "C7"),
}  # fmt: skip
PANELS = {"staleness_rates": "word problems", "staleness_rates_sort": "sorting digits"}


def main() -> None:
    runs = [json.loads(line) for line in (DOCS / "staleness_rates.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axes, (study, title) in zip(figure.subplots(1, 2), PANELS.items()):
        for row, (name, colour) in ROWS.items():
            own = [run for run in runs if (run["study"], run["row"]) == (study, row)]
            best = {}
            for lag in (0, 10, 50):
                rates = {run["rate"] for run in own}
                found = [[run["percent"] for run in own if (run["lag"], run["rate"]) == (lag, r)] for r in rates]
                best[lag] = max(found, key=fmean)
            errors = [stdev(values) / len(values) ** 0.5 for values in best.values()]
            means, thick = [fmean(values) for values in best.values()], 3 if row == "tb" else 1.5
            axes.errorbar(range(3), means, errors, color=colour, label=name, marker="o", linewidth=thick, capsize=3)
        axes.set(title=title, xticks=range(3), xticklabels=(0, 10, 50), ylim=(0, 100))
        axes.set(xlabel="lag, optimizer steps", ylabel="held-out accuracy, %")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False, loc="lower left")
    figure.savefig(DOCS / "staleness.png", dpi=130)


if __name__ == "__main__":
    main()
