"""Benchmarks are not run here, but they must at least find what they import."""

import runpy
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.fixture
def load(monkeypatch):
    def load(script: Path):
        monkeypatch.syspath_prepend(str(script.parent))  # as Python does for a script
        return runpy.run_path(str(script), run_name="not main")

    return load


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_finds_what_it_imports(script, load):
    assert load(script)["__doc__"]


def test_memory_is_told_at_six_times_and_its_rise_without_the_start(load):
    memory = load(Path(__file__).parents[1] / "benchmarks" / "memory.py")
    found = []
    for minute in range(61):  # 100 steps a minute; after the first ten minutes half a megabyte more in ten minutes
        grown = 20.0 * min(minute, 10) + 0.05 * max(0, minute - 10)
        found.append(memory["Sample"](60.0 * minute, 100 * minute, "trainer", 300.0 + grown, 80.0))
        if minute >= 20:
            found.append(memory["Sample"](60.0 * minute, 100 * minute, "searcher-0", 400.0, 90.0))
    assert memory["table"](found, seconds=3600.0).splitlines() == [
        "| minutes | step | trainer | searcher-0 |",
        "| --- | --- | --- | --- |",
        "| 10 | 1000 | 500.0 (80.0) |  |",
        "| 20 | 2000 | 500.5 (80.0) | 400.0 (90.0) |",
        "| 30 | 3000 | 501.0 (80.0) | 400.0 (90.0) |",
        "| 40 | 4000 | 501.5 (80.0) | 400.0 (90.0) |",
        "| 50 | 5000 | 502.0 (80.0) | 400.0 (90.0) |",
        "| 60 | 6000 | 502.5 (80.0) | 400.0 (90.0) |",
        "| per 1,000 steps |  | +0.50 | +0.00 |",
    ]
