"""A whole asynchronous run whose searcher generates with vLLM. Skipped where it is not installed: see `make test-vllm`."""

import importlib.util
import json
import sys

import pytest
import torch
from builders import tiny_llama
from problem import make_config, write_problem

from tba.observe.run_folder import RunFolder
from tba.run import train

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: see `make test-vllm`"
)


VLLM_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = "model.dtype=float32"  # what a CPU has anyway; on a GPU the default is bf16, whose mismatch is far larger


@pytest.fixture(autouse=True)
def _whole_products(monkeypatch):
    """On a GPU vLLM's attention would otherwise multiply fp32 numbers with ten bits."""
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")


@pytest.fixture
def folder(tmp_path):
    write_problem(tmp_path)
    # Not the quickstart's model: its heads of 24 numbers are narrower than vLLM's kernels for CPUs take.
    tiny_llama(head_dim=32, max_position_embeddings=128).save_pretrained(tmp_path / "model")
    return tmp_path


def step_records(config) -> list[dict]:
    lines = RunFolder(config.run_folder).metrics.read_text().splitlines()
    return [record for line in lines if "loss" in (record := json.loads(line))]


@needs_vllm
def test_an_asynchronous_run_trains_on_what_vllm_generates(folder):
    config = make_config(folder, "name=vllm", "generate.engine=vllm", FP32, "train.max_steps=30", "evaluate.every=10")
    summary = train(config)
    assert (summary["outcome"], summary["steps"]) == ("finished", 30)
    assert summary["lag"]["max"] > 0
    steps = step_records(config)
    assert steps[-1]["searcher/0/version"] > 0
    # The canary of the newest weights, and the responses' log-probs where the trainer has the version that chose them.
    assert steps[-1]["searcher/0/mismatch_kl"] < 1e-8
    mismatches = [record["off_policy/mismatch_kl"] for record in steps if "off_policy/mismatch_kl" in record]
    assert mismatches
    assert max(mismatches) < 1e-8


@needs_vllm
def test_a_synchronous_run_at_a_low_temperature_with_samples_of_the_reference(folder):
    config = make_config(
        folder,
        "name=sync",
        "mode=sync",
        "generate.engine=vllm",
        FP32,
        "generate.temperature=0.8",
        "search.explore.reference_share=0.25",
    )
    summary = train(config)
    assert (summary["outcome"], summary["steps"], summary["lag"]["max"]) == ("finished", 6, 0)
    assert all(record["off_policy/mismatch_kl"] < 1e-8 for record in step_records(config))


def test_without_vllm_a_run_is_refused_before_anything_is_written(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as Python notes a module that cannot be imported
    config = make_config(folder, "name=refused", "generate.engine=vllm")
    with pytest.raises(ValueError, match=r"generate\.engine=vllm needs vLLM.*pip install 'tba-rl\[vllm\]'"):
        train(config)
    assert not config.run_folder.exists()


@needs_vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's kernels for GPUs know such heads")
def test_a_model_that_vllm_cannot_run_ends_the_run_at_once(tmp_path):
    write_problem(tmp_path)  # heads of 8 numbers
    config = make_config(tmp_path, "name=narrow", "generate.engine=vllm")
    with pytest.raises(RuntimeError, match=r"generate\.engine=vllm cannot run this model"):
        train(config)
