"""What one family measures: engine, scorer, trainer and LoRA against transformers' own `generate` and forward pass.

Gaps are in nats per token, the largest of all tokens in fp32. In bf16 they are medians, divided by that of transformers' own
forward pass in bf16: both against fp32, so that 1 is as good as transformers, and 2 is the bound. Medians, because a token
that rounding sends to another expert is off by much, in transformers' pass as in ours, and not always the same token is.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from model_bench.configs import CONFIGS, CONTEXT, VOCABULARY
from tba.config import ConfigError, GenerateConfig, LoraConfig
from tba.generate.engine import Engine, LoraEngine, make_engine, make_scorer
from tba.generate.native.engine import NativeEngine
from tba.models.load import add_lora
from tba.models.packing import pack
from tba.models.policy import PolicyModel
from tba.models.text_part import freeze_beside_text, switch_length
from tba.models.weights import make_weights
from tba.types import Completion, Prompt, Request, Sampling

STOPS = [2, 3, 4]
PROMPT_LENGTHS = (3, 9, 1, 14)
LARGEST_GAP = 1e-4
"""Largest gap in fp32 that is rounding, in nats or as a share of the gradient."""
LARGEST_RATIO = 2.0
"""Largest gap in bf16, in gaps of transformers' own."""
SMALLEST_OWN_GAP = 1e-3
"""Least gap of transformers' own pass that a ratio is taken of: some tiny models hardly round."""


@dataclass
class Row:
    """Everything measured of one family; -1 = not measured."""

    family: str
    engine: str = ""
    training: str = ""
    why: str = ""
    """Why it is not native, and why it is not packed, in the words of the warnings."""
    no_lora: str = ""
    """Why it takes no adapter on all linear layers."""
    greedy: float = -1.0
    """Share of responses whose greedy tokens are those of `generate`."""
    gaps: dict[str, float] = field(default_factory=dict)
    """Gaps in fp32: generated, loaded, scored, trained, gradient, lora, lora gradient."""
    ratios: dict[str, float] = field(default_factory=dict)
    """Gaps in bf16 as multiples of transformers' own: generated, trained, and gradient where there are no experts."""
    flips: tuple[int, int] = (0, 0)
    """Tokens that transformers' own pass sends to other experts in bf16 than in fp32, and all that go to experts."""
    refused: str = ""
    crashed: str = ""

    @property
    def is_exact(self) -> bool:
        within = all(gap <= LARGEST_GAP for gap in self.gaps.values())
        return within and self.greedy == 1.0 and all(ratio <= LARGEST_RATIO for ratio in self.ratios.values())

    @property
    def notes(self) -> str:
        routed = f"bf16 routes {self.flips[0]} of {self.flips[1]} tokens otherwise" if self.flips[1] else ""
        return "; ".join(note for note in (self.why, self.no_lora and f"no LoRA: {self.no_lora}", routed) if note)

    @property
    def verdict(self) -> str:
        if self.crashed or self.refused:
            return f"crashed: {self.crashed}" if self.crashed else f"refused: {self.refused}"
        return f"{self.engine}, exact" if self.is_exact else f"{self.engine}, NOT exact"


def measure(family: str) -> Row:
    """One family; what goes wrong is written down, not raised."""
    row = Row(family=family)
    try:
        with _warnings() as heard, tempfile.TemporaryDirectory() as folder:
            model = make_model(family)
            model.save_pretrained(folder)
            measure_fp32(row, model)
            row.why = "; ".join(dict.fromkeys(_reason(warning) for warning in heard))
            measure_lora(row, model)
            half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
            freeze_beside_text(half)
            measure_bf16(row, model, half)
    except (ConfigError, ValueError) as error:  # how the package says no
        row.refused = str(error).splitlines()[0]
    except Exception as error:
        row.crashed = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return row


def _reason(warning: str) -> str:
    """The reason in a warning: of the fallback what follows the colon, of slow training what is in brackets."""
    if "model type" in warning:
        return "the native engine has no description of it"
    if "packed attention" in warning:
        return f"not packed: {warning.partition('(')[2].rpartition(')')[0]}"
    return warning.partition(": ")[2].partition(". ")[0]


def make_model(family: str, *, seed: int = 0, spread: float = 4.0) -> PreTrainedModel:
    """A random model whose tokens matter to each other."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias") or ".ln_" in name or "sinks" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.ndim >= 2 and "conv" not in name:
                parameter.mul_(spread)
    freeze_beside_text(model)
    return model


# --- what is measured --------------------------------------------------------------------------------------------------


def measure_fp32(row: Row, model: PreTrainedModel) -> None:
    engine = _engine(model)
    row.engine = "native" if isinstance(engine, NativeEngine) else "fallback"
    found = list(_generate(engine, greedy=True))
    same = [found_one.token_ids.tolist() == _greedy(model, _prompt_of(found_one)) for found_one in found]
    row.greedy = sum(same) / len(same)
    sampled = list(_generate(engine))
    row.gaps["generated"] = _engine_gap(model, sampled)
    prompts, responses = [_prompt_of(one) for one in sampled], [one.token_ids for one in sampled]
    scores = make_scorer(model, max_length=CONTEXT).score(prompts, responses, 1.0)
    row.gaps["scored"] = max(_gap(got, _plain(model, p, r)) for got, p, r in zip(scores, prompts, responses))
    other = make_model(row.family, seed=1)
    engine.load(make_weights(other, version=1))
    row.gaps["loaded"] = _engine_gap(other, list(_generate(engine)))
    want, gradient = _plain_training(model)
    policy = PolicyModel(copy.deepcopy(model))
    row.training = "packed" if policy.packed else "one by one"
    got, own_gradient = _training(policy)
    row.gaps["trained"] = float((got - want).abs().max())
    row.gaps["gradient"] = float((own_gradient - gradient).norm() / gradient.norm())


def measure_lora(row: Row, model: PreTrainedModel) -> None:
    adapted = copy.deepcopy(model)
    try:
        add_lora(adapted, LoraConfig(rank=4), base="tiny", seed=0)
    except ConfigError as error:
        row.no_lora = str(error).splitlines()[0]
        return
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    engine = LoraEngine(_engine(model), adapted)
    engine.load(make_weights(adapted, version=1))
    row.gaps["lora"] = _engine_gap(adapted, list(_generate(engine)))
    want, gradient = _plain_training(adapted)
    got, own_gradient = _training(PolicyModel(adapted))
    row.gaps["lora"] = max(row.gaps["lora"], float((got - want).abs().max()))
    row.gaps["lora gradient"] = float((own_gradient - gradient).norm() / gradient.norm())


def measure_bf16(row: Row, model: PreTrainedModel, half: PreTrainedModel) -> None:
    sampled = list(_generate(_engine(half)))
    wide = np.concatenate([_as_it_grew(model, _prompt_of(one), one.token_ids) for one in sampled])
    own = np.concatenate([_as_it_grew(half, _prompt_of(one), one.token_ids) for one in sampled])
    got = np.concatenate([one.policy_log_probs for one in sampled])
    row.ratios["generated"] = _ratio(np.median(np.abs(got - wide)), np.median(np.abs(own - wide)))
    routes, own_routes = _routes(model), _routes(half)
    row.flips = sum(int((a != b).any(-1).sum()) for a, b in zip(routes, own_routes)), sum(map(len, routes))
    want, gradient = _plain_training(model)
    own_want, own_gradient = _plain_training(half)
    got_half, got_gradient = _training(PolicyModel(half))
    row.ratios["trained"] = _ratio((got_half - want).abs().median(), (own_want - want).abs().median())
    if not routes:  # one token that goes to another expert moves the whole gradient
        row.ratios["gradient"] = _ratio((got_gradient - gradient).norm(), (own_gradient - gradient).norm())


def _ratio(gap: Any, own: Any) -> float:
    return float(gap) / max(float(own), SMALLEST_OWN_GAP)


# --- ours --------------------------------------------------------------------------------------------------------------


def _engine(model: PreTrainedModel) -> Engine:
    return make_engine(model, STOPS, GenerateConfig(slots=3), seed=0, max_length=CONTEXT)


def _prompts() -> list[Prompt]:
    rng = np.random.default_rng(0)
    ids = [rng.integers(6, VOCABULARY - 1, size=length).astype(np.int32) for length in PROMPT_LENGTHS]
    return [Prompt(id=str(index), token_ids=found, text="") for index, found in enumerate(ids)]


def _prompt_of(completion: Completion) -> np.ndarray:
    return _prompts()[int(completion.prompt_id)].token_ids


def _generate(engine: Engine, *, greedy: bool = False) -> Iterator[Completion]:
    sampling = Sampling(max_new_tokens=20, greedy=greedy) if greedy else Sampling(max_new_tokens=20, min_new_tokens=12)
    requests = [Request(prompt=prompt) for prompt in _prompts()]
    return engine.generate(requests, samples_per_prompt=1 if greedy else 2, sampling=sampling)


def _sequences() -> tuple[list[Tensor], list[list[Tensor]]]:
    rng = np.random.default_rng(1)
    prompts = [torch.from_numpy(prompt.token_ids).long() for prompt in _prompts()]
    tokens: Callable[[int], Tensor] = lambda n: torch.from_numpy(rng.integers(5, VOCABULARY - 1, size=n))  # noqa: E731
    return prompts, [[tokens(n) for n in own] for own in ((20, 6), (12,), (9, 30), (4, 25))]


def _training(policy: PolicyModel) -> tuple[Tensor, Tensor]:
    prompts, responses = _sequences()
    packed = pack(prompts, responses, share_prompts=policy.packed, device=torch.device("cpu"))
    return _with_gradient(policy.model, policy.forward(packed, temperature=1.0).log_pi_N)


# --- transformers' own -------------------------------------------------------------------------------------------------


@torch.no_grad()
def _greedy(model: PreTrainedModel, prompt: np.ndarray) -> list[int]:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=STOPS,
        pad_token_id=0,
    )
    return output[0, ids.shape[1] :].tolist()


@torch.no_grad()
def _plain(model: PreTrainedModel, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """Log-probs of a response by one pass over all of it."""
    return _plain_log_probs(model, torch.from_numpy(prompt).long(), torch.from_numpy(response).long()).double().numpy()


def _as_it_grew(model: PreTrainedModel, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """The same, but where angles change with the length by a pass for each token, over what was there when it was chosen:
    one pass over all of it would say what the model thinks of the first tokens after it has read the last."""
    if switch_length(model.config) is None:
        return _plain(model, prompt, response)
    lengths = range(len(response))
    parts = [_plain(model, np.concatenate([prompt, response[:n]]), response[n : n + 1]) for n in lengths]
    return np.concatenate(parts)


def _plain_log_probs(model: PreTrainedModel, prompt: Tensor, response: Tensor) -> Tensor:
    row = torch.cat([prompt, response[:-1]])
    logits = model(input_ids=row[None], use_cache=False).logits[0, len(prompt) - 1 :].float()
    return torch.log_softmax(logits, dim=-1).gather(1, response[:, None])[:, 0]


def _plain_training(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    parts = [_plain_log_probs(model, p, r) for p, own in zip(*_sequences()) for r in own]
    return _with_gradient(model, torch.cat(parts))


@torch.no_grad()
def _routes(model: PreTrainedModel) -> list[Tensor]:
    """The experts of each token [tokens, experts per token], sorted, of all passes over the sequences and all layers; none
    where the model has no experts, or keeps its choice to itself."""
    found: list[Tensor] = []
    count = getattr(model.config.get_text_config(), "num_experts_per_tok", None)

    def note(module: nn.Module, arguments: Any, output: Any) -> None:
        for part in output if isinstance(output, tuple) else (output,):
            if isinstance(part, Tensor) and part.dtype == torch.int64 and part.shape[-1] == count:
                found.append(part.flatten(0, -2).sort(dim=-1).values)

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    for prompt, responses in zip(*_sequences()):
        for response in responses:
            _plain_log_probs(model, prompt, response)
    for hook in hooks:
        hook.remove()
    return found


def _with_gradient(model: PreTrainedModel, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs, and the gradient of a fixed mixture of them over all that trains."""
    model.zero_grad()
    (log_probs * torch.linspace(-1.0, 1.0, len(log_probs))).sum().backward()
    found = [
        (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).float().flatten()
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    model.zero_grad()
    return log_probs.detach(), torch.cat(found)


def _engine_gap(model: PreTrainedModel, completions: list[Completion]) -> float:
    return max(_gap(one.policy_log_probs, _as_it_grew(model, _prompt_of(one), one.token_ids)) for one in completions)


def _gap(left: np.ndarray, right: np.ndarray) -> float:
    return float(np.abs(left - right).max())


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """The warnings of the package while the context lasts."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tba")
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield heard
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
