"""Matrix products of a decode step against torch, on a GPU, or slowly on a CPU with TRITON_INTERPRET=1."""

import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_kernels import engines, responses
from tiny_models import make_tiny_model

from tba.types import Sampling

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for CUDA.")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
if not INTERPRETED and torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("these products are for Hopper and later", allow_module_level=True)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

from tba.engine.kernels import layer as matmul  # noqa: E402
from tba.engine.kernels.layer import Tile, add_norm, choose_tile, embed, gated_linear, linear, linear_parts  # noqa: E402

TILE = Tile(rows=64, columns=32, depth=64, parts=1, warps=4, stages=3)
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter has no products in bf16
TOLERANCE = 1e-4 if INTERPRETED else 0.02


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    gap = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    assert float(gap) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 64, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_with_its_bias_is_that_of_torch(rows: int, biased: bool):
    x, weight, bias = random(rows, 200, seed=0), random(104, 200, seed=1), random(104, seed=2) if biased else None
    wanted = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert_close(linear(x, weight, bias, TILE), wanted)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_gated_product_activates_the_gate_and_multiplies_by_up(gelu: bool, biased: bool):
    x, weight = random(70, 128, seed=0), random(2 * 72, 128, seed=1)  # 72 columns: a tile reaches from gate into up
    bias = random(2 * 72, seed=2) if biased else None
    inner = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    gate, up = inner[:, :72], inner[:, 72:]
    wanted = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    assert_close(gated_linear(x, weight, bias, TILE, gelu=gelu), wanted)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_the_parts_of_a_product_add_up_to_it(parts: int):
    x, weight = random(70, 320, seed=0), random(96, 320, seed=1)  # five steps of 64: of three parts the last is shorter
    found = linear_parts(x, weight, TILE._replace(parts=parts))
    assert found.shape == (parts, 70, 96)
    assert_close(found.sum(0), x.double() @ weight.double().t())


def test_a_norm_adds_up_parts_and_bias():
    x, parts, bias = random(5, 48, seed=0).float(), random(3, 5, 48, seed=1).float(), random(48, seed=2)
    weight = random(48, seed=3).float()
    whole = x.double() + 0.5 * (parts.double().sum(0) + bias.double())
    wanted = whole / (whole.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()
    found = add_norm(x, parts, weight, 1e-6, DTYPE, bias_E=bias, delta_scale=0.5)
    assert_close(found, wanted)
    assert_close(x, whole)  # the residual stream is kept


def test_tokens_are_embedded_in_fp32_after_rounding_to_the_matrix():
    table, ids = random(11, 24, seed=0), torch.tensor([[3, 0], [10, 0], [0, 0]], device=DEVICE)[:, 0]
    found = embed(ids, table, 2.5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, (table[ids] * torch.tensor(2.5, dtype=DTYPE)).float(), rtol=0, atol=0)


@pytest.mark.skipif(INTERPRETED, reason="the tiles are for bf16 on a GPU")
@pytest.mark.parametrize("rows", [1, 40, 100, 256])
@pytest.mark.parametrize("kind", ["plain", "gated", "parts"])
def test_tiles_that_are_chosen_compute_the_product(kind: str, rows: int):
    x, weight = random(rows, 896, seed=0), random(320, 896, seed=1)  # long sums: parts at any number of rows
    tile = choose_tile(kind, x, weight)
    assert tile is not None
    wanted = x.double() @ weight.double().t()
    if kind == "gated":
        assert_close(gated_linear(x, weight, None, tile, gelu=False), F.silu(wanted[:, :160]) * wanted[:, 160:])
    elif kind == "plain":
        assert_close(linear(x, weight, None, tile), wanted)
    else:
        assert_close(linear_parts(x, weight, tile).sum(0), wanted)


@pytest.mark.skipif(not INTERPRETED, reason="in fp32, where tokens must be the same, cuBLAS serves on a GPU")
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma"])
def test_an_engine_generates_the_same_with_these_products(family: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(matmul, "choose_tile", lambda kind, x, weight: TILE._replace(parts=2 if kind == "parts" else 1))
    fused, plain = engines(make_tiny_model(family))
    sampling = Sampling(max_new_tokens=3, greedy=True)
    found, wanted = responses(fused, sampling), responses(plain, sampling)
    for key in wanted:
        assert np.array_equal(found[key].token_ids, wanted[key].token_ids)
        np.testing.assert_allclose(found[key].policy_log_probs, wanted[key].policy_log_probs, atol=1e-4)
