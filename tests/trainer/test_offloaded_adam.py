"""AdamW with its moments on the host: the same numbers as torch's own, whatever chunks they travel in."""

from copy import deepcopy

import pytest
import torch

from tba.config import TrainConfig
from tba.trainer.optimizer import MasterAdamW, OffloadedAdamW

SHAPES = [(7, 5), (3,), (64,), (1,), (0, 4), (20, 4)]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDS_GPU])]
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def parameters(device: str) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(device)) for shape in SHAPES]


def with_gradients(own: list[torch.nn.Parameter], step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for index, parameter in enumerate(own):
        gradient = torch.randn(parameter.shape, generator=draw).to(parameter)
        parameter.grad = None if index == 1 and step == 0 else gradient  # one joins a step later


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [16, 50, 10_000])
def test_it_moves_as_torchs_adamw_does(device, chunk):
    plain, own = parameters(device), parameters(device)
    theirs = torch.optim.AdamW(plain, fused=True, **SETTINGS)
    ours = OffloadedAdamW(own, chunk=chunk, **SETTINGS)
    for step in range(6):
        with_gradients(plain, step)
        with_gradients(own, step)
        theirs.step()
        ours.step()
        for a, b in zip(plain, own):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    ours.synchronize()
    for a, b in zip(plain, own):
        assert ours.state[b]["exp_avg"].device.type == "cpu"
        for name in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(theirs.state[a][name].cpu(), ours.state[b][name].cpu(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_goes_from_one_kind_to_the_other(device):
    def make(offload: bool) -> MasterAdamW:
        own = [torch.nn.Parameter(parameter.detach().bfloat16()) for parameter in parameters(device)]
        return MasterAdamW(own, TrainConfig(offload_optimizer=offload))

    def step(optimizer: MasterAdamW, number: int) -> None:
        with_gradients(optimizer.parameters, number)
        optimizer.accumulate()
        optimizer.clip_gradients()
        optimizer.step(1e-2)

    first = make(offload=True)
    for number in (1, 2):
        step(first, number)
    second, third = make(offload=False), make(offload=True)
    step(third, 9)  # what it had before is gone
    for optimizer in (second, third):
        optimizer.load_state(deepcopy(first.state()))
        step(optimizer, 3)
    step(first, 3)
    for other in (second, third):
        for a, b in zip(first.masters, other.masters):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_an_update_made_twice_as_long_is_one_of_twice_the_rate(device, dtype, offload, weight_decay):
    """Of the policy: a head has a rate of its own. What comes after is the same too."""

    def make() -> tuple[MasterAdamW, torch.nn.Parameter]:
        own = [torch.nn.Parameter(parameter.detach().to(dtype)) for parameter in parameters(device)]
        head = torch.nn.Parameter(torch.ones(3, device=device))
        config = TrainConfig(offload_optimizer=offload, weight_decay=weight_decay)
        return MasterAdamW(own, config, heads=[head], heads_rate=0.5), head

    def step(optimizer: MasterAdamW, number: int, rate: float) -> None:
        with_gradients(optimizer.parameters, number)
        optimizer.accumulate()
        optimizer.clip_gradients()
        optimizer.step(rate)

    (stretched, head), (plain, other_head) = make(), make()
    for number in range(3):
        step(stretched, number, 1e-3)
        step(plain, number, 1e-3)
    step(stretched, 3, 1e-3)
    stretched.stretch(0.5)
    stretched.stretch(4.0)
    step(plain, 3, 2e-3)
    for number in (4, 5):
        for one, other in zip(stretched.masters, plain.masters, strict=True):
            # Weight decay is of the weights before the update, and by those after it here: rate^2 x .1 of them.
            torch.testing.assert_close(one, other, rtol=0, atol=2e-6)
        for parameter, master in zip(stretched.parameters, stretched.masters):
            assert torch.equal(parameter, master.to(parameter.dtype))
        step(stretched, number, 1e-3)
        step(plain, number, 1e-3)
    assert torch.equal(head, other_head)
    step(stretched, 6, 1e-3)
    stretched.stretch(3.0)
    assert [group["lr"] for group in stretched.adam.param_groups] == pytest.approx([3e-3, 0.5])


def test_a_weight_without_a_gradient_is_not_stretched():
    own = parameters("cpu")
    optimizer = MasterAdamW(own, TrainConfig())
    with_gradients(own, 0)  # the second has none
    before = own[1].detach().clone()
    optimizer.step(1e-2)
    optimizer.stretch(5.0)
    assert torch.equal(own[1], before)


def test_forgotten_moments_begin_anew():
    own = parameters("cpu")
    optimizer = MasterAdamW(own, TrainConfig(offload_optimizer=True))
    with_gradients(own, 1)
    optimizer.step(1e-2)
    optimizer.forget([own[0]])
    assert own[0] not in optimizer.adam.state
    assert float(optimizer.adam.state[own[2]]["step"]) == 1.0


def test_parameters_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match=r"train.offload_optimizer=true needs contiguous parameters.*\(5, 7\)"):
        OffloadedAdamW([torch.nn.Parameter(torch.randn(7, 5).t())], **SETTINGS)
