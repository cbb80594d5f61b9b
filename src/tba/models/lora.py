"""LoRA through PEFT: a small adapter is trained and travels; the base model stays as it was loaded.

The reference is the base with the adapter off, so no second model is kept for it. Searchers merge an adapter into their
engine's weights when it arrives: decoding costs no more than without.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.config import ConfigError, LoraConfig
from tba.models.packing import pack
from tba.models.policy import PolicyModel
from tba.types import Weights

NAME = "default"
"""Of the adapter, as PEFT calls it."""


def add_lora(model: PreTrainedModel, config: LoraConfig, *, base: str, seed: int) -> None:
    """Put a fresh adapter into the model, in place: from here on only the adapter trains. It changes nothing at first."""
    peft = _peft()
    torch.manual_seed(seed)
    model.add_adapter(
        peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha if config.alpha is not None else 2 * config.rank,
            target_modules=config.targets if isinstance(config.targets, str) else list(config.targets),
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        ),
        NAME,
    )
    model.peft_config[NAME].base_model_name_or_path = base


def has_lora(model: nn.Module) -> bool:
    return bool(getattr(model, "peft_config", None))


def merged(model: PreTrainedModel, weights: Weights) -> Weights:
    """A published adapter as weights of the whole model, under the names it had without an adapter."""
    tensors = {
        name.replace(".base_layer.", "."): _with_delta(model, name, parameter.detach(), weights.tensors)
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }
    return Weights(version=weights.version, tensors=tensors)


@torch.no_grad()
def _with_delta(model: PreTrainedModel, name: str, base: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
    """base + scale x B A. The model's own adapter is left alone: it may be the one that trains."""
    if not name.endswith(".base_layer.weight"):
        return base
    layer = name.removesuffix(".base_layer.weight")
    module: Any = model.get_submodule(layer)
    a, b = (adapter[f"{layer}.lora_{part}.{NAME}.weight"].to(base.device).float() for part in "AB")
    delta = module.scaling[NAME] * (b @ a)
    return (base.float() + (delta.t() if module.fan_in_fan_out else delta)).to(base.dtype)


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


class BaseScorer:
    """Log-probs under the base model: the reference of a LoRA run. Prompts are shared as in training."""

    def __init__(self, model: PreTrainedModel, *, token_budget: int) -> None:
        self.policy = PolicyModel(model)
        self.token_budget = token_budget

    def load(self, weights: Weights) -> None:
        raise RuntimeError("the reference of a LoRA run is its base model: reference.reset_every must be 0.")

    @torch.no_grad()
    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        """float32 log-probs of each response's tokens after its prompt."""
        scores: list[np.ndarray] = [np.zeros(0, np.float32)] * len(response_ids)
        with adapter_off(self.policy.model):
            for part in self._parts(prompt_ids, response_ids):
                found = self._score([prompt_ids[i] for i in part], [response_ids[i] for i in part], temperature)
                for index, own in zip(part, found):
                    scores[index] = own
        return scores

    def _parts(self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> Iterator[list[int]]:
        part: list[int] = []
        tokens = 0
        for index in sorted(range(len(prompts)), key=lambda i: prompts[i].tobytes()):
            cost = len(prompts[index]) + len(responses[index])
            if part and tokens + cost > self.token_budget:
                yield part
                part, tokens = [], 0
            if len(responses[index]):
                part.append(index)
                tokens += cost
        if part:
            yield part

    def _score(
        self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        groups: dict[bytes, list[Tensor]] = {}
        own: dict[bytes, Tensor] = {}
        for prompt, response in zip(prompts, responses):
            own.setdefault(prompt.tobytes(), torch.from_numpy(prompt.astype(np.int64)))
            groups.setdefault(prompt.tobytes(), []).append(torch.from_numpy(response.astype(np.int64)))
        packed = pack(
            list(own.values()), list(groups.values()), share_prompts=self.policy.packed, device=self.policy.device
        )
        log_probs = self.policy.forward(packed, temperature=temperature).log_pi_N.float().cpu().numpy()
        return np.split(log_probs, np.cumsum([len(response) for response in responses])[:-1])


def is_adapter(path: Path) -> bool:
    return (path / "adapter_config.json").is_file()


def base_of(path: Path) -> str:
    """The model that an adapter folder was trained on."""
    base = json.loads((path / "adapter_config.json").read_text()).get("base_model_name_or_path")
    if not base:
        raise ConfigError(f"{path}/adapter_config.json does not name its base model (base_model_name_or_path).")
    return str(base)


def with_adapter(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """The base model with a saved adapter merged into its weights: a plain model."""
    return _peft().PeftModel.from_pretrained(model, str(path)).merge_and_unload()


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError("model.lora needs PEFT: pip install 'tba-rl[lora]'.") from None
    return peft
