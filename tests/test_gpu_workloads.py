"""What the GPU benchmarks ask for, and the limits that they print beside their figures."""

import copy
import os
import select
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import tiny_llama

from tba.models.policy import PolicyModel

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def workloads(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_bench.workloads

    return gpu_bench.workloads


def test_the_7b_shape_has_the_parameters_and_keys_of_qwen(workloads):
    shape = workloads.SHAPES["7B"]
    # 28 layers of attention 3584 x (3584 + 512 + 512 + 3584) and MLP 3 x 3584 x 18944, and a head of 152064 x 3584.
    assert shape.matrix_parameters == 28 * (3584 * 8192 + 3 * 3584 * 18_944) + 152_064 * 3584
    assert shape.bytes_per_key == 28 * 2 * 4 * 128 * 2  # layers, keys and values, heads, numbers, bytes


def test_the_limit_of_a_workload_is_that_of_its_bytes_or_of_its_products(workloads):
    shape = workloads.SHAPES["7B"]
    short = workloads.Workload(name="", slots=1, prompts=1, prompt_tokens=1, samples=1, new_tokens=2)
    # One slot: a step reads all weights, and keys of the prompt and of half the response, one each.
    step = (2 * shape.matrix_parameters + 2 * shape.bytes_per_key) / workloads.BYTES_PER_SECOND
    alone, behind_prefill = short.limits(shape)
    assert alone == pytest.approx(1 / step)
    assert behind_prefill < alone
    # 4,096 slots: the products take longer than reading what they multiply.
    wide = workloads.Workload(name="", slots=4096, prompts=4096, prompt_tokens=1, samples=1, new_tokens=2)
    assert wide.limits(shape)[0] == pytest.approx(workloads.FLOPS / (2 * shape.matrix_parameters))


def test_samples_of_a_prompt_read_its_keys_once(workloads):
    shape = workloads.SHAPES["7B"]
    options = {"name": "", "slots": 64, "prompt_tokens": 8192, "new_tokens": 512}
    shared = workloads.Workload(prompts=16, samples=8, **options)
    apart = workloads.Workload(prompts=128, samples=1, **options)
    assert shared.limits(shape)[0] > 2 * apart.limits(shape)[0]


def test_repeats_have_other_prompts_and_the_same_lengths(workloads):
    ragged = workloads.WORKLOADS["ragged"]
    first, second = (ragged.token_ids(1000, repeat) for repeat in (0, 1))
    assert first.shape == (1024, 128)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, ragged.token_ids(1000, 0))
    assert 32 <= ragged.lengths().min() < ragged.lengths().max() <= 320


@pytest.mark.parametrize(("then", "seconds", "status"), [("", 60.0, 0), ("wait", 1.0, None)])
def test_a_job_takes_the_processes_that_it_has_started_with_it(then, seconds, status, workloads, tmp_path):
    from gpu_bench.processes import run_alone

    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    # What outlives the job holds the pipe, as vLLM's engine holds the GPU.
    command = ["sh", "-c", f"exec > '{tmp_path}/pipe'; echo started; sleep 30 & {then}"]
    assert run_alone(command, seconds=seconds) == status
    assert os.read(reader, 100) == b"started\n"
    assert select.select([reader], [], [], 10.0)[0], "somebody holds the pipe still"
    os.close(reader)


def test_the_searcher_of_the_publish_benchmark_takes_every_version(monkeypatch):
    """On a CPU, in one process: the trainer publishes when it is told that the version before is in use."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_bench import models, publish

    monkeypatch.setattr(models, "device", lambda: torch.device("cpu"))
    model = tiny_llama(max_position_embeddings=512)
    searched = copy.deepcopy(model)
    policy, tensors = PolicyModel(model), dict(model.named_parameters())
    slots = publish.TimedWeights.create(tensors, torch.float32)

    def publish_version(version: int) -> None:
        slots.add_canary(policy.canary(slots.publish(tensors, version=version).tensors))

    class Enough(Exception):
        pass

    heard = []

    def tell(what) -> None:
        heard.append(what)
        if what == "decodes" or isinstance(what, tuple):
            if len(heard) == 5:
                raise Enough
            publish_version(len(heard) - 1)

    publish_version(0)
    with pytest.raises(Enough):
        publish.search(slots, searched, tell)
    assert heard[:2] == ["has its engine", "decodes"]
    assert [version for version, *_ in heard[2:]] == [1, 2, 3]
    assert all(seen <= fetched <= in_use for _, seen, fetched, in_use in heard[2:])
