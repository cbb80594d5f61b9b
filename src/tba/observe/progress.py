"""The live line on the terminal: where the run stands, in the words of its metrics."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from tba.config import Config


class Progress:
    """A progress bar with reward, KL, lag and speed; evaluations stay above it. Silent with observe.progress=false."""

    def __init__(self, config: Config) -> None:
        self._enabled = config.observe.progress
        self._console = Console(stderr=True)
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not self._enabled,
        )
        self._task = self._bar.add_task(config.run_name, total=config.train.max_steps, figures="")
        self._bar.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        figures = (
            f"reward {metrics.get('reward', 0):.3f}  kl {metrics.get('kl', 0):.2f}  "
            f"lag {metrics.get('off_policy/lag_mean', 0):.1f}  {metrics['perf/responses_per_second']:.0f} responses/s"
        )
        self._bar.update(self._task, completed=step, figures=figures)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._enabled:
            figures = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
            self._bar.console.print(f"step {step}: {figures}")

    def close(self) -> None:
        self._bar.stop()
