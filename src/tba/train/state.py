"""The state of a run as plain data: a JSON tree and named tensors, never pickle.

`take_snapshot` walks what the parts of a run give it (containers, numbers, arrays, and objects of the classes listed in
SAVED) and copies it at once, so that the run can go on while the copy is written. `restore` builds the same things again:
shared objects are shared, dicts keep their order, and a random generator continues where it was. A replay buffer that was
saved and restored therefore draws and evicts exactly as it would have done.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tba.observe.display import Stability
from tba.observe.watches import BetaWatch, LostResponses, MismatchWatch, RewardSignal
from tba.replay.sampling import DrawWithoutReplacement, PromptDraws
from tba.train.collapse_guard import Alarm, CollapseGuard, Streak
from tba.types import Batch, HighWaterMarks, Totals, Weights

SAVED: tuple[type, ...] = (
    *(PromptDraws, DrawWithoutReplacement),
    *(Batch, Totals, Weights, HighWaterMarks),
    *(CollapseGuard, Streak, Alarm, Stability, MismatchWatch, LostResponses, BetaWatch, RewardSignal),
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
    dict: (lambda value: [list(pair) for pair in value.items()], dict),
    tuple: (list, tuple),
    set: (list, set),
    deque: (lambda value: [list(value), value.maxlen], lambda found: deque(*found)),
    np.random.Generator: (lambda value: value.bit_generator.state, _generator),
}
"""How a value of each of these types is written as lists, dicts and arrays, and made of them again."""
KINDS = {kind.__name__: kind for kind in CONTAINERS}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What a tensor is kept as, by the bytes of an element: NumPy, which writes the files, has no bfloat16."""


class Stateful(Protocol):
    """A part of a run that decides what comes next, and is saved with it."""

    def state(self) -> dict[str, Any]:
        """Everything that later steps depend on, as it is now. It is copied before the part changes again."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state; the part owns it from now on."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """Plain data of a state.

    Snapshot(tree={"step": 12, "batch": {"kind": "Tensor", "name": "0", "dtype": "int64"}}, tensors={"0": tensor([3, 4])})
    """

    tree: Any
    """JSON: what is not JSON itself is an object with its `kind`."""
    tensors: Mapping[str, Tensor]
    """Tensors as integers, and memory of NumPy arrays as uint8, on the CPU; nothing else refers to them."""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The tensors for safetensors.numpy. safetensors.torch keeps two ctypes classes, 7 KB, for each number of bytes that
        it has not written before, and those of a replay buffer are new in every checkpoint."""
        return {name: tensor.numpy() for name, tensor in self.tensors.items()}


def take_snapshot(value: Any) -> Snapshot:
    """Copy a state; it may change as soon as this returns."""
    encoder = _Encoder()
    return Snapshot(tree=encoder.encode(value), tensors=encoder.tensors)


def restore(snapshot: Snapshot) -> Any:
    """The value that a snapshot was taken of."""
    return _Decoder(snapshot.tensors).decode(snapshot.tree)


@dataclass(eq=False)
class _Encoder:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    _objects: dict[int, int] = field(default_factory=dict)
    """Number of each object met so far, by its id."""
    _alive: list[Any] = field(default_factory=list)
    """Everything whose id was noted: an id is given again once its object is gone."""

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is list:
            # Order lists of a hundred thousand numbers are copied as they are.
            return list(value) if all(type(item) in PLAIN for item in value) else [self.encode(item) for item in value]
        if kind in CLASSES.values():
            return self._object(value)
        if kind is np.ndarray:
            return self._array(value)
        if kind in CONTAINERS:
            return {"kind": kind.__name__, "value": self.encode(CONTAINERS[kind][0](value))}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Tensor):
            copied = value.detach().to("cpu", copy=True).contiguous()
            name = self._add(copied.view(INTEGERS[copied.itemsize]))
            return {"kind": "Tensor", "name": name, "dtype": str(copied.dtype).removeprefix("torch.")}
        if kind is bytearray:  # made for the state, which alone has it: not copied
            memory = torch.frombuffer(value, dtype=torch.uint8) if value else torch.zeros(0, dtype=torch.uint8)
            return {"kind": "bytes", "name": self._add(memory)}
        raise TypeError(f"a {kind.__name__} cannot be saved: give plain data, or list its class in SAVED.")

    def _object(self, value: Any) -> dict[str, Any]:
        number = self._objects.get(id(value))
        if number is not None:
            return {"kind": "same", "number": number}
        number = self._objects[id(value)] = len(self._objects)
        self._alive.append(value)
        if dataclasses.is_dataclass(value):  # not vars(): slots have none, and cached properties are no state
            fields = {known.name: getattr(value, known.name) for known in dataclasses.fields(value)}
        else:
            fields = vars(value)
        encoded = {name: self.encode(item) for name, item in fields.items()}
        return {"kind": type(value).__name__, "number": number, "fields": encoded}

    def _array(self, value: np.ndarray) -> dict[str, Any]:
        memory = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
        return {"kind": "ndarray", "name": self._add(memory), "dtype": value.dtype.str, "shape": list(value.shape)}

    def _add(self, tensor: Tensor) -> str:
        name = str(len(self.tensors))
        self.tensors[name] = tensor
        return name


@dataclass(eq=False)
class _Decoder:
    tensors: Mapping[str, Tensor]
    _objects: dict[int, Any] = field(default_factory=dict)

    def decode(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        kind = node["kind"]
        if kind == "same":
            return self._objects[node["number"]]
        if kind == "Tensor":
            found = self.tensors[node["name"]]
            return found.view(getattr(torch, node["dtype"])) if "dtype" in node else found  # earlier files have none
        if kind == "ndarray":
            return self._array(node)
        if kind == "bytes":
            return self.tensors[node["name"]].numpy().tobytes()
        if kind in KINDS:
            return CONTAINERS[KINDS[kind]][1](self.decode(node["value"]))
        return self._object(node)

    def _object(self, node: Mapping[str, Any]) -> Any:
        made: Any = object.__new__(CLASSES[node["kind"]])
        self._objects[node["number"]] = made
        for name, item in node["fields"].items():
            object.__setattr__(made, name, self.decode(item))
        return made

    def _array(self, node: Mapping[str, Any]) -> np.ndarray:
        # A copy: tensors of a file lie where they lie, at addresses that suit bytes only.
        return self.tensors[node["name"]].numpy().copy().view(node["dtype"]).reshape(node["shape"])
