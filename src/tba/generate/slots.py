"""Slots: the static tensors of the responses being decoded side by side.

Running responses always occupy slots 0 to n - 1, so a decode step works on views: `state[:n]`, `keys[:, :n]`. A
finished slot is taken by the next response, or, when there is none, by the last running one (`move`).
In a slot, key index = position of the token, so what lies behind the position is never seen.

Axes: M layers, S slots, K key/value heads, D head dimension, L positions, B prompts of one prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tba.generate.responses import Response
from tba.generate.sampling import Sampled, SamplingState, response_key
from tba.generate.transfer import OnItsWay
from tba.models.decoder_spec import DecoderSpec
from tba.models.packing import on_device, padded

if TYPE_CHECKING:  # Triton is there only where CUDA is
    from tba.kernels.logits import Columns

KEY_STEP = 16
"""Attention runs over a multiple of this many keys: few distinct shapes, and faster matrix kernels."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefilled:
    """Keys and values of a batch of prompts, waiting for slots.

    All tokens but the last of each prompt: that one is fed at the first decode step, which yields the first token.
    """

    keys: Tensor
    """As in the cache: [M, B, K, D, L], or [M, B, K, L, D] on CUDA."""
    values: Tensor
    """[M, B, K, L, D]"""
    version: int


class SlotCache:
    """Keys and values of all slots and layers. On a CPU keys lie with positions last: query x key reads them in order;
    on CUDA they lie like values.

    It holds as many positions as the longest response so far may need, so a model's huge context costs nothing;
    addresses change only when it grows.
    """

    def __init__(self, spec: DecoderSpec, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (spec.num_layers, num_slots, spec.num_kv_heads)
        self.positions_last = device.type == "cpu"
        """Of the keys."""
        self.values = torch.zeros(*shape, 0, spec.head_dim, dtype=dtype, device=device)
        self.keys = self.arrange(self.values)

    def arrange(self, keys: Tensor) -> Tensor:
        """Keys [..., L, D] as they lie here."""
        return keys.transpose(-1, -2).contiguous() if self.positions_last else keys.clone()

    def _keys_upto(self, slots: Tensor, length: int) -> tuple[slice | Tensor, ...]:
        """Index of the first positions of the keys of some slots, or of rows of a prefill."""
        every = slice(None)
        return (
            (every, slots, every, every, slice(length)) if self.positions_last else (every, slots, every, slice(length))
        )

    def reserve(self, length: int) -> None:
        """Make room for `length` positions, keeping what is there."""
        if length <= self.values.shape[3]:
            return
        extra = _round_up(length) - self.values.shape[3]
        # Zeros, not garbage: behind the position 0 x NaN would be NaN.
        self.keys = F.pad(self.keys, (0, extra) if self.positions_last else (0, 0, 0, extra))
        self.values = F.pad(self.values, (0, 0, 0, extra))

    def fork(self, slots: Tensor, prefilled: Prefilled, rows: Tensor) -> None:
        """Copy prompt `rows[i]` into slot `slots[i]`."""
        # What lies beyond the cache is padding: `reserve` made room for the prompt itself.
        length = min(prefilled.values.shape[3], self.values.shape[3])
        self.keys[self._keys_upto(slots, length)] = prefilled.keys[self._keys_upto(rows, length)]
        self.values[:, slots, :, :length] = prefilled.values[:, rows, :, :length]

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy slots, the first `length` positions."""
        self.keys[self._keys_upto(targets, length)] = self.keys[self._keys_upto(sources, length)]
        self.values[:, targets, :, :length] = self.values[:, sources, :, :length]


class SlotAttention:
    """One token per slot, each seeing its own slot up to its position, over the keys that the longest of them needs."""

    def __init__(self, spec: DecoderSpec, cache: SlotCache, positions: Tensor, num_keys: int) -> None:
        self.spec, self.cache, self.positions = spec, cache, positions
        self.num_slots = positions.shape[0]
        self.num_keys = min(_round_up(num_keys), cache.values.shape[3])
        self.slots = torch.arange(self.num_slots, device=positions.device)
        self.masks = {window: self._mask(window) for window in set(spec.windows)}

    def store(self, layer: int, key_NKD: Tensor, value_NKD: Tensor) -> None:
        dtype = self.cache.keys.dtype
        keys = self.cache.keys[layer]
        keys = keys if self.cache.positions_last else keys.transpose(-1, -2)
        keys[self.slots, :, :, self.positions] = key_NKD.to(dtype)
        self.cache.values[layer][self.slots, :, self.positions] = value_NKD.to(dtype)

    def attend(self, layer: int, query_NHD: Tensor) -> Tensor:
        """Query heads that share a key head are rows of one small matrix product."""
        spec, count, length = self.spec, self.num_slots, self.num_keys
        keys = self.cache.keys[layer, :count].flatten(0, 1)
        keys = (keys if self.cache.positions_last else keys.transpose(-1, -2))[:, :, :length]
        values = self.cache.values[layer, :count].flatten(0, 1)[:, :length]
        query = query_NHD.reshape(-1, spec.group, spec.head_dim).to(keys.dtype)
        mask, scale, cap = self.masks[spec.windows[layer]], spec.query_scales[layer], spec.attention_cap
        if cap is None:
            scores = torch.baddbmm(mask, query, keys, alpha=scale)
        else:
            scores = torch.tanh(torch.bmm(query, keys) * (scale / cap)) * cap + mask
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        return torch.bmm(weights, values).view(count, spec.num_heads * spec.head_dim)

    def _mask(self, window: int | None) -> Tensor:
        """0 where a key is seen, -inf elsewhere -> [S * K, 1, L]."""
        behind = self.positions[:, None] - torch.arange(self.num_keys, device=self.positions.device)
        hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
        mask = torch.zeros(hidden.shape, dtype=self.cache.keys.dtype, device=hidden.device)
        mask.masked_fill_(hidden, float("-inf"))
        return mask.repeat_interleave(self.spec.num_kv_heads, dim=0)[:, None]


INTEGERS = ("ids", "positions", "num_tokens", "limits", "keys", "top_k", "greedy", "min_new_tokens", "done")
FLOATS = ("temperature", "policy_temperature", "top_p")


class Progress(NamedTuple):
    """Of the first slots: response tokens so far, int64; whether the response is complete, or there is none."""

    num_tokens: np.ndarray
    done: np.ndarray


class Look:
    """The slots' integers when the device has come so far."""

    def __init__(self, integers: Tensor) -> None:
        self._integers = OnItsWay(integers if integers.is_cuda else integers.clone())

    def wait(self) -> Progress:
        (integers,) = self._integers.wait()
        return Progress(integers[:, INTEGERS.index("num_tokens")], integers[:, INTEGERS.index("done")] != 0)


class SlotState:
    """What each slot is doing, as columns of two tables (two copies place a new response, whatever it needs).

    ids: token to be fed next; positions: its place in prompt + response; num_tokens: response tokens so far, prefix
    included; limits: response tokens allowed; keys: of the random numbers; done: 1 = the response is complete, or there
    is none.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.device = device
        self.integers = torch.zeros(num_slots, len(INTEGERS), dtype=torch.int64, device=device)
        self.vacate(slice(None))
        self.floats = torch.ones(num_slots, len(FLOATS), dtype=torch.float32, device=device)
        self.tokens = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)
        self.behaviour = torch.zeros(num_slots, 0, device=device)
        self.policy = torch.zeros(num_slots, 0, device=device)

    def reserve(self, num_tokens: int) -> None:
        """Make room for responses of `num_tokens`."""
        extra = num_tokens - self.tokens.shape[1]
        if extra > 0:
            self.tokens, self.behaviour, self.policy = (
                F.pad(table, (0, extra)) for table in (self.tokens, self.behaviour, self.policy)
            )

    def column(self, name: str, num_slots: int) -> Tensor:
        """A view of the first slots."""
        if name in FLOATS:
            return self.floats[:num_slots, FLOATS.index(name)]
        return self.integers[:num_slots, INTEGERS.index(name)]

    def vacate(self, slots: Tensor | slice) -> None:
        """Nothing runs there."""
        self.integers[slots, INTEGERS.index("done")] = 1

    def look(self, num_slots: int) -> Look:
        """What the host must know after a step, on its way."""
        return Look(self.integers[:num_slots])

    def columns(self, num_slots: int) -> Columns:
        """Views for the kernels that choose tokens."""
        from tba.kernels.logits import Columns

        names = (
            "ids",
            "positions",
            "num_tokens",
            "limits",
            "keys",
            "greedy",
            "done",
            "temperature",
            "policy_temperature",
        )
        views = {name: self.column(name, num_slots) for name in names}
        return Columns(**views, tokens=self.tokens, behaviour=self.behaviour, policy=self.policy)

    def sampling(self, num_slots: int) -> SamplingState:
        return SamplingState(
            key=self.column("keys", num_slots),
            position=self.column("num_tokens", num_slots),
            temperature=self.column("temperature", num_slots),
            policy_temperature=self.column("policy_temperature", num_slots),
            top_p=self.column("top_p", num_slots),
            top_k=self.column("top_k", num_slots),
            greedy=self.column("greedy", num_slots),
            min_new_tokens=self.column("min_new_tokens", num_slots),
        )

    def fetch(self, slots: Sequence[int], num_tokens: int) -> OnItsWay:
        """Tokens, behaviour and policy log-probs of some slots."""
        chosen = on_device(torch.tensor(slots), self.device)
        return OnItsWay(*(table[:, :num_tokens][chosen] for table in (self.tokens, self.behaviour, self.policy)))

    def place(self, slots: Sequence[int], responses: Sequence[Response], seed: int) -> None:
        """Start responses in slots whose cache holds their prompt and prefix."""
        chosen = on_device(torch.tensor(slots), self.device)
        self.integers[chosen] = on_device(
            torch.tensor([_integers(response, seed) for response in responses]), self.device
        )
        self.floats[chosen] = on_device(torch.tensor([_floats(response) for response in responses]), self.device)
        longest = max(response.num_prefix_tokens for response in responses)
        if longest:
            # What lies behind a prefix is written before it is read.
            rows = [response.request.prefix_ids for response in responses]
            self.tokens[chosen, :longest] = padded(rows, columns=longest, device=self.device)
            self.behaviour[chosen, :longest] = float("nan")
            self.policy[chosen, :longest] = float("nan")

    def record(self, num_slots: int, sampled: Sampled, is_stop_V: Tensor) -> None:
        """Append the chosen tokens and make them the next to be fed; who has ended is done."""
        slots, place = torch.arange(num_slots, device=self.device), self.column("num_tokens", num_slots)
        self.tokens[slots, place] = sampled.tokens
        self.behaviour[slots, place] = sampled.behaviour
        self.policy[slots, place] = sampled.policy
        self.column("ids", num_slots).copy_(sampled.tokens)
        self.integers[:num_slots, INTEGERS.index("positions") : INTEGERS.index("num_tokens") + 1] += 1
        ended = is_stop_V[sampled.tokens] | (self.column("num_tokens", num_slots) >= self.column("limits", num_slots))
        self.column("done", num_slots).copy_(ended)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        for table in (self.integers, self.floats, self.tokens, self.behaviour, self.policy):
            table[targets] = table[sources]
        self.vacate(sources)


def _integers(response: Response, seed: int) -> tuple[int, ...]:
    request, sampling = response.request, response.sampling
    last = request.prefix_ids[-1] if response.num_prefix_tokens else request.prompt.token_ids[-1]
    key = response_key(seed, request.prompt.id, response.sample_index)
    return (
        int(last),
        response.start_position,
        response.num_prefix_tokens,
        sampling.max_new_tokens,
        key,
        sampling.top_k,
        int(sampling.greedy),
        sampling.min_new_tokens,
        0,
    )


def _floats(response: Response) -> tuple[float, float, float]:
    sampling = response.sampling
    return (1.0 if sampling.greedy else sampling.temperature, sampling.training_temperature, sampling.top_p)


def _round_up(num_keys: int) -> int:
    return -(-num_keys // KEY_STEP) * KEY_STEP
