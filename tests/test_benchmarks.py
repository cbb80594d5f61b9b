"""Benchmarks are not run here, but they must at least find what they import."""

import runpy
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_finds_what_it_imports(script, monkeypatch):
    monkeypatch.syspath_prepend(str(script.parent))  # as Python does for a script
    assert runpy.run_path(str(script), run_name="not main")["__doc__"]
