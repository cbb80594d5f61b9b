"""Which engine and which scorer a model gets, and how they take LoRA adapters."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tba.config import ConfigError, GenerateConfig
from tba.engine.contract import Engine, Scorer, Update
from tba.engine.decoder.spec import UnsupportedModel
from tba.engine.native.engine import NativeEngine
from tba.engine.scoring import PolicyScorer, ReferenceScorer
from tba.engine.transformers_engine import TransformersEngine
from tba.models.load import ADAPTER, has_lora, merged
from tba.types import Weights

logger = logging.getLogger("tba.engine")

DEFAULT_SLOTS = 128
SCORED_TOKENS = {"cpu": 2048, "cuda": 32_768}
"""Most tokens in one reference pass, by device."""


def stop_ids_of(model: nn.Module, tokenizer: Any = None) -> list[int]:
    """All ids that end a response: those of the generation config, of the model config and the tokenizer's EOS."""
    config: Any = model.config
    text = config.get_text_config()  # the part of a config that also describes how images are read
    sources = (getattr(model, "generation_config", None), config, text, tokenizer)
    found: set[int] = set()
    for ids in (getattr(source, "eos_token_id", None) for source in sources):
        if ids is not None:
            found.update(ids if isinstance(ids, (list, tuple)) else [ids])
    if words := [index for index in found if not isinstance(index, int)]:
        raise ValueError(
            f"the model's eos_token_id has {words[0]!r}: write the number of a token, or a list of numbers, into its "
            "generation_config.json (or config.json)."
        )
    # A config may name an id beyond the vocabulary. Engines use stop ids as indices into logits.
    found = {index for index in found if 0 <= index < text.vocab_size}
    if not found:
        raise ValueError(
            "the model has no EOS: neither its generation config, nor its config, nor its tokenizer names a token below the "
            f"vocabulary size {text.vocab_size} that ends a response. Set eos_token_id in its generation_config.json."
        )
    return sorted(found)


def make_engine(
    model: nn.Module,
    tokenizer_or_stop_ids: Any,
    config: GenerateConfig,
    *,
    seed: int,
    max_length: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    version: int = 0,
    update: Update = "in_flight",
    explores: bool = False,
) -> Engine:
    """The engine of generate.engine; a model the native one does not know runs through transformers, with a warning.

    `max_length` is the longest prompt + response; dtype and device are the model's unless given. `update` says when
    new weights are taken: between two decode steps, where running responses keep their old keys and values, or after all of
    them have finished. `explores` says that some requests are sampled otherwise than the config has it. The
    transformers engine decodes with a copy of the model, where the model is.
    """
    given = isinstance(tokenizer_or_stop_ids, (list, tuple, set, frozenset))
    stop_ids = sorted(tokenizer_or_stop_ids) if given else stop_ids_of(model, tokenizer_or_stop_ids)
    like = next(model.parameters())
    options: dict[str, Any] = {
        "stop_ids": stop_ids,
        "seed": seed,
        "slots": config.slots or DEFAULT_SLOTS,
        "max_length": max_length,
        "update": update,
        "dtype": dtype or like.dtype,
        "device": device or like.device,
        "version": version,
    }
    if config.engine == "vllm":
        # A second copy of the weights, only where vLLM's own log-probs are not those that are asked for.
        is_plain = config.temperature == config.top_p == 1.0 and config.top_k == config.min_new_tokens == 0
        scorer = None if is_plain and not explores else make_scorer(model, max_length=max_length)
        try:  # here alone: vLLM takes seconds to import, and is an extra
            from tba.engine.vllm_engine import make_vllm_engine
        except ImportError as error:
            raise ConfigError(
                f"generate.engine=vllm needs vLLM, which cannot be imported here ({error}): pip install 'tba-rl[vllm]'."
            ) from error
        return make_vllm_engine(model, scorer=scorer, **options)
    if config.engine == "native":
        try:
            return NativeEngine(model, **options)
        except UnsupportedModel as reason:
            logger.warning("generate.engine=native cannot run this model: %s. Falling back to transformers.", reason)
    # A copy: `load` writes into it, and `model` stays as it is for the scorer and the trainer.
    own = {name: value for name, value in options.items() if name not in ("dtype", "device")}
    return TransformersEngine(copy.deepcopy(model), **own)


def make_scorer(model: PreTrainedModel, *, max_length: int, token_budget: int | None = None) -> Scorer:
    """A scorer with a frozen copy of the model, on its device and in its dtype.

    It uses the native decoder, or the model's own forward pass, with a warning, where that does not know the model. A model
    with a LoRA adapter scores with its own base, without a copy.
    """
    parameter = next(model.parameters())
    budget = token_budget or SCORED_TOKENS[parameter.device.type]
    if has_lora(model):
        return PolicyScorer(model, token_budget=budget, max_length=max_length)
    try:
        return ReferenceScorer(
            model, max_length=max_length, token_budget=budget, dtype=parameter.dtype, device=parameter.device
        )
    except UnsupportedModel as reason:
        logger.warning(
            "the native decoder cannot score with this model: %s. Using its own forward pass, slower.", reason
        )
    # The reference must not follow the policy that trains in `model`.
    frozen = copy.deepcopy(model).requires_grad_(False)
    return PolicyScorer(frozen, token_budget=budget, max_length=max_length)


def with_adapters(engine: Engine, model: PreTrainedModel) -> Engine:
    """The same engine, which takes LoRA adapters from now on.

    `model` is the base with an adapter in it, at the latest when the first adapter is loaded: its weights, shapes and scale
    are what an arriving adapter goes with. In fp32 each adapter is merged into the weights, so that decoding costs no more
    than without LoRA. In half precision, where merging loses small changes, an engine keeps the adapter beside them.
    """

    def prepare_first(weights: Weights) -> Weights:
        # Decided at the first load and not before: until then the model may have no adapter.
        prepare: Callable[[Weights], Weights] = partial(merged, model)
        if isinstance(engine, NativeEngine) and engine.decoder.dtype != torch.float32:
            try:
                # From here on published bundles hold the adapter alone: the base stays as the decoder was made with it.
                engine.keep_adapter_apart(model)
            except UnsupportedModel as reason:
                logger.warning("LoRA is merged in %s, which loses small changes: %s.", engine.decoder.dtype, reason)
            else:
                prepare = lambda given: given  # noqa: E731
        if isinstance(engine, TransformersEngine) and model.dtype != torch.float32:
            # The engine's copy gets the same adapter modules: names of base and adapter tensors fit it from then on.
            engine.model.add_adapter(model.peft_config[ADAPTER], ADAPTER)
            base = {name: parameter.detach() for name, parameter in model.named_parameters()}
            prepare = lambda given: Weights(version=given.version, tensors={**base, **given.tensors})  # noqa: E731
        engine.prepare = prepare
        return prepare(weights)

    engine.prepare = prepare_first
    return engine
