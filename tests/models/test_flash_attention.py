"""FlashAttention over packed sequences: its plan anywhere, its values and gradients on a GPU."""

import pytest
import torch

from tba.models.flash_attention import FlashPlan, can_use_flash, flash_attention
from tba.models.packed_attention import PackedLayout, _attend


def test_branches_of_a_root_are_one_sequence_of_queries():
    plan = FlashPlan.make(
        root_lengths=[3, 2], branch_lengths=[4, 1, 5], branch_roots=[0, 0, 1], device=torch.device("cpu")
    )
    assert plan.roots.tolist() == [0, 3, 5]
    assert plan.branches.tolist() == [0, 4, 5, 10]
    assert plan.queries_of_root.tolist() == [0, 5, 10]
    assert (plan.num_root_tokens, plan.longest_root, plan.longest_branch, plan.most_queries) == (5, 3, 5, 5)


def test_without_branches_there_is_one_part():
    plan = FlashPlan.make(root_lengths=[3], branch_lengths=[], branch_roots=[], device=torch.device("cpu"))
    assert plan.branches is None
    assert plan.queries_of_root is None


def test_it_is_for_half_precision_on_cuda_without_windows():
    assert not can_use_flash(torch.zeros(1, 1, 64), window=None, longest=8, softcap=None)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_values_and_gradients_are_those_of_plain_attention():
    device = torch.device("cuda")
    layout = PackedLayout(root_lengths=[5, 3], branch_lengths=[4, 6, 2], branch_roots=[0, 0, 1], device=device)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(20, heads, 64, device=device, generator=generator) for heads in (4, 2, 2))
    out_gradient = torch.randn(20, 4, 64, device=device, generator=generator)
    results = []
    for flash in (True, False):
        leaves = [
            t.bfloat16().clone().requires_grad_() if flash else t.bfloat16().float().requires_grad_() for t in (q, k, v)
        ]
        if flash:
            out = flash_attention(*leaves, layout.flash_plan, 0.125)
        else:
            blocks = [_attend(*leaves, layout.root_index_RL, layout.root_index_RL, None, 0.125, None)]
            mask = layout.branch_mask(None)
            blocks.append(_attend(*leaves, layout.branch_index_BM, layout.branch_key_index, mask, 0.125, None))
            out = torch.cat(blocks).index_select(0, layout.unpack_T)
        out.backward(out_gradient.to(out.dtype))
        results.append([out.detach().float(), *(leaf.grad.float() for leaf in leaves)])
    for got, want in zip(*results):
        assert (got - want).abs().max() < 0.03 * want.abs().max()
