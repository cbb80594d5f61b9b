"""The check of a new engine runs what will serve: its dtype, its layout of the cache, its prefill and its decode step."""

import numpy as np
import pytest
import torch
from plain_pages import read_pages
from tiny_models import FAMILIES, VOCABULARY, make_requests, make_tiny_model, plain_log_probs

from tba.engine.decoder.decoder import Decoder
from tba.engine.decoder.fused_pass import why_never_fused
from tba.engine.decoder.layers import CausalAttention
from tba.engine.decoder.spec import UnsupportedModel
from tba.engine.native import engine as engine_module
from tba.engine.native import slot_cache
from tba.engine.native.engine import NativeEngine
from tba.engine.native.paged_cache import PAGE, PagedCache
from tba.types import Sampling

pytestmark = pytest.mark.slow


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Keys, values and attention as they are on a GPU: in the engine's dtype, in pages or, without fused kernels, keys like
    values."""
    monkeypatch.setitem(slot_cache.POSITIONS_LAST, "cpu", False)
    pages = lambda decoder: PAGE if why_never_fused(decoder.spec) is None else 0  # noqa: E731
    monkeypatch.setattr(engine_module, "page_size_for", pages)
    read_pages(monkeypatch)
    monkeypatch.setattr(Decoder, "attention_dtype", property(lambda decoder: decoder.dtype))


def make(model, **changes):
    return NativeEngine(model, **{"stop_ids": [2], "seed": 0, "slots": 2, "max_length": 40, **changes})


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_generates_in_bf16_with_the_cache_of_a_gpu(family):
    model = make_tiny_model(family, spread=3.0)
    engine = make(model, dtype=torch.bfloat16)
    table = engine.cache.pool.base if isinstance(engine.cache, PagedCache) else engine.cache.keys
    assert table.dtype == torch.bfloat16
    requests = make_requests(9, 3)
    gaps = []
    for found in engine.generate(requests, samples_per_prompt=2, sampling=Sampling(max_new_tokens=12)):
        prompt = requests[int(found.prompt_id[1:])].prompt
        gaps.append(np.abs(found.policy_log_probs - plain_log_probs(model, prompt.token_ids, found.token_ids)))
    assert np.concatenate(gaps).mean() < 0.1


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_decoders_own_check_attends_in_the_dtype_that_serves(dtype, monkeypatch):
    seen = []
    monkeypatch.setattr(CausalAttention, "attend", _noting(CausalAttention.attend, seen))
    make(make_tiny_model("llama", spread=3.0), dtype=dtype)
    assert set(seen) == {dtype}


def _noting(attend, seen):
    def noted(self, layer, query_NHD, sinks_H=None):
        seen.append(self.dtype)
        return attend(self, layer, query_NHD, sinks_H)

    return noted


def turned_round(attend):
    return lambda self, layer, query_NHD, sinks_H=None: attend(self, layer, query_NHD, sinks_H) * -1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_that_computes_otherwise_is_refused_when_the_engine_is_made(dtype, monkeypatch):
    wrong = turned_round(slot_cache.SlotAttention.attend)
    monkeypatch.setattr(slot_cache.SlotAttention, "attend", wrong)
    with pytest.raises(UnsupportedModel, match=r"differ by .* its prefill or decode step computes otherwise"):
        make(make_tiny_model("llama", spread=4.0), dtype=dtype)


def test_a_prefill_that_forgets_a_token_is_refused_when_the_engine_is_made(monkeypatch):
    fork = slot_cache.SlotCache.fork

    def forgets(self, slots, prefilled, rows):
        fork(self, slots, prefilled, rows)
        self.values[:, slots, :, 1] = 0.0

    monkeypatch.setattr(slot_cache.SlotCache, "fork", forgets)
    with pytest.raises(UnsupportedModel, match="its prefill or decode step computes otherwise"):
        make(make_tiny_model("llama", spread=4.0))


def test_a_fused_step_that_fails_the_check_is_replaced_by_the_plain_one_with_a_warning(monkeypatch, caplog):
    class Failing:
        def __init__(self, *tables):
            pass

        def run(self, count, *, decode_steps):
            raise RuntimeError("no such instruction")

    monkeypatch.setattr(NativeEngine, "_make_fused", lambda engine: Failing())
    engine = make(make_tiny_model("llama"))
    assert engine._fused is None
    assert "slower: RuntimeError: no such instruction" in caplog.text


@pytest.mark.parametrize("max_length", [1, 2, 6])
def test_an_engine_for_very_short_sequences_is_checked_within_its_length(max_length):
    assert make(make_tiny_model("llama"), max_length=max_length, slots=1).vocabulary == VOCABULARY
