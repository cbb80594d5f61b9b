"""Operations of a decoder's layers beside their matrix products: attention, and mixtures of experts.

`Attend` is how the tokens of a pass see each other. Here is the one of right-padded batches of sequences (prefill, checks);
decoding in slots, and scoring, have their own.

In a layer with experts each token goes through the few that a router chooses, and their outputs are summed by the router's
weights. Tokens are sorted by expert, so that each matrix product is one grouped product over all experts. No shape depends
on what is chosen and nothing is read back from the device, so that a captured CUDA graph serves every choice. (In fp32
PyTorch's grouped product goes through the host: there is no graph then.)

Axes: M layers, N tokens, B sequences, T tokens of the longest, L keys, H query heads, K key/value heads, D head dimension,
E hidden, X experts, C experts chosen by a token, R = N C rows, F MLP width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tba.engine.decoder.spec import DecoderSpec, Experts, ExpertsSpec
from tba.models.packed_attention import additive, causal_mask, softcapped_attention

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All attention kernels but cuDNN's, which plans a tenth of a second for every new shape: prompts have many."""


class Attend(Protocol):
    """How the tokens of one forward see each other and what came before."""

    def store(self, layer: int, key_NKD: Tensor, value_NKD: Tensor) -> None:
        """Keep the keys and values of these tokens."""

    def attend(self, layer: int, query_NHD: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        """Attention over what is stored -> [N, H * D]; `sinks_H` are scores that take part in the soft-max."""


@runtime_checkable
class AttendProjected(Protocol):
    """An `Attend` of a fused pass whose kernels take the projection as it is: they norm, rotate, store and attend."""

    def attend_projected(
        self, layer: int, qkv: Tensor, rotations: Tensor | None, query_norm: Tensor | None, key_norm: Tensor | None
    ) -> Tensor:
        """Attention over what is stored and the new tokens -> [N, H * D]; rotations and norms as `rotate_and_store` takes
        them."""


def attention(
    spec: DecoderSpec,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention [B, H, T, D] of query [B, H, T, D] over key and value [B, K, L, D]; the mask is added to the scores, None =
    causal."""
    scale, cap = spec.query_scales[layer], spec.attention_cap
    if sinks_H is not None:
        if spec.group > 1:
            key, value = key.repeat_interleave(spec.group, dim=1), value.repeat_interleave(spec.group, dim=1)
        # Sinks add to the soft-max's sum by hand, and that code knows no is_causal.
        mask = causal_mask(query, key) if mask is None else mask
        return attention_with_sinks(query, key, value, mask, sinks_H[:, None, None], scale=scale)
    if cap is not None:
        return softcapped_attention(query, key, value, mask, scale=scale, cap=cap)
    group = spec.group
    if query.is_cuda and mask is not None and group > 1:
        # No kernel on CUDA takes both a mask and grouped heads, but cuDNN's.
        key, value, group = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1), 1
    with sdpa_kernel(WITHOUT_PLANS) if query.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=group > 1
        )


def attention_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor, *, scale: float
) -> Tensor:
    """Attention whose soft-max has one more score for each query, of which nothing is read: weights sum to less than 1.
    `sinks` has the shape of scores with one key, or broadcasts to it."""
    scores = (torch.matmul(query, key.transpose(-1, -2)) * scale + mask).float()
    # The sink takes part in the maximum: alone it may be the largest, and exp would overflow.
    largest = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
    weights = torch.exp(scores - largest)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + torch.exp(sinks - largest))
    return torch.matmul(weights.to(value.dtype), value)


def as_block(heads_NHD: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Heads of a sequence together: [B * T, H, D] -> [B, H, T, D]."""
    return heads_NHD.unflatten(0, shape).transpose(1, 2).to(dtype)


class CausalAttention:
    """Right-padded sequences, each seeing itself only. Padding comes last, so no real token ever sees it. Keys and values of
    all layers are kept."""

    def __init__(
        self, spec: DecoderSpec, num_rows: int, num_columns: int, *, dtype: torch.dtype = torch.float32
    ) -> None:
        """`dtype` is that of queries, keys and values: on CUDA the engine's own, which the fast kernels want."""
        self.spec, self.dtype = spec, dtype
        self.shape = (num_rows, num_columns)
        self._tables: tuple[Tensor, Tensor] | None = None
        """Keys and values [M, B, T, K, D]; made when the device is known."""
        self.masks: dict[int, Tensor] = {}

    @property
    def keys(self) -> Tensor:
        """Keys [M, B, K, T, D], a view."""
        assert self._tables is not None, "nothing is stored yet"
        return self._tables[0].transpose(2, 3)

    @property
    def values(self) -> Tensor:
        """Values [M, B, K, T, D], a view."""
        assert self._tables is not None, "nothing is stored yet"
        return self._tables[1].transpose(2, 3)

    def storage(self, layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The tensors [N, K, D] of a layer's keys and values; a kernel that fills them at once needs no `store`."""
        if self._tables is None:
            shape = (self.spec.num_layers, *self.shape, self.spec.num_kv_heads, self.spec.head_dim)
            keys, values = (torch.empty(shape, dtype=self.dtype, device=device) for _ in range(2))
            self._tables = (keys, values)
        keys, values = (table[layer].flatten(0, 1) for table in self._tables)
        return keys, values

    def store(self, layer: int, key_NKD: Tensor, value_NKD: Tensor) -> None:
        keys, values = self.storage(layer, key_NKD.device)
        keys.copy_(key_NKD)
        values.copy_(value_NKD)

    def attend(self, layer: int, query_NHD: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        query = as_block(query_NHD, self.shape, self.dtype)
        mask = self._mask(self.spec.windows[layer], query.device)
        attended = attention(self.spec, layer, query, self.keys[layer], self.values[layer], mask, sinks_H)
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)

    def _mask(self, window: int | None, device: torch.device) -> Tensor | None:
        columns = self.shape[1]
        # No key is out of sight: None lets the fused kernels be causal without a mask.
        if window is None or window >= columns:
            return None
        if window not in self.masks:
            seen = torch.ones(columns, columns, dtype=torch.bool, device=device)
            self.masks[window] = additive(seen.tril().triu(1 - window), self.dtype)
        return self.masks[window]


# --- experts ---------------------------------------------------------------------------------------------------------


def apply_experts(x_NE: Tensor, experts: Experts, spec: ExpertsSpec, gated: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum that the experts add to each token [N, E], fp32; `gated` turns gate over up [R, 2 F] into [R, F]."""
    logits_NX = experts.router(x_NE).float()
    highest_NC, chosen_NC = torch.topk(logits_NX, spec.num_chosen, dim=-1)
    if spec.normalised:  # a soft-max of all, chosen and divided by its sum, is the soft-max of the chosen
        weight_NC = torch.softmax(highest_NC, dim=-1)
    else:
        weight_NC = torch.exp(highest_NC - torch.logsumexp(logits_NX, dim=-1, keepdim=True))
    # Rows by expert: the rows of expert x end at ends_X[x], as grouped products take them.
    expert_R, order_R = torch.sort(chosen_NC.flatten(), stable=True)
    counts_X = torch.zeros(spec.num_experts, dtype=torch.int32, device=x_NE.device)
    counts_X.scatter_add_(0, expert_R, torch.ones_like(expert_R, dtype=torch.int32))
    ends_X = counts_X.cumsum(0, dtype=torch.int32)
    # Row r of the flat choices is of token r // C.
    rows = x_NE[order_R // spec.num_chosen]
    inner = gated(_grouped(rows, experts.up, experts.up_bias, expert_R, ends_X))
    output = _grouped(inner, experts.down, experts.down_bias, expert_R, ends_X)
    # Back in the order of the tokens first: a sum in the order of the experts would change from run to run on a GPU.
    output_NCE = torch.empty_like(output).index_copy_(0, order_R, output).unflatten(0, chosen_NC.shape)
    return torch.bmm(weight_NC[:, None].to(output.dtype), output_NCE).squeeze(1).float()


def clamped_gate(inner_R2F: Tensor, spec: ExpertsSpec) -> Tensor:
    """GPT-OSS's gated activation [R, F]."""
    assert spec.gate_limit is not None
    gate, up = inner_R2F.chunk(2, dim=-1)
    gate, up = gate.clamp(max=spec.gate_limit), up.clamp(-spec.gate_limit, spec.gate_limit)
    return (up + 1) * (gate * torch.sigmoid(gate * spec.gate_alpha))


def _grouped(rows_RI: Tensor, weight_XOI: Tensor, bias_XO: Tensor | None, expert_R: Tensor, ends_X: Tensor) -> Tensor:
    """Each row times its expert's matrix, plus its bias; rows are sorted by expert."""
    product = F.grouped_mm(rows_RI, weight_XOI.transpose(-1, -2), offs=ends_X)
    return product if bias_XO is None else product + bias_XO[expert_R]
