"""A few rows of the table in docs/models.md, measured: each of another way to run, and what goes wrong is written down."""

import sys
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from model_bench import measure as bench
from model_bench.configs import CONFIGS

ROWS = {
    "GPT-OSS": "packed",
    "Falcon": "one by one",
}


@pytest.mark.parametrize("family", ROWS)
def test_a_family_is_exact_against_transformers(family):
    row = bench.measure(family)
    assert row.verdict.endswith(", exact"), row
    assert row.training == ROWS[family]
    assert set(row.gaps) == {"generated", "scored", "loaded", "trained", "gradient", "lora", "lora gradient"}
    assert {"generated", "trained"} <= set(row.ratios)


def test_the_table_has_thirty_families_and_more():
    assert len(CONFIGS) >= 30


def test_what_goes_wrong_is_written_down_and_not_called_a_refusal(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a tensor of the wrong size")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", broken)
    row = bench.measure("Llama 3")
    assert row.crashed == "RuntimeError: a tensor of the wrong size"
    assert not row.refused


def test_a_gap_beyond_the_bound_is_not_exact():
    row = bench.Row(family="x", engine="native", greedy=1.0, gaps={"trained": 2e-4})
    assert row.verdict == "native, NOT exact"
    row.gaps["trained"] = float(torch.tensor(1e-5))
    assert row.verdict == "native, exact"
