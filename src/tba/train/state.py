"""The state of a run as plain data: a JSON tree and named tensors, never pickle.

`take_snapshot` walks what the parts of a run give it (containers, numbers, arrays, and objects of the classes listed in
SAVED) and copies it at once, so that the run can go on while the copy is written. `restore` builds the same things again:
shared objects are shared, arrays that were views of one memory are views of one memory, dicts keep their order, and a
random generator continues where it was. A replay buffer that was saved and restored therefore draws, evicts and compacts
exactly as it would have done.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tba.observe.beta import BetaWatch
from tba.observe.display import Stability
from tba.observe.guards import Alarm, CollapseGuard, Streak
from tba.observe.lost import LostResponses
from tba.observe.mismatch import MismatchWatch
from tba.observe.reward_signal import RewardSignal
from tba.replay import prompts, sampling, storage
from tba.replay.sum_trees import SumTrees
from tba.types import Batch, HighWaterMarks, Totals, Weights

SAVED: tuple[type, ...] = (
    *(storage.TokenStore, storage.Segment, storage.RowTable, storage.AgeOrder, storage.TokenIndex),
    *(
        prompts.PromptEntry,
        prompts.PromptDraws,
        prompts.DrawWithoutReplacement,
        prompts.GroupQueue,
        prompts.QueuedGroup,
    ),
    *(sampling.MixedSelector, sampling.FreshSelector, sampling.UniformSelector, sampling.SoftmaxSelector, SumTrees),
    *(Batch, Totals, Weights, HighWaterMarks),
    *(CollapseGuard, Streak, Alarm, Stability, MismatchWatch, LostResponses, BetaWatch, RewardSignal),
)
"""Classes whose objects may be part of a state. Nothing else is built when a state is read."""
CLASSES = {kind.__name__: kind for kind in SAVED}
PLAIN = (type(None), bool, int, float, str)
"""Types that JSON has. Floats come back bit for bit; NaN and infinity are written as Python's json writes them."""
FACTORIES: dict[str, Callable[[], Any]] = {"list": list, "int": int}
"""What a defaultdict may fill itself with, by name."""
BLOCK = 1 << 16
"""Number of bytes in which the zeros at the end of an array are searched for and left out."""
ZEROS = bytes(BLOCK)


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

    Snapshot(tree={"step": 12, "batch": {"kind": "tensor", "name": "0"}}, tensors={"0": tensor([3, 4])})
    """

    tree: Any
    """JSON: what is not JSON itself is an object with its `kind`."""
    tensors: Mapping[str, Tensor]
    """Tensors, and memory of NumPy arrays as uint8, on the CPU; nothing else refers to them."""


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
    _memory: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What is written of each array that owns memory, by its id."""
    _alive: list[Any] = field(default_factory=list)
    """Everything whose id was noted: an id is given again once its object is gone."""

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is list:
            return self._items(value)
        if kind is dict:
            return {"kind": "dict", "items": self._pairs(value)}
        if kind in CLASSES.values():
            return self._object(value)
        if kind is np.ndarray:
            return self._array(value)
        return self._rare(value)

    def _rare(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Tensor):
            copied = value.detach().to("cpu", copy=True).contiguous()
            return {"kind": "tensor", "name": self._add(copied)}
        if isinstance(value, (tuple, set)):
            return {"kind": type(value).__name__, "items": self._items(list(value))}
        if isinstance(value, deque):
            return {"kind": "deque", "items": self._items(list(value)), "maxlen": value.maxlen}
        if isinstance(value, OrderedDict):
            return {"kind": "OrderedDict", "items": self._pairs(value)}
        if isinstance(value, defaultdict):
            factory = next(name for name, known in FACTORIES.items() if known is value.default_factory)
            return {"kind": "defaultdict", "factory": factory, "items": self._pairs(value)}
        if isinstance(value, array):
            return {"kind": "array.array", "typecode": value.typecode, "items": self._array(np.array(value))}
        if isinstance(value, memoryview):
            return {"kind": "memoryview", "of": self._array(np.asarray(value))}
        if isinstance(value, np.random.Generator):
            return {"kind": "generator", "state": self.encode(value.bit_generator.state)}
        raise TypeError(f"a {type(value).__name__} cannot be saved: give plain data, or list its class in SAVED.")

    def _items(self, values: list[Any]) -> list[Any]:
        # Order lists of a hundred thousand numbers are copied as they are.
        return list(values) if all(type(value) in PLAIN for value in values) else [self.encode(v) for v in values]

    def _pairs(self, value: Mapping[Any, Any]) -> list[list[Any]]:
        return [[self.encode(key), self.encode(item)] for key, item in value.items()]

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
        owner = _owner(value)
        if not owner.flags.forc:
            owner = value = np.ascontiguousarray(value)
        if id(owner) not in self._memory:
            self._alive.append(owner)
            self._memory[id(owner)] = self._add_memory(owner)
        return {
            "kind": "array",
            **self._memory[id(owner)],
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "strides": list(value.strides),
            "offset": value.__array_interface__["data"][0] - owner.__array_interface__["data"][0],
        }

    def _add_memory(self, owner: np.ndarray) -> dict[str, Any]:
        data = owner.ravel(order="K").view(np.uint8)
        end = len(data)
        # Arrays of a buffer's full capacity are mostly untouched pages of zeros.
        while end > 0 and data[max(0, end - BLOCK) : end].tobytes() == ZEROS[: min(BLOCK, end)]:
            end = max(0, end - BLOCK)
        return {"memory": self._add(torch.from_numpy(data[:end].copy())), "bytes": len(data)}

    def _add(self, tensor: Tensor) -> str:
        name = str(len(self.tensors))
        self.tensors[name] = tensor
        return name


def _owner(value: np.ndarray) -> np.ndarray:
    """The array whose memory this one is a view of."""
    while True:
        base = value.base.obj if isinstance(value.base, memoryview) else value.base
        if not isinstance(base, np.ndarray):
            return value
        value = base


@dataclass(eq=False)
class _Decoder:
    tensors: Mapping[str, Tensor]
    _objects: dict[int, Any] = field(default_factory=dict)
    _memory: dict[str, np.ndarray] = field(default_factory=dict)

    def decode(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        kind = node["kind"]
        if kind in CLASSES:
            return self._object(node)
        return getattr(self, f"_{kind.replace('.', '_')}")(node)

    def _object(self, node: Mapping[str, Any]) -> Any:
        made: Any = object.__new__(CLASSES[node["kind"]])
        self._objects[node["number"]] = made
        for name, item in node["fields"].items():
            object.__setattr__(made, name, self.decode(item))
        return made

    def _same(self, node: Mapping[str, Any]) -> Any:
        return self._objects[node["number"]]

    def _dict(self, node: Mapping[str, Any]) -> dict[Any, Any]:
        return {self.decode(key): self.decode(item) for key, item in node["items"]}

    def _OrderedDict(self, node: Mapping[str, Any]) -> OrderedDict[Any, Any]:
        return OrderedDict(self._dict(node))

    def _defaultdict(self, node: Mapping[str, Any]) -> defaultdict[Any, Any]:
        return defaultdict(FACTORIES[node["factory"]], self._dict(node))

    def _tuple(self, node: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(self.decode(node["items"]))

    def _set(self, node: Mapping[str, Any]) -> set[Any]:
        return set(self.decode(node["items"]))

    def _deque(self, node: Mapping[str, Any]) -> deque[Any]:
        return deque(self.decode(node["items"]), maxlen=node["maxlen"])

    def _tensor(self, node: Mapping[str, Any]) -> Tensor:
        return self.tensors[node["name"]]

    def _array(self, node: Mapping[str, Any]) -> np.ndarray:
        memory = self._memory.get(node["memory"])
        if memory is None:
            memory = self._memory[node["memory"]] = np.zeros(node["bytes"], np.uint8)
            stored = self.tensors[node["memory"]].numpy()
            memory[: len(stored)] = stored
        return np.ndarray(node["shape"], node["dtype"], buffer=memory, offset=node["offset"], strides=node["strides"])

    def _memoryview(self, node: Mapping[str, Any]) -> memoryview:
        return self._array(node["of"]).data

    def _array_array(self, node: Mapping[str, Any]) -> array[Any]:
        return array(node["typecode"], self._array(node["items"]).tobytes())

    def _generator(self, node: Mapping[str, Any]) -> np.random.Generator:
        made = np.random.Generator(np.random.PCG64())
        made.bit_generator.state = self.decode(node["state"])
        return made
