"""The state of a run as plain data: a JSON tree and named tensors, never pickle.

`take_snapshot` copies the states of a run's parts at once, so that the run can go on while the copy is written. A state may
have containers, numbers, arrays, and objects of the classes listed in SAVED. `restore` builds the same things again, with
dicts in their order and random generators where they were: a restored replay buffer draws and evicts as it would have done.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tba.observe.display import Stability
from tba.observe.watches import BetaWatch, LostResponses, MismatchWatch, RewardSignal
from tba.replay.draw import DrawWithoutReplacement, PromptDraws
from tba.types import Batch, HighWaterMarks, Totals, Weights

SAVED: tuple[type, ...] = (
    *(PromptDraws, DrawWithoutReplacement),
    *(Batch, Totals, Weights, HighWaterMarks),
    *(Stability, MismatchWatch, LostResponses, BetaWatch, RewardSignal),
)
"""Classes whose objects may be part of a state. Nothing else is built when a state is read."""
CLASSES = {kind.__name__: kind for kind in SAVED}
PLAIN = (type(None), bool, int, float, str)
"""Types that JSON has. Floats come back bit for bit; NaN and infinity are written as Python's json writes them."""


def _generator(state: Mapping[str, Any]) -> np.random.Generator:
    made = np.random.Generator(np.random.PCG64())
    made.bit_generator.state = state
    return made


CONTAINERS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    # As pairs: keys of JSON are strings alone, and here they are numbers too.
    dict: (lambda value: [list(pair) for pair in value.items()], dict),
    tuple: (list, tuple),
    set: (list, set),
    deque: (lambda value: [list(value), value.maxlen], lambda found: deque(*found)),
    np.random.Generator: (lambda value: value.bit_generator.state, _generator),
}
"""How a value of each of these types is written as lists, dicts and arrays, and made of them again."""
KINDS = {kind.__name__: kind for kind in CONTAINERS}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Type that a tensor is saved as, by the bytes of an element: NumPy, which writes the files, has no bfloat16."""


class Stateful(Protocol):
    """A part of a run that decides what comes next. Its state is copied before it changes again, and is the part's own once
    it is loaded."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


def take_snapshot(value: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """A copy of a state, which may change as soon as this returns: JSON, in which what is not JSON itself is an object with
    its `kind`, and by name the numbers of its tensors and arrays, as integers."""
    arrays: dict[str, np.ndarray] = {}

    def keep(kind: str, tensor: Tensor) -> dict[str, str]:
        name = str(len(arrays))
        # For safetensors.numpy. safetensors.torch keeps two ctypes classes, 7 KB, for each number of bytes that it has not
        # written before, and those of a replay buffer are new in every checkpoint.
        arrays[name] = tensor.view(INTEGERS[tensor.itemsize]).numpy()
        return {"kind": kind, "name": name, "dtype": str(tensor.dtype).removeprefix("torch.")}

    def encode(value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is list:
            # Order lists of a hundred thousand numbers are copied as they are.
            return list(value) if all(type(item) in PLAIN for item in value) else [encode(item) for item in value]
        if kind in CONTAINERS:
            return {"kind": kind.__name__, "value": encode(CONTAINERS[kind][0](value))}
        if kind in SAVED:  # by exact type: what is built at reading is what was listed, and no subclass with more in it
            # Not vars() of a dataclass: slots have none, and cached properties are no state.
            is_data = dataclasses.is_dataclass(kind)
            names = [known.name for known in dataclasses.fields(kind)] if is_data else list(vars(value))
            return {"kind": kind.__name__, "fields": {name: encode(getattr(value, name)) for name in names}}
        if isinstance(value, Tensor):
            return keep("Tensor", value.detach().to("cpu", copy=True).contiguous())
        if kind is np.ndarray:
            return keep("ndarray", torch.from_numpy(np.array(value, order="C")))
        if isinstance(value, np.generic):
            return value.item()
        if kind is bytearray:  # made for the state, which alone has it: not copied
            # torch.frombuffer refuses an empty buffer: one byte is given and cut off.
            return keep("bytes", torch.frombuffer(value or bytearray(1), dtype=torch.uint8)[: len(value)])
        raise TypeError(f"a {kind.__name__} cannot be saved: give plain data, or list its class in SAVED.")

    return encode(value), arrays


def restore(tree: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value that a snapshot was taken of."""

    def decode(node: Any) -> Any:
        if isinstance(node, list):
            return [decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        kind = node["kind"]
        if kind in KINDS:
            return CONTAINERS[KINDS[kind]][1](decode(node["value"]))
        if kind in CLASSES:
            # Without __init__: fields come back as they were, whatever a new object would begin with.
            made: Any = object.__new__(CLASSES[kind])
            for name, item in node["fields"].items():
                object.__setattr__(made, name, decode(item))
            return made
        # A copy: arrays of a file or a message cannot be written.
        tensor = torch.from_numpy(arrays[node["name"]].copy()).view(getattr(torch, node["dtype"]))
        if kind == "Tensor":
            return tensor
        return tensor.numpy() if kind == "ndarray" else tensor.numpy().tobytes()

    return decode(tree)
