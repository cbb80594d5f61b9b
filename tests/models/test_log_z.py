"""The learned log Z: one step moves it by the same number of nats at every width of the model."""

import pytest
import torch

from tba.config import TrainConfig
from tba.models.policy import LogZ
from tba.trainer.optimizer import MasterAdamW

RATE = 0.5


def optimizer_of(log_z: LogZ) -> MasterAdamW:
    return MasterAdamW([torch.nn.Parameter(torch.zeros(1))], TrainConfig(), heads=log_z.parameters(), heads_rate=RATE)


def descend(log_z: LogZ, optimizer: MasterAdamW, hidden_TH: torch.Tensor, *, towards: float) -> None:
    """One step on the squared error of the prompt that is all of `hidden_TH`."""
    (log_z(hidden_TH, ((0, len(hidden_TH)),)) - towards).square().sum().backward()
    optimizer.clip_gradients()
    optimizer.step(1e-4)


@pytest.mark.parametrize("size", [0.01, 0.7, 30.0])
@pytest.mark.parametrize("width", [64, 768, 4096])
def test_the_first_step_moves_log_z_by_the_learning_rate_in_nats_at_every_width(width, size):
    log_z, hidden = LogZ(width), torch.randn(3, width, generator=torch.Generator().manual_seed(1)) * size
    log_z.start_at(40.0)
    descend(log_z, optimizer_of(log_z), hidden, towards=50.0)
    # Adam's first step moves the bias by the rate, and each weight by the rate in the direction of its hidden number: by
    # rate x mean |h| / root mean square of h in all, which is sqrt(2 / pi) = .798 for Gaussian numbers.
    mean = hidden.mean(dim=0)
    want = 40.0 + RATE * (1.0 + float(mean.abs().mean() / mean.square().mean().sqrt()))
    assert log_z(hidden, ((0, 3),)).item() == pytest.approx(want, abs=1e-3)
    assert want == pytest.approx(40.0 + RATE * 1.8, abs=0.1 * RATE)


def test_a_prompt_of_one_sign_moves_log_z_by_twice_the_rate_and_no_prompt_by_more():
    log_z, hidden = LogZ(256), torch.full((2, 256), -3.0)
    log_z.start_at(0.0)
    descend(log_z, optimizer_of(log_z), hidden, towards=-100.0)
    assert log_z(hidden, ((0, 2),)).item() == pytest.approx(-2.0 * RATE, rel=1e-4)


def test_prompts_are_told_apart():
    log_z, hidden = LogZ(64), torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    log_z.start_at(5.0)
    optimizer, spans, want = optimizer_of(log_z), ((0, 1), (1, 1)), torch.tensor([3.0, 9.0])
    for _ in range(300):
        (log_z(hidden, spans) - want).square().sum().backward()
        optimizer.step(1e-4)
    assert log_z(hidden, spans).tolist() == pytest.approx([3.0, 9.0], abs=0.2)


def test_a_start_forgets_what_was_learned():
    log_z, hidden = LogZ(64), torch.randn(1, 64, generator=torch.Generator().manual_seed(3))
    log_z.start_at(40.0)
    descend(log_z, optimizer_of(log_z), hidden, towards=0.0)
    log_z.start_at(-7.0)
    assert log_z(hidden, ((0, 1),)).item() == -7.0


def test_a_parameter_that_is_forgotten_steps_as_if_it_were_the_first_time():
    kept, reset = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = MasterAdamW([kept], TrainConfig(max_grad_norm=None), heads=[reset], heads_rate=1.0)
    for forget in (False, True):
        kept.grad, reset.grad = torch.tensor([4.0]), torch.tensor([4.0])
        if forget:
            optimizer.forget([reset])
            kept.grad, reset.grad = torch.tensor([-4.0]), torch.tensor([-4.0])
        optimizer.step(1.0)
    # First steps: -1 and then, anew, +1. With its moments the other one has m = .9 x .4 - .4 = -.04, corrected / .19, and
    # v = 16 corrected: it moves by .2105 / 4 = +.0526.
    assert reset.item() == pytest.approx(0.0, abs=1e-6)
    assert kept.item() == pytest.approx(-1.0 + 0.04 / 0.19 / 4.0, abs=1e-5)
