"""The kernels that choose tokens against `sample`, the specification; on a GPU, or on a CPU with TRITON_INTERPRET=1.

TRITON_INTERPRET=1 python -m pytest tests/engine/test_sampling_kernels.py        (needs `pip install triton`)
"""

import os

import pytest
import torch

from tba.engine.native.slots import FLOATS, INTEGERS, SlotState
from tba.engine.sampling import SamplingNeeds, sample

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for CUDA.")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ALL = SamplingNeeds(*[True] * len(SamplingNeeds._fields))
STOPS = [2, 5]


def make_slots(rows, **columns):
    """Slots in the middle of responses of 8 tokens; `columns` are values for all of them, or one each."""
    state = SlotState(rows, DEVICE)
    state.reserve(8)
    defaults = {
        "num_tokens": 3,
        "limits": 8,
        "keys": torch.arange(rows) * 7919,
        "done": 0,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    for name, value in {**defaults, **columns}.items():
        assert name in (*INTEGERS, *FLOATS)
        state.column(name, rows).copy_(torch.as_tensor(value).expand(rows))
    return state


def chosen_by_kernels(logits, state, cap=None):
    from tba.engine.kernels.choose_tokens import choose_tokens

    is_stop = torch.zeros(logits.shape[1], dtype=torch.bool, device=DEVICE)
    is_stop[STOPS] = True
    place = state.column("num_tokens", len(logits)).clone()
    choose_tokens(logits.contiguous(), state.columns(len(logits)), is_stop, cap=cap)
    rows = torch.arange(len(logits), device=DEVICE)
    return tuple(table[rows, place] for table in (state.tokens, state.behaviour, state.policy))


def assert_as_sampled(logits, cap=None, **columns):
    logits = logits.to(DEVICE)
    plain = logits.float() if cap is None else torch.tanh(logits.float() / cap) * cap
    stop_ids = torch.tensor(STOPS, device=DEVICE)
    want = sample(plain, make_slots(len(logits), **columns).sampling(len(logits)), stop_ids, ALL)
    tokens, behaviour, policy = chosen_by_kernels(logits, make_slots(len(logits), **columns), cap)
    assert torch.equal(tokens, want.tokens)
    torch.testing.assert_close(behaviour, want.behaviour, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(policy, want.policy, atol=1e-4, rtol=1e-4)


def random_logits(rows, size, dtype=torch.float32, spread=2.0):
    return (spread * torch.randn(rows, size, generator=torch.Generator().manual_seed(size))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [37, 4500])
def test_every_mixture_of_settings_in_one_batch(dtype, size):
    """bf16 has many equal logits: of those at the cut the lower ids stay."""
    assert_as_sampled(
        random_logits(8, size, dtype),
        top_k=torch.tensor([0, 5, 1, 0, 12, 10_000, 3, 0]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.5, 0.8, 0.9, 1e-6, 0.99]),
        min_new_tokens=torch.tensor([0, 0, 0, 8, 8, 0, 8, 2]),
        temperature=torch.tensor([1.0, 0.7, 1.0, 1.5, 0.4, 1.0, 1.0, 2.0]),
        policy_temperature=torch.tensor([1.0, 1.0, 0.9, 1.5, 1.0, 1.0, 1.0, 1.0]),
    )


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.55}, {"top_k": 6, "top_p": 0.45}])
def test_of_equal_logits_the_lower_ids_are_kept(settings):
    logits = torch.tensor([0.0, -0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, -3.0]).expand(6, -1)
    assert_as_sampled(logits, **settings)
    assert_as_sampled(-logits, **settings)
    assert_as_sampled(torch.zeros(6, 10), **settings)


def test_a_forbidden_token_far_above_the_others_does_not_swallow_them():
    logits = random_logits(5, 40)
    logits[:, STOPS[0]] = 400.0
    assert_as_sampled(logits, min_new_tokens=8, temperature=0.5, top_p=torch.tensor([1.0, 0.9, 0.5, 1.0, 1.0]))


def test_greedy_takes_the_best_of_what_is_allowed():
    logits = random_logits(4, 40)
    logits[:, STOPS[1]] = 50.0
    assert_as_sampled(logits, greedy=1, min_new_tokens=torch.tensor([8, 8, 0, 3]), top_k=torch.tensor([0, 2, 2, 0]))


def test_soft_capped_logits_are_cut_after_the_cap():
    assert_as_sampled(random_logits(4, 60, spread=9.0), cap=5.0, top_k=torch.tensor([0, 7, 0, 7]), top_p=0.7)


def test_slots_that_are_done_stand_still():
    state = make_slots(2, done=torch.tensor([1, 0]), top_p=0.5)
    before = state.integers.clone()
    chosen_by_kernels(random_logits(2, 40).to(DEVICE), state)
    assert torch.equal(state.integers[0], before[0])
    assert state.integers[1, INTEGERS.index("num_tokens")] == 4


@pytest.mark.parametrize("settings", [{"greedy": 1}, {}, {"top_p": 0.9, "top_k": 4}])
@pytest.mark.parametrize("broken", ["one", "all", "infinite"])
def test_logits_that_are_no_numbers_give_a_token_of_the_vocabulary_with_nan_and_end_the_response(settings, broken):
    logits = random_logits(2, 40).to(DEVICE)
    logits[:, slice(None) if broken == "all" else 7] = float("inf") if broken == "infinite" else float("nan")
    state = make_slots(2, **settings)
    tokens, _, policy = chosen_by_kernels(logits, state)
    assert ((tokens >= 0) & (tokens < 40)).all()
    assert policy.isnan().all()
    assert (state.column("done", 2) == 1).all()
