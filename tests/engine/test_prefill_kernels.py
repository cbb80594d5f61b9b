"""The fused pass over whole sequences against the plain pass of decoder.py, on a GPU, or on a CPU with TRITON_INTERPRET=1.

TRITON_INTERPRET=1 python -m pytest tests/engine/test_prefill_kernels.py        (needs `pip install triton`)
"""

import os

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, make_prompt, make_tiny_model

from tba.engine.decoder.build import make_decoder
from tba.engine.decoder.decoder import rotate
from tba.engine.decoder.fused_pass import FusedPass, make_fused_pass, why_not_fused
from tba.engine.decoder.layers import CausalAttention
from tba.engine.native.engine import NativeEngine
from tba.engine.scoring import ReferenceScorer

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for CUDA.")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SERVED = [
    *("llama", "llama-tied-biased", "mistral-window", "qwen2", "qwen3", "gemma", "phi3", "smollm3", "granite"),
    *("mixtral", "qwen3-moe", "olmoe", "gpt-oss", "gemma2", "gemma3", "olmo2"),
]
LENGTHS = [7, 1, 4]


@pytest.fixture(params=["head", "several", "row"])
def program(request, monkeypatch):
    """A program of the rotation does one head (few rows), several, or a whole row (many)."""
    monkeypatch.setattr(
        "tba.engine.kernels.layer.ROTATING_PROGRAMS", {"row": 1, "several": 16, "head": 2048}[request.param]
    )


def decoders(family: str):
    """The same decoder with the fused and with the plain pass."""
    model = make_tiny_model(family).to(DEVICE)
    fused, plain = (make_decoder(model, max_length=48, dtype=torch.float32, device=DEVICE) for _ in range(2))
    fused.fused_pass = FusedPass(fused.spec, fused.weights, fused.rotations)
    plain.fused_pass = None
    return fused, plain


def right_padded(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions [B, T]; padding has id 0."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    offset = torch.arange(max(lengths)).expand_as(ids)
    return torch.where(offset < torch.tensor(lengths)[:, None], ids, 0).to(DEVICE), offset.to(DEVICE)


def assert_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 1e-5 * max(1.0, float(want.abs().max()))


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("family", SERVED)
def test_hidden_states_logits_and_stored_keys_and_values_are_those_of_the_plain_pass(family):
    ids, positions = right_padded(LENGTHS)
    results = []
    for decoder in decoders(family):
        attend = CausalAttention(decoder.spec, *ids.shape)
        hidden = decoder.hidden(ids.flatten(), positions.flatten(), attend)
        results.append((hidden, decoder.logits(hidden), attend.keys, attend.values))
    for got, want in zip(*results):
        assert_equal(got, want)


@pytest.mark.parametrize("family", SERVED)
def test_storing_only_stores_what_the_plain_pass_stores(family):
    ids, positions = right_padded(LENGTHS)
    stored = []
    for decoder in decoders(family):
        attend = CausalAttention(decoder.spec, *ids.shape)
        decoder.store_only(ids.flatten(), positions.flatten(), attend)
        stored.append((attend.keys, attend.values))
    for got, want in zip(*stored):
        assert got.shape[:3] == (3, len(LENGTHS), want.shape[2])
        assert_equal(got, want)


@pytest.mark.parametrize("family", SERVED)
def test_scores_after_a_shared_prompt_are_those_of_the_plain_pass(family):
    rng = np.random.default_rng(0)
    prompts = [make_prompt(f"p{length}", length).token_ids for length in (1, 7) for _ in range(2)]
    responses = [rng.integers(3, VOCABULARY, size=length) for length in (3, 1, 2, 6)]
    fused, plain = (ReferenceScorer(decoder).score(prompts, responses, 0.7) for decoder in decoders(family))
    for got, want in zip(fused, plain):
        assert_equal(torch.from_numpy(got), torch.from_numpy(want))


def test_prefilled_prompts_are_those_of_the_plain_pass_and_lie_as_written():
    model = make_tiny_model("qwen3").to(DEVICE)
    fused, plain = (NativeEngine(model, stop_ids=[2], seed=0, slots=2, max_length=32, device=DEVICE) for _ in range(2))
    decoder = fused.decoder
    decoder.fused_pass, plain.decoder.fused_pass = FusedPass(decoder.spec, decoder.weights, decoder.rotations), None
    rows = [make_prompt(f"p{length}", length).token_ids for length in LENGTHS]
    for engine in (fused, plain):
        engine._make_cache(0)
        engine.cache.positions_last = False  # the layout that CUDA has
    with torch.inference_mode():
        got, want = fused._prefill.batch(rows, 0)[0], plain._prefill.batch(rows, 0)[0]
    assert_equal(got.keys, want.keys)
    assert_equal(got.values, want.values)
    # [M, B, K, L, D] as a view of tokens times heads: written once, by the kernel.
    assert got.keys.transpose(2, 3).is_contiguous()
    assert got.values.transpose(2, 3).is_contiguous()


def test_a_pass_in_bf16_is_as_near_to_fp32_as_the_plain_one():
    model = make_tiny_model("llama", spread=3.0).to(DEVICE)
    exact = make_decoder(model, max_length=48, dtype=torch.float32, device=DEVICE)
    rounded = make_decoder(model, max_length=48, dtype=torch.bfloat16, device=DEVICE)
    ids, positions = right_padded(LENGTHS)

    def logits(decoder, *, fused: bool) -> torch.Tensor:
        decoder.fused_pass = FusedPass(decoder.spec, decoder.weights, decoder.rotations) if fused else None
        attend = CausalAttention(decoder.spec, *ids.shape, dtype=decoder.dtype)
        return decoder.logits(decoder.hidden(ids.flatten(), positions.flatten(), attend))

    truth = logits(exact, fused=False)
    error, plain_error = ((logits(rounded, fused=fused) - truth).abs().mean() for fused in (True, False))
    assert 0 < error < 1.5 * plain_error


def test_a_quarter_turn_of_queries_and_keys_by_hand():
    from tba.engine.kernels.layer import rotate_and_store

    # One query head (1, 2), one key head (3, 4), one value head (5, 6); position 1 turns by 90 degrees: (x, y) -> (-y, x).
    qkv = torch.tensor([[1.0, 2, 3, 4, 5, 6]], device=DEVICE)
    rotations = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], device=DEVICE)
    keys, values = torch.zeros(2, 1, 1, 2, device=DEVICE)
    query = rotate_and_store(qkv, torch.tensor([1], device=DEVICE), rotations, keys, values, num_heads=1)
    assert query.flatten().tolist() == [-2.0, 1.0]
    assert keys.flatten().tolist() == [-4.0, 3.0]
    assert values.flatten().tolist() == [5.0, 6.0]


@pytest.mark.usefixtures("program")
def test_heads_that_are_no_power_of_two_and_partly_rotated():
    from tba.engine.kernels.layer import rotate_and_store

    # Three query and two key/value heads of 12, of which 8 rotate; positions lie in every other place of a table.
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(4, 7, 12, generator=generator).to(DEVICE)
    table = torch.polar(torch.ones(9, 4), 7 * torch.rand(9, 4, generator=generator)).to(DEVICE)
    positions = torch.tensor([[3, 0], [0, 0], [8, 0], [5, 0]], device=DEVICE)[:, 0]
    keys, values = torch.zeros(2, 4, 2, 12, device=DEVICE)
    query = rotate_and_store(
        heads.flatten(1), positions, torch.view_as_real(table).contiguous(), keys, values, num_heads=3
    )
    rotated = rotate(heads[:, :5].contiguous(), table[positions][:, None])
    assert_equal(query, rotated[:, :3])
    assert_equal(keys, rotated[:, 3:])
    assert_equal(values, heads[:, 5:])


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_families_that_compute_otherwise_keep_the_plain_pass(family):
    decoder = make_decoder(make_tiny_model(family).to(DEVICE), max_length=16, dtype=torch.float32, device=DEVICE)
    assert why_not_fused(decoder.spec) is not None
    assert decoder.fused_pass is None


def test_the_fused_pass_is_chosen_on_cuda_only():
    decoder = make_decoder(make_tiny_model("llama").to(DEVICE), max_length=16, dtype=torch.float32, device=DEVICE)
    chosen = make_fused_pass(decoder.spec, decoder.weights, decoder.rotations)
    assert (chosen is not None) == (decoder.fused_pass is not None) == (DEVICE.type == "cuda")
