"""The check whether a model computes packed sequences like single ones. The trainer packs only models that pass it.

Packing is exact for a model whose tokens meet in attention only, and whose attention is the one of packed_attention.py.
Models with a recurrent or convolutional layer, with an attention of their own, or with a window that they keep to themselves
are not, and nothing in a config says so. So each model is tried once, when it is loaded:

- every layer must call packed attention, with arguments that are known there;
- log-probs must be those of plain passes over each sequence alone, of sequences longer than every window and every switch
  of rotary angles that the run can reach.

The trial is in fp32, because rounding to bf16 hides what leaks, and over the first layers alone, as many as it takes to have
one of each kind: what layers of one kind do, they do alike. So it costs little on a large model too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tba.models.load import first_line
from tba.models.packed_attention import NAME, packed_attention, use_packed_attention
from tba.models.packing import PackedTokens, pack
from tba.models.text_part import switch_length, trunk_of

FEWEST_LAYERS = 2
"""Least number of layers tried: what leaks in the first shows in what the second makes of it."""
SHORT_TOKENS = 24
"""Length of the longest sequence tried where no window asks for more."""
SCORED_TOKENS = 8
"""Number of tokens of the longest response tried; a longer sequence has a longer prompt, whose logits are not needed."""
LARGEST_SHARE = 4e-5
"""Largest difference of log-probs that is rounding in fp32, as a share of the largest one (at least 1 nat)."""
WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size")
"""Names that configs have for the number of tokens that a token may look back."""
COUNTS = ("idx", "index", "layer_id", "layer_number")
"""Endings of names under which a module keeps its place among the layers, by which those of one kind differ."""

Outputs = Callable[[PackedTokens, float], tuple[Tensor, Tensor, Tensor | None]]
"""Function that computes a packed row: log-probs and entropy of its responses, and hidden states."""


class PlainPassFailed(ValueError):
    """The model's own forward pass does not run here, packed or not."""


@torch.no_grad()
def switch_to_packed(model: PreTrainedModel, outputs: Outputs, *, max_length: int | None) -> str | None:
    """Give the model packed attention if `outputs`, which computes with it, then gives what plain passes give; if not, leave
    the model as it was and say why. `max_length` is the longest sequence of the run in tokens, None = unknown."""
    before = model.config._attn_implementation
    problem = _find_problem(model, outputs, max_length)
    if problem is None:
        use_packed_attention(model)
    else:
        model.set_attn_implementation(before)
    return problem


def _find_problem(model: PreTrainedModel, outputs: Outputs, max_length: int | None) -> str | None:
    lengths = _lengths(model.config, max_length)
    layers = _layer_list(model)
    count = None if layers is None else _layers_of_every_kind(layers[2])
    try:
        with _abridged(layers, count):
            in_own_dtype = _Trial.make(model, lengths[0])
    except Exception:  # some models count their layers elsewhere too
        count = None
        in_own_dtype = _trial_of_the_whole(model, lengths[0])
    # The packed trial: plain passes in fp32, then the same sequences through `outputs`.
    with _abridged(layers, count) as num_layers:
        try:
            with _in_fp32(model) as is_changed:
                # All plain passes come before the model's attention is another: they say what is right.
                trials = [in_own_dtype] if not is_changed else [_Trial.make(model, lengths[0])]
                trials += [_Trial.make(model, length) for length in lengths[1:]]
                called = _use_counted_attention(model)
                problem = next((found for trial in trials if (found := trial.problem(outputs, LARGEST_SHARE))), None)
            # Right log-probs of few tokens are not enough: a layer that never calls attention mixes tokens its own way.
            if problem is None and num_layers not in (None, len(called)):
                problem = f"{len(called)} of {num_layers} layers are attention that can be packed"
            if problem is None and is_changed:
                # Rounding is large in half precision: this shows only that the kernels of that dtype run.
                problem = in_own_dtype.problem(outputs, 0.25)
            return problem
        except Exception as error:  # a model's code fails in its own ways when it is given what it was not written for
            return first_line(error).rstrip(".")


def own_logits(model: PreTrainedModel, rows_BT: Tensor, keep: int) -> Tensor:
    """The model's own logits of the last `keep` columns of sequences [B, keep, V], whatever it does to them."""
    options = {"logits_to_keep": keep} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    return model(input_ids=rows_BT, use_cache=False, **options).logits[:, -keep:]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Trial:
    """A few sequences, and their log-probs by plain passes."""

    prompts: Sequence[Tensor]
    responses: Sequence[Sequence[Tensor]]
    log_probs_M: Tensor

    @classmethod
    def make(cls, model: PreTrainedModel, length: int) -> _Trial:
        """Two prompts, the first with a response that makes up `length` tokens, and where they are few with another."""
        device, vocabulary = next(model.parameters()).device, int(model.config.get_text_config().vocab_size)
        scored = min(SCORED_TOKENS, length - 1)
        sizes = (length - scored + 1, scored, min(3, scored), 2, min(4, scored))
        # Fixed tokens that rarely repeat, so that what leaks from a neighbour changes the log-probs.
        tokens = torch.arange(1, sum(sizes) + 1, device=device) * 7919 % vocabulary
        first, longest, short, second, other = tokens.split(sizes)
        prompts, responses = (first, second), ((longest, short) if length <= SHORT_TOKENS else (longest,), (other,))
        packed = pack(prompts, responses, device=device)
        logits_MV = torch.cat([own_logits(model, row[None], size)[0].float() for row, size in packed.rows()])
        log_probs_MV = torch.log_softmax(logits_MV, dim=-1)
        return cls(
            prompts=prompts,
            responses=responses,
            log_probs_M=log_probs_MV.gather(1, packed.targets_M[:, None])[:, 0],
        )

    def problem(self, outputs: Outputs, share: float) -> str | None:
        """How far the packed log-probs are off, if that is more than a share of the largest log-prob."""
        tolerance = share * max(1.0, float(self.log_probs_M.abs().max()))
        packed = pack(self.prompts, self.responses, device=self.log_probs_M.device)
        gap = float((outputs(packed, 1.0)[0].float() - self.log_probs_M).abs().max())
        # NaN is a problem too.
        return None if gap <= tolerance else f"log-probs differ by {gap:.2g} from a plain forward pass"


def _trial_of_the_whole(model: PreTrainedModel, length: int) -> _Trial:
    try:
        return _Trial.make(model, length)
    except Exception as error:
        dtype = str(model.dtype).removeprefix("torch.")
        raise PlainPassFailed(
            f"{type(model).__name__} cannot be trained: its own forward pass fails in {dtype} on {model.device.type} "
            f"({type(error).__name__}: {first_line(error).rstrip('.')}). Try model.dtype=float32, or another model."
        ) from error


def _lengths(config: Any, max_length: int | None) -> list[int]:
    """Lengths to try: a short one, and one that is an eighth longer than the longest window or switch that the run can
    reach, so that what lies beyond it has weight."""
    text = config.get_text_config()
    limits = [getattr(text, name, None) for name in WINDOWS] + [switch_length(config)]
    # A window as long as the longest sequence never cuts anything off, and need not be tried.
    reached = [limit for limit in limits if isinstance(limit, int) and limit < (max_length or limit + 1)]
    longest = max(reached, default=0)
    beyond = min(longest + max(longest // 8, 8), max_length or 2 * longest + 8)
    short = min(SHORT_TOKENS, max_length or SHORT_TOKENS)
    return [short] if beyond <= short else [short, beyond]


# --- fewer layers, in fp32 ---------------------------------------------------------------------------------------------


def _layer_list(model: PreTrainedModel) -> tuple[nn.Module, str, nn.ModuleList] | None:
    """The list of layers, with the module that has it and the name it has there."""
    trunk = trunk_of(model)
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for module in trunk.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name, child
    return None


def _layers_of_every_kind(layers: nn.ModuleList) -> int:
    """Number of first layers among which every kind of layer is."""
    kinds = [_kind(layer) for layer in layers]
    return min(len(kinds), max(FEWEST_LAYERS, *(kinds.index(kind) + 1 for kind in kinds)))


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Kind of a layer: its modules' classes and settings (`is_sliding`), without its place in the list."""
    return tuple(
        (name, type(module), *_settings(module)) for name, module in layer.named_modules() if ".lora_" not in name
    )


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if isinstance(value, bool | int | str | None) and not name.endswith(COUNTS):
            yield name, value


@contextmanager
def _abridged(layers: tuple[nn.Module, str, nn.ModuleList] | None, count: int | None) -> Iterator[int | None]:
    """The model with its first `count` layers only, None = all, while the context lasts; gives their number, if known."""
    if layers is None:
        yield None
        return
    parent, name, whole = layers
    # The layers are not copied: the model has a shorter list of the same modules meanwhile.
    few = whole if count is None else nn.ModuleList(list(whole)[:count])
    setattr(parent, name, few)
    try:
        yield len(few)
    finally:
        setattr(parent, name, whole)


@contextmanager
def _in_fp32(model: PreTrainedModel) -> Iterator[bool]:
    """The model in fp32 while the context lasts; gives whether it was in another dtype. Its own numbers are put aside and
    come back as they were."""
    kept = [
        (tensor, tensor.data)
        for tensor in chain(model.parameters(), model.buffers())
        if tensor.is_floating_point() and tensor.dtype != torch.float32
    ]
    # Some containers turn TF32 on, which rounds to ten bits.
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    for tensor, own in kept:
        # Through .data, so that the parameters stay the same objects, tied ones too.
        tensor.data = own.float()
    try:
        yield bool(kept)
    finally:
        torch.set_float32_matmul_precision(precision)
        for tensor, own in kept:
            tensor.data = own


def _use_counted_attention(model: PreTrainedModel) -> set[int]:
    """Switch to packed attention that notes which modules call it."""
    called: set[int] = set()

    def attention(module: nn.Module, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        called.add(id(module))
        return packed_attention(module, *arguments, **options)

    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)
    return called
