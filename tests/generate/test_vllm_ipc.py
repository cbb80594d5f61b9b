"""vLLM's own ipc backend: it reads the weights where another process has published them, on the GPU that both use.

Needs a GPU and a vLLM whose backend can be imported (0.26 asks for Ray); `Transfer.chosen` is tested wherever vLLM is."""

from __future__ import annotations

import importlib.util
import multiprocessing
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from tiny_models import make_prompt, make_requests, make_tiny_model, plain_log_probs

from tba.config import GenerateConfig
from tba.generate.make import make_engine
from tba.runtime.weight_slots import WeightSlots
from tba.types import Sampling

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: see `make test-vllm`"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA IPC needs a GPU")

FAMILY = "llama-wide-heads"
PROMPT, RESPONSE = make_prompt("a", 4).token_ids, make_prompt("d", 9).token_ids
WAIT_SECONDS = 60


def trainer(pipe) -> None:
    """Publish version v, the model of seed v, for every v that is asked for; ends with the pipe."""
    tensors = dict(make_tiny_model(FAMILY).named_parameters())
    slots = WeightSlots.create(tensors, torch.float32, device=torch.device("cuda"))
    pipe.send(slots.handle())
    while (version := pipe.recv()) is not None:
        with torch.no_grad():
            slots.publish(dict(make_tiny_model(FAMILY, seed=version).cuda().named_parameters()), version=version)
        pipe.send(version)
    pipe.recv()  # the memory is this process's: it stays until nobody reads it


@contextmanager
def trainer_process():
    """Yields the slots as a searcher sees them, and what publishes a version."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=trainer, args=(its,), daemon=True)
    process.start()

    def answer():
        assert mine.poll(WAIT_SECONDS), "the publishing process does not answer"
        return mine.recv()

    def publish(version):
        mine.send(version)
        assert answer() == version

    try:
        yield WeightSlots.attach(answer()), publish
    finally:
        mine.send(None)
        mine.send(None)
        process.join(WAIT_SECONDS)


@needs_vllm
def test_which_way_weights_come_into_vllm(monkeypatch):
    from tba.generate import vllm_llm
    from tba.generate.vllm_llm import Transfer

    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for offered, device, beside, expected in (
        (True, gpu, True, Transfer.ipc),
        (True, gpu, False, Transfer.in_process),  # the weights come through host memory
        (True, cpu, True, Transfer.in_process),
        (False, gpu, True, Transfer.in_process),
    ):
        monkeypatch.setattr(vllm_llm, "offers_ipc", lambda offered=offered: offered)
        assert Transfer.chosen(device, beside_trainer=beside) is expected


@needs_gpu
@needs_vllm
def test_vllm_reads_what_another_process_has_published_and_its_own_copy_once_that_is_overwritten(monkeypatch):
    from tba.generate import vllm_llm

    if not vllm_llm.offers_ipc():
        pytest.skip("the installed vLLM cannot import its ipc backend")
    read = []
    shared = vllm_llm._send_shared
    monkeypatch.setattr(vllm_llm, "_send_shared", lambda *given: read.append(shared(*given)) or read[-1])
    model = make_tiny_model(FAMILY).cuda()
    settings = GenerateConfig(engine="vllm", slots=3)
    with trainer_process() as (slots, publish):
        assert slots.on_gpu
        engine = make_engine(model, [2, 3, 4], settings, seed=0, max_length=40, beside_trainer=True)

        def check(version):
            (score,) = engine.score([PROMPT], [RESPONSE], 1.0)
            expected = plain_log_probs(make_tiny_model(FAMILY, seed=version), PROMPT, RESPONSE)
            np.testing.assert_allclose(score, expected, atol=1e-4)
            assert engine.version == version

        check(0)
        for version in (1, 2, 3):
            publish(version)
            engine.load(slots.fetch())
            check(version)
        assert read == [True, True, True]
        publish(4)
        fetched = slots.fetch()
        publish(5)
        publish(6)  # where 4 was
        engine.load(fetched)
        assert read[3:] == [False]
        check(4)
        publish(7)
        engine.load(slots.fetch())
        (found,) = engine.generate(make_requests(6), samples_per_prompt=1, sampling=Sampling(max_new_tokens=8))
        assert found.version_spans == ((0, 7),)
        check(7)


@needs_gpu
def test_every_tensor_of_a_slot_is_opened_at_its_place():
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    with trainer_process() as (slots, publish):
        publish(3)
        fetched = slots.fetch()
        assert fetched.shared is not None
        assert fetched.shared.is_there()
        for name, arguments in fetched.shared.handles.items():
            assert torch.equal(rebuild_cuda_tensor(*arguments), fetched.tensors[name]), name
        publish(4)
        assert fetched.shared.is_there()
        publish(5)
        assert not fetched.shared.is_there()
