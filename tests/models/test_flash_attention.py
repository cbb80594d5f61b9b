"""FlashAttention over packed sequences: its kernels on a GPU; the rest on a CPU too, with kernels written out."""

import math

import pytest
import torch
from builders import VOCABULARY, tiny_llama
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import MistralConfig, MistralForCausalLM

from tba.models import flash_attention as flash
from tba.models.flash_attention import FlashPlan, can_use_flash, flash_attention
from tba.models.packed_attention import PackedLayout, attend_packed
from tba.models.packing import pack
from tba.models.policy import PolicyModel

pytestmark = pytest.mark.slow

H, K, D = 4, 2, 8
CPU = torch.device("cpu")


def test_branches_see_the_keys_of_their_root_and_their_own():
    plan = FlashPlan.make(root_lengths=[3, 2], branch_lengths=[2, 1, 1], branch_roots=[0, 0, 1], device=CPU)
    sizes, at = plan.read()
    assert at.queries.tolist() == [0, 3, 5, 7, 8, 9]
    assert at.keys.tolist() == [0, 3, 5, 10, 14, 17]
    assert at.gathered.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 1, 2, 7, 3, 4, 8]
    copies = [at.copies[begin:end].tolist() for begin, end in zip(at.first[:-1], at.first[1:])]
    assert copies == [[0, 5, 10], [1, 6, 11], [2, 7, 12], [3, 14], [4, 15], [8], [9], [13], [16]]
    assert sizes == flash.Sizes(gathered=17, root_tokens=5, longest_query=3, longest_key=5)


def test_where_prompts_are_long_branches_of_a_root_are_one_sequence_of_queries(monkeypatch):
    monkeypatch.setattr(flash, "MOST_GATHERED", 1)
    plan = FlashPlan.make(root_lengths=[3, 2], branch_lengths=[4, 1, 5], branch_roots=[0, 0, 1], device=CPU)
    sizes, at = plan.read()
    assert at.queries.tolist() == [0, 3, 5]
    assert at.keys.tolist() == [0, 4, 5, 10]
    assert at.queries_of_root.tolist() == [0, 5, 10]
    assert sizes == flash.Sizes(gathered=-1, root_tokens=5, longest_root=3, longest_branch=5, most_queries=5)


def test_without_branches_nothing_is_gathered():
    sizes, at = FlashPlan.make(root_lengths=[3], branch_lengths=[], branch_roots=[], device=CPU).read()
    assert at.queries.tolist() == at.keys.tolist() == [0, 3]
    assert sizes == flash.Sizes(gathered=0, root_tokens=3, longest_query=3, longest_key=3)


def test_it_is_for_half_precision_on_cuda():
    assert not can_use_flash(torch.zeros(1, 1, 64), torch.zeros(1, 1, 64), softcap=None)


def test_in_parts_a_window_must_hold_the_longest_sequence_with_its_root(monkeypatch):
    lengths = {"root_lengths": [3, 5], "branch_lengths": [4, 1], "branch_roots": [0, 0]}
    assert PackedLayout(**lengths, device=CPU).fits_flash(2)
    monkeypatch.setattr(flash, "MOST_GATHERED", 1)
    layout = PackedLayout(**lengths, device=CPU)
    assert layout.fits_flash(None)
    assert layout.fits_flash(9)
    assert not layout.fits_flash(8)


def sequences(ends_q: Tensor, ends_k: Tensor):
    for index in range(len(ends_q) - 1):
        yield slice(int(ends_q[index]), int(ends_q[index + 1])), slice(int(ends_k[index]), int(ends_k[index + 1]))


def scores_of(q: Tensor, k: Tensor, *, causal: bool, scale: float, window: int | None) -> Tensor:
    """[H, queries, keys] of one sequence."""
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)) * scale
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(
        k.shape[0] - q.shape[0]
    )  # the last query sees the last key
    if window is not None:
        seen &= torch.ones_like(seen).triu(k.shape[0] - q.shape[0] - window + 1)
    return scores.masked_fill(~seen, -math.inf) if causal else scores


def slow_forward(q, k, v, ends_q, ends_k, most_q, most_k, *, causal, scale, window=None):
    """What aten::_flash_attention_forward computes, sequence by sequence."""
    out, sums = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])
    for queries, keys in sequences(ends_q, ends_k):
        assert queries.stop - queries.start <= most_q
        assert keys.stop - keys.start <= most_k
        scores = scores_of(q[queries], k[keys], causal=causal, scale=scale, window=window)
        wide = v[keys].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide)
        sums[:, queries] = scores.logsumexp(-1)
    return out, sums


def slow_backward(d_out, q, k, v, out, sums, ends_q, ends_k, most_q, most_k, *, causal, scale, window=None):
    """What aten::_flash_attention_backward computes: probabilities from the log-sums it is given."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    group = q.shape[1] // k.shape[1]
    for queries, keys in sequences(ends_q, ends_k):
        p = torch.exp(
            scores_of(q[queries], k[keys], causal=causal, scale=scale, window=window) - sums[:, queries, None]
        )
        wide_k, wide_v = (part[keys].repeat_interleave(group, dim=1) for part in (k, v))
        d_p = torch.einsum("qhd,khd->hqk", d_out[queries], wide_v)
        d_scores = p * (d_p - (d_out[queries] * out[queries]).sum(-1).t()[:, :, None]) * scale
        dq[queries] = torch.einsum("hqk,khd->qhd", d_scores, wide_k)
        for target, wide in (
            (dk, torch.einsum("hqk,qhd->khd", d_scores, q[queries])),
            (dv, torch.einsum("hqk,qhd->khd", p, d_out[queries])),
        ):
            target[keys] = wide.unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


@pytest.fixture
def kernels_written_out(monkeypatch):
    monkeypatch.setattr(flash, "_forward", slow_forward)
    monkeypatch.setattr(flash, "_backward", slow_backward)


SHARED = {"root_lengths": [5, 3], "branch_lengths": [4, 6, 2], "branch_roots": [0, 0, 1]}
WHOLE = {"root_lengths": [9, 4, 7]}


@pytest.fixture(params=[flash.MOST_GATHERED, 1], ids=["gathered", "in parts"])
def both_ways(request, monkeypatch):
    monkeypatch.setattr(flash, "MOST_GATHERED", request.param)


@pytest.mark.usefixtures("kernels_written_out", "both_ways")
@pytest.mark.parametrize("lengths", [SHARED, WHOLE], ids=["shared", "whole"])
def test_parts_make_up_the_whole_attention_and_its_gradients(lengths):
    """Against the gathered blocks with a mask, by autograd, in fp64."""
    layout = PackedLayout(**lengths, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(20, heads, D, dtype=torch.float64, generator=generator) for heads in (H, K, K)]
    out_gradient = torch.randn(20, H, D, dtype=torch.float64, generator=generator)
    results = []
    for attend in (
        lambda *leaves: flash_attention(*leaves, layout.flash_plan, 0.3),
        lambda *leaves: attend_packed(*leaves, layout, scaling=0.3, window=None, softcap=None),
    ):
        leaves = [part.clone().requires_grad_() for part in states]
        out = attend(*leaves)
        out.backward(out_gradient)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*results):
        assert (got - want).abs().max() < 1e-12


@pytest.mark.usefixtures("kernels_written_out")
@pytest.mark.parametrize("window", [1, 4, 8])
@pytest.mark.parametrize("lengths", [SHARED, WHOLE], ids=["shared", "whole"])
def test_a_window_cuts_across_a_root_and_its_branches(lengths, window, monkeypatch):
    """Against the gathered blocks with a mask, in fp64."""
    layout = PackedLayout(**lengths, device=CPU)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(20, heads, D, dtype=torch.float64, generator=generator) for heads in (H, K, K)]
    out_gradient = torch.randn(20, H, D, dtype=torch.float64, generator=generator)
    results = []
    for by_flash in (True, False):
        monkeypatch.setattr("tba.models.packed_attention.can_use_flash", lambda *_, found=by_flash, **__: found)
        leaves = [part.clone().requires_grad_() for part in states]
        out = attend_packed(*leaves, layout, scaling=0.3, window=window, softcap=None)
        out.backward(out_gradient)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*results):
        assert (got - want).abs().max() < 1e-12


@pytest.mark.usefixtures("kernels_written_out", "both_ways")
@pytest.mark.parametrize("lengths", [SHARED, WHOLE], ids=["shared", "whole"])
def test_values_may_be_smaller_than_keys(lengths, monkeypatch):
    """DeepSeek's heads: FlashAttention, which has one head size, against the gathered blocks."""
    layout = PackedLayout(**lengths, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(20, H, size, dtype=torch.float64, generator=generator) for size in (24, 24, 16)]
    out_gradient = torch.randn(20, H, 16, dtype=torch.float64, generator=generator)
    results = []
    for by_flash in (True, False):
        monkeypatch.setattr("tba.models.packed_attention.can_use_flash", lambda *_, found=by_flash, **__: found)
        leaves = [part.clone().requires_grad_() for part in states]
        out = attend_packed(*leaves, layout, scaling=0.3, window=None, softcap=None)
        out.backward(out_gradient)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*results):
        assert (got - want).abs().max() < 1e-12


def tiny_mistral():
    """Its window is longer than some sequences here."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=8,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


@pytest.fixture
def traced_once():
    """Otherwise every layer is traced twice: with numbers such as the norm's epsilon unknown, and then as they are."""
    with torch._dynamo.config.patch(specialize_float=True):
        yield


@pytest.mark.usefixtures("kernels_written_out", "traced_once")
@pytest.mark.parametrize(
    ("make", "most_gathered"),
    [(lambda: tiny_llama(num_hidden_layers=1), flash.MOST_GATHERED), (tiny_mistral, flash.MOST_GATHERED),
     (lambda: tiny_llama(num_hidden_layers=1), 1)],
    ids=["llama", "window", "llama in parts"],
)  # fmt: skip
def test_a_compiled_layer_is_one_graph_for_all_lengths(make, most_gathered, monkeypatch):
    """fullgraph refuses to stop in the middle of a layer; nothing is compiled after the first pass."""
    monkeypatch.setattr("tba.models.packed_attention.can_use_flash", lambda *_, **__: True)
    monkeypatch.setattr(flash, "MOST_GATHERED", most_gathered)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    policies = [PolicyModel(make()), PolicyModel(make())]
    for layer in policies[1].model.base_model.layers:
        layer.compile(dynamic=True, fullgraph=True, backend=counter)
    compiled = set()
    for index, lengths in enumerate([(2, 5), (7, 3, 4), (9, 1, 2, 6)]):
        found = [log_probs_and_gradient(policy, lengths, seed=index) for policy in policies]
        for got, want in zip(found[1], found[0]):
            assert (got - want).abs().max() < 1e-5 * max(1.0, float(want.abs().max()))
        compiled.add(counter.frame_count)
    assert len(compiled) == 1
    assert compiled != {0}
    torch._dynamo.reset()


def log_probs_and_gradient(policy: PolicyModel, lengths: tuple[int, ...], seed: int):
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, VOCABULARY, (3 + seed,), generator=generator) for _ in range(2)]
    responses = [[torch.randint(3, VOCABULARY, (n,), generator=generator) for n in lengths] for _ in prompts]
    packed = pack(prompts, responses, device=torch.device("cpu"))
    log_pi = policy.forward(packed, temperature=1.0).log_pi_N
    policy.model.zero_grad()
    log_pi.square().sum().backward()
    return log_pi.detach(), torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])


@pytest.mark.cuda
@pytest.mark.usefixtures("both_ways")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("lengths", [SHARED, WHOLE], ids=["shared", "whole"])
def test_values_and_gradients_are_those_of_plain_attention(lengths, window):
    device = torch.device("cuda")
    layout = PackedLayout(**lengths, device=device)
    generator = torch.Generator(device).manual_seed(0)
    states = [torch.randn(20, heads, 64, device=device, generator=generator).bfloat16() for heads in (4, 2, 2)]
    out_gradient = torch.randn(20, 4, 64, device=device, generator=generator)
    results = []
    for dtype in (torch.bfloat16, torch.float32):  # fp32 goes through gathered blocks
        leaves = [part.to(dtype).clone().requires_grad_() for part in states]
        out = attend_packed(*leaves, layout, scaling=0.125, window=window, softcap=None)
        out.backward(out_gradient.to(out.dtype))
        results.append([out.detach().float(), *(leaf.grad.float() for leaf in leaves)])
    for got, want in zip(*results):
        assert (got - want).abs().max() < 0.03 * want.abs().max()


@pytest.mark.cuda
@pytest.mark.usefixtures("both_ways")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("sinks", [False, True])
def test_smaller_values_and_sinks_on_cuda(sinks):
    """DeepSeek's head sizes through FlashAttention, GPT-OSS's sinks through gathered blocks."""
    device = torch.device("cuda")
    layout = PackedLayout(**SHARED, device=device)
    generator = torch.Generator(device).manual_seed(0)
    states = [torch.randn(20, 4, size, device=device, generator=generator).bfloat16() for size in (192, 192, 128)]
    sinks_H = torch.randn(4, device=device, generator=generator).bfloat16() if sinks else None
    out_gradient = torch.randn(20, 4, 128, device=device, generator=generator)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [part.to(dtype).clone().requires_grad_() for part in states]
        own = None if sinks_H is None else sinks_H.to(dtype).clone().requires_grad_()
        out = attend_packed(*leaves, layout, scaling=0.07, window=None, softcap=None, sinks_H=own)
        out.backward(out_gradient.to(out.dtype))
        found = leaves if own is None else [*leaves, own]
        results.append([out.detach().float(), *(leaf.grad.float() for leaf in found)])
    for got, want in zip(*results):
        assert (got - want).abs().max() < 0.03 * want.abs().max()


@pytest.mark.cuda
@pytest.mark.usefixtures("both_ways")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_responses_of_one_token_and_prompts_without_a_response():
    """As a collapsed policy writes them: the operator took at most one query for exactly one."""
    device = torch.device("cuda")
    layout = PackedLayout(root_lengths=[5, 3, 4], branch_lengths=[1, 1], branch_roots=[0, 2], device=device)
    generator = torch.Generator(device).manual_seed(0)
    states = [torch.randn(14, heads, 64, device=device, generator=generator).bfloat16() for heads in (4, 2, 2)]
    got = attend_packed(*states, layout, scaling=0.125, window=None, softcap=None)
    want = attend_packed(*(part.float() for part in states), layout, scaling=0.125, window=None, softcap=None)
    assert (got.float() - want).abs().max() < 0.03 * want.abs().max()


@pytest.mark.usefixtures("kernels_written_out", "both_ways")
@pytest.mark.parametrize("lengths", [SHARED, WHOLE], ids=["shared", "whole"])
def test_the_operators_say_what_they_return(lengths):
    """torch.library.opcheck: schema, shapes and strides of the stand-ins, and gradients while compiling."""
    check_operators(PackedLayout(**lengths, device=torch.device("cpu")), torch.float32)


@pytest.mark.cuda
@pytest.mark.usefixtures("both_ways")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("lengths", [SHARED, WHOLE], ids=["shared", "whole"])
def test_the_operators_say_what_they_return_on_cuda(lengths):
    check_operators(PackedLayout(**lengths, device=torch.device("cuda")), torch.bfloat16)


def check_operators(layout: PackedLayout, dtype: torch.dtype) -> None:
    plan, device = layout.flash_plan, layout.device
    q, k, v = (torch.randn(20, heads, 64, device=device, dtype=dtype) for heads in (H, K, K))
    of_plan = (plan.places, plan.sizes, 0.125, 0)
    out, sums = flash._packed_flash(q, k, v, *of_plan)
    kinds = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        flash._packed_flash_backward, (torch.randn_like(out), q, k, v, out, sums, *of_plan), test_utils=kinds
    )
    leaves = (part.requires_grad_() for part in (q, k, v))
    torch.library.opcheck(flash._packed_flash, (*leaves, *of_plan), test_utils=(*kinds, "test_aot_dispatch_dynamic"))
