"""The check whether a model computes packed sequences like single ones. The trainer packs only models that pass it.

Packing is exact for a model whose tokens meet in attention only, and whose attention is the one of packed_attention.py.
Nothing in a config says so (recurrent or convolutional layers, an own attention or window), so each model is tried once:

- every layer must call packed attention, with arguments that are known there;
- log-probs must be those of plain passes over each sequence alone, of sequences longer than every window and every switch
  of rotary angles that the run can reach.

The trial is in fp32, because rounding to bf16 hides what leaks, and over the first layers alone, as many as it takes to have
one of each kind: it costs little on a large model too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tba.models.load import first_line
from tba.models.packed_attention import NAME, packed_attention
from tba.models.packing import PackedTokens, pack
from tba.models.text_part import switch_length, trunk_of

FEWEST_LAYERS = 2  # least number of layers tried: what leaks in the first shows in what the second makes of it
SHORT_TOKENS = 24  # length of the longest sequence tried where no window asks for more
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
        # Registered anew: the trial leaves its counting attention under this name.
        AttentionInterface.register(NAME, packed_attention)
        model.set_attn_implementation(NAME)
    else:
        model.set_attn_implementation(before)
    return problem


def _find_problem(model: PreTrainedModel, outputs: Outputs, max_length: int | None) -> str | None:
    lengths, count = _lengths(model.config, max_length), _layers_of_every_kind(model)
    try:
        with _abridged(model, count):
            in_own_dtype = _Trial(model, lengths[0])
    except Exception:  # some models count their layers elsewhere too
        count = None
        try:
            in_own_dtype = _Trial(model, lengths[0])
        except Exception as error:
            dtype = str(model.dtype).removeprefix("torch.")
            raise PlainPassFailed(
                f"{type(model).__name__} cannot be trained: its own forward pass fails in {dtype} on {model.device.type} "
                f"({type(error).__name__}: {first_line(error).rstrip('.')}). Try model.dtype=float32, or another model."
            ) from error
    called: set[int] = set()

    def counted_attention(module: nn.Module, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        called.add(id(module))
        return packed_attention(module, *arguments, **options)

    # The packed trial: plain passes in fp32, then the same sequences through `outputs`.
    with _abridged(model, count) as num_layers:
        try:
            with _in_fp32(model) as is_changed:
                # All plain passes come before the model's attention is another: they say what is right.
                trials = [in_own_dtype] if not is_changed else [_Trial(model, lengths[0])]
                trials += [_Trial(model, length) for length in lengths[1:]]
                AttentionInterface.register(NAME, counted_attention)
                model.set_attn_implementation(NAME)
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


class _Trial:
    """A few sequences, and their log-probs by plain passes."""

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        """Two prompts, the first with a response that makes up `length` tokens, and where they are few with another."""
        device, vocabulary = next(model.parameters()).device, int(model.config.get_text_config().vocab_size)
        scored = min(SCORED_TOKENS, length - 1)
        sizes = (length - scored + 1, scored, min(3, scored), 2, min(4, scored))
        # Fixed tokens that rarely repeat, so that what leaks from a neighbour changes the log-probs.
        tokens = torch.arange(1, sum(sizes) + 1, device=device) * 7919 % vocabulary
        first, longest, short, second, other = tokens.split(sizes)
        responses = ((longest, short) if length <= SHORT_TOKENS else (longest,), (other,))
        self._packed = pack((first, second), responses, device=device)
        rows = [own_logits(model, row[None], size)[0].float() for row, size in self._packed.rows()]
        log_probs_MV = torch.log_softmax(torch.cat(rows), dim=-1)
        self._log_probs_M = log_probs_MV.gather(1, self._packed.targets_M[:, None])[:, 0]

    def problem(self, outputs: Outputs, share: float) -> str | None:
        """How far the packed log-probs are off, if that is more than a share of the largest log-prob."""
        tolerance = share * max(1.0, float(self._log_probs_M.abs().max()))
        gap = float((outputs(self._packed, 1.0)[0].float() - self._log_probs_M).abs().max())
        # NaN is a problem too.
        return None if gap <= tolerance else f"log-probs differ by {gap:.2g} from a plain forward pass"


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
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for module in trunk_of(model).modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name, child
    return None


def _layers_of_every_kind(model: PreTrainedModel) -> int | None:
    """Number of first layers among which every kind of layer is; None = there is no list of layers."""

    def settings(module: nn.Module) -> list[tuple[str, Any]]:
        values = vars(module).items()
        return [(n, v) for n, v in values if isinstance(v, bool | int | str | None) and not n.endswith(COUNTS)]

    def kind(layer: nn.Module) -> list[Any]:
        """Its modules' classes and settings (`is_sliding`), without its place in the list."""
        return [(name, type(m), settings(m)) for name, m in layer.named_modules() if ".lora_" not in name]

    found = _layer_list(model)
    kinds = [] if found is None else [kind(layer) for layer in found[2]]
    return min(len(kinds), max(FEWEST_LAYERS, *(kinds.index(own) + 1 for own in kinds))) if kinds else None


@contextmanager
def _abridged(model: PreTrainedModel, count: int | None) -> Iterator[int | None]:
    """The model with its first `count` layers only, None = all, while the context lasts; gives their number, if known."""
    found = _layer_list(model)
    if found is None:
        yield None
        return
    parent, name, whole = found
    # The layers are not copied: the model has a shorter list of the same modules meanwhile.
    few = whole if count is None else nn.ModuleList(list(whole)[:count])
    setattr(parent, name, few)
    try:
        yield len(few)
    finally:
        setattr(parent, name, whole)


@contextmanager
def _in_fp32(model: PreTrainedModel) -> Iterator[bool]:
    """The model in fp32 while the context lasts; gives whether it was in another dtype. Its own numbers come back."""
    tensors = (tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.is_floating_point())
    kept = [(tensor, tensor.data) for tensor in tensors if tensor.dtype != torch.float32]
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
