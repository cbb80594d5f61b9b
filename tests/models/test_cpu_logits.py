"""Log-probs of chosen tokens on a CPU, against the plain formula in fp64."""

import pytest
import torch

from tba.models import log_probs
from tba.models.log_probs import chosen_log_probs

ROWS, WORDS, WIDTH = 23, 37, 8


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    head = torch.randn(WORDS, WIDTH, generator=generator, dtype=torch.float64)
    bias = torch.randn(WORDS, generator=generator, dtype=torch.float64)
    return {name: x.to(dtype).requires_grad_() for name, x in {"hidden": hidden, "head": head, "bias": bias}.items()}


def targets() -> torch.Tensor:
    return torch.arange(ROWS) * 5 % WORDS


def weights() -> torch.Tensor:
    """Some of them 0, as those of tokens that do not count."""
    return torch.where(torch.arange(ROWS) < 9, 0.0, torch.arange(ROWS) - 15.0).double()


def plain(hidden, head, bias, *, temperature, softcap):
    logits = hidden @ head.t() + (0.0 if bias is None else bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_probs = torch.log_softmax(logits / temperature, -1)
    return log_probs[torch.arange(ROWS), targets()], -(log_probs.exp() * log_probs).sum(-1)


CASES = [(1.0, None, False), (0.7, None, True), (1.3, 2.0, False), (0.5, 3.0, True)]
SIZES = {
    "one part": (2**23, 2**18, 2**26),
    "parts": (4 * WORDS, 2 * WORDS, 2**26),
    "computed twice": (4 * WORDS, 99, 0),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("temperature", "softcap", "biased"), CASES)
def test_log_probs_entropies_and_gradients_are_those_of_the_plain_formula(
    monkeypatch, size, temperature, softcap, biased
):
    for name, value in zip(("LOGITS_AT_ONCE", "LOGITS_IN_CACHE", "KEPT_LOGITS"), SIZES[size]):
        monkeypatch.setattr(log_probs, name, value)
    given, wanted = inputs(), inputs()
    options = {"temperature": temperature, "softcap": softcap}
    bias, plain_bias = (given["bias"], wanted["bias"]) if biased else (None, None)
    log_pi, entropy = chosen_log_probs(given["hidden"], given["head"], targets(), bias_V=bias, **options)
    want_pi, want_entropy = plain(wanted["hidden"], wanted["head"], plain_bias, **options)
    torch.testing.assert_close(log_pi, want_pi, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, want_entropy, rtol=0, atol=1e-12)
    assert not entropy.requires_grad
    (log_pi * weights()).sum().backward()
    (want_pi * weights()).sum().backward()
    for name in ("hidden", "head", "bias")[: 3 if biased else 2]:
        torch.testing.assert_close(given[name].grad, wanted[name].grad, rtol=0, atol=1e-11)


def test_fp32_is_as_exact_for_a_sure_token_as_for_an_unlikely_one():
    # Logits from -60 to 60: the likeliest token has log-prob -1e-9 or so, others -100.
    hidden, head = 12.0 * inputs()["hidden"].detach(), inputs()["head"].detach()
    leaf = hidden.float().requires_grad_()
    log_pi, entropy = chosen_log_probs(leaf, head.float(), targets(), temperature=1.0)
    exact = hidden.clone().requires_grad_()
    want_pi, want_entropy = plain(exact, head, None, temperature=1.0, softcap=None)
    assert (log_pi - want_pi).abs().max() < 5e-5  # of numbers as large as 100: fp32 has seven digits
    assert (entropy - want_entropy).abs().max() < 1e-5
    log_pi.sum().backward()
    want_pi.sum().backward()
    assert (leaf.grad - exact.grad).abs().max() < 1e-4 * exact.grad.abs().max()


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_what_needs_no_gradient_gets_none(frozen):
    given, wanted = inputs(), inputs()
    given[frozen].requires_grad_(False)
    chosen_log_probs(given["hidden"], given["head"], targets(), temperature=1.0)[0].sum().backward()
    plain(wanted["hidden"], wanted["head"], None, temperature=1.0, softcap=None)[0].sum().backward()
    other = "head" if frozen == "hidden" else "hidden"
    assert given[frozen].grad is None
    torch.testing.assert_close(given[other].grad, wanted[other].grad, rtol=0, atol=1e-11)


def test_no_rows_have_no_log_probs_and_a_gradient_of_zero():
    given = inputs()
    log_pi, _ = chosen_log_probs(given["hidden"][:0], given["head"], targets()[:0], temperature=1.0)
    log_pi.sum().backward()
    assert len(log_pi) == 0
    assert not given["head"].grad.any()


def test_tokens_without_weight_give_a_gradient_of_zero():
    given = inputs()
    log_pi, _ = chosen_log_probs(given["hidden"], given["head"], targets(), temperature=1.0)
    (log_pi * 0.0).sum().backward()
    assert not given["hidden"].grad.any()
    assert not given["head"].grad.any()
