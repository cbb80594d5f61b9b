"""Checkpoints: a folder that transformers loads (weights, tokenizer, generation config) with the run's state beside it.

    model.safetensors, config.json, tokenizer.json ...    the policy
    optimizer.safetensors, Critic.safetensors ...         Adam's moments, fp32 master weights, learned heads
    state.json, state.safetensors                         every part of the run that decides what comes next
    trainer.json                                          step and seed, for readers
    manifest.json                                         size and SHA-256 of every other file, written last

The trainer copies its tensors and goes on; a background thread writes, syncs, renames and drops folders, one after the
other, so that training never waits for the disk unless it asks for a second whole checkpoint before the first is written.
A process may be killed at any line here: what it leaves has the ending .partial, or lacks the manifest, and does not count.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tba.models.load import has_lora
from tba.observe.display import Stability
from tba.observe.files import WriteFailures, sync
from tba.observe.run_folder import MANIFEST, RunFolder
from tba.observe.watches import BetaWatch, LostResponses, MismatchWatch, RewardSignal
from tba.replay.draw import DrawWithoutReplacement, PromptDraws
from tba.types import Batch, HighWaterMarks, Totals, Weights

logger = logging.getLogger("tba")

OPTIMIZER, STATE, ARRAYS, TRAINER = "optimizer.safetensors", "state.json", "state.safetensors", "trainer.json"
OWN = ("pinned", "held", "extra", "best")  # fields of a checkpoint about the checkpoints themselves


class CorruptCheckpoint(RuntimeError):
    """A checkpoint is not what was written; the message names the file."""


@dataclass
class Checkpoints:
    """The checkpoints of a run: checkpoints/step-N, of which the last `keep` stay and those that the collapse guard holds,
    and best-step-N, the weights whose evaluation was the best so far."""

    folder: RunFolder
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: Stateful
    heads: Sequence[nn.Module]
    parts: Mapping[str, Stateful]  # other parts that are saved and restored, by name
    keep: int  # 0 = none is written
    failures: WriteFailures = field(default_factory=WriteFailures)
    """Takes down what could not be written: the disk may be full for a while, and training goes on."""
    seed: int = 0  # seed of the run, written to trainer.json
    gather_weights: Callable[[], dict[str, Tensor]] | None = None
    """Makes copies of the model's tensors, by name, where they are spread over ranks; None = the model has them."""
    pinned: int | None = field(default=None, init=False)  # step whose checkpoint stays, whatever its age
    held: set[int] = field(default_factory=set, init=False)
    """Steps whose checkpoints stay as long as the collapse guard wants them."""
    extra: set[int] = field(default_factory=set, init=False)
    """Steps that were saved for the guard alone. They do not count in `keep`."""
    best: tuple[int, float] | None = field(default=None, init=False)  # step and score of the best evaluation so far
    _saved: int | None = field(default=None, init=False)  # step of the newest regular checkpoint of this process
    _saved_best: int | None = field(default=None, init=False)
    """Step of the best evaluation in the newest regular checkpoint: a run resumed there needs its weights."""
    _evaluated: set[int] = field(default_factory=set, init=False)
    """Steps whose weights were saved for an evaluation that has not come yet."""
    _pending: list[Future[None]] = field(default_factory=list, init=False)
    _last_whole: Future[None] | None = field(default=None, init=False)
    """The newest write of a whole state: the copies of two would need twice the memory."""
    _last_evaluated: Future[None] | None = field(default=None, init=False)
    """The newest write of weights alone, which are small beside a state: it need not wait for one to be written."""

    def __post_init__(self) -> None:
        # One thread, so that writes, renames and drops happen in the order in which they were asked for.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer")

    # What the trainer asks for. All of it returns as soon as everything is copied.

    def save(self, step: int) -> None:
        """Write checkpoints/step-N and drop the oldest beyond `keep`."""
        if self.keep == 0:
            return
        if step != self._saved:
            # One that the guard has of this step is written over, and counts in `keep` from now on.
            self.extra.discard(step)
            self._write(step)
            self._saved, self._saved_best = step, None if self.best is None else self.best[0]
        # As they are now: the trainer goes on changing its sets while the writer works.
        stay, extra, best = {self.pinned, *self.held}, set(self.extra), self._saved_best

        def drop_old() -> None:
            """After the new checkpoint is there: a kill in between leaves one too many."""
            by_step = self.folder.checkpoints_by_step()
            regular = sorted(by_step.keys() - extra)
            for old in regular[: -self.keep]:
                if old not in stay:
                    drop_folder(by_step[old])
            # One that could not be written is no longer missed when it would be dropped now.
            for path in [path for path in self.failures.lost if path.parent == self.folder.checkpoints]:
                if sum(step > int(path.name.removeprefix("step-")) for step in regular) >= self.keep:
                    self.failures.lost.pop(path)
            self._drop_outdone(best)

        self._later("checkpoints to drop in", self.folder.checkpoints, drop_old)

    def save_held(self, step: int) -> None:
        """Write the checkpoint of a step that is held, unless it has just been saved."""
        if step != self._saved:
            self.extra.add(step)
            self._write(step)

    def release(self, step: int) -> None:
        self.held.discard(step)
        if step in self.extra:
            self.extra.discard(step)
            self._drop_later(f"step-{step}")

    def save_evaluated(self, step: int) -> None:
        """Write the weights that an evaluation was asked for: they are gone when its result arrives."""
        if self.keep > 0:
            self._await(self._last_evaluated)
            self._evaluated.add(step)
            self._last_evaluated = self._write_later("checkpoint best-step-N, now", f"evaluated-step-{step}", {}, {})

    def keep_best(self, step: int, score: float) -> None:
        """An evaluation has come: its weights replace the best so far, or are dropped; of equal ones the later stay. Where a
        searcher came to it late, it is of a version a few steps newer than what was saved when it was asked."""
        asked = max((found for found in self._evaluated if found <= step), default=step)  # none for the start or keep=0
        # Weights that were asked for earlier are not waited for any longer.
        passed = {found for found in self._evaluated if found <= asked}
        self._evaluated -= passed
        if self.best is None or score >= self.best[1]:
            self.best, saved_best = (asked, score), self._saved_best
            if asked in passed:
                passed.remove(asked)

                def rename() -> None:
                    source = self.folder.checkpoints / f"evaluated-step-{asked}"
                    if source.exists():  # or it could not be written, which was reported, or the user has deleted it
                        # The best that the newest regular checkpoint names stays beside it.
                        for outdone, path in self.folder.checkpoints_by_step("best-step-").items():
                            if outdone != saved_best:
                                drop_folder(path)
                        replace_folder(source, self.folder.checkpoints / f"best-step-{asked}")

                self._later("best checkpoint", self.folder.checkpoints, rename)
        for found in sorted(passed):
            self._drop_later(f"evaluated-step-{found}")

    def recall_best(self, late: Mapping[int, float]) -> None:
        """Count evaluations, scores by step, that came after the checkpoint that was loaded was saved: the weights of the
        best of them have that name."""
        for kept in sorted(self.folder.checkpoints_by_step("best-step-")):
            judged = min((step for step in late if step >= kept), default=None)
            if kept == self._saved_best or judged is None:
                continue
            if self.best is None or late[judged] >= self.best[1]:
                self.best = (kept, late[judged])

    def drop_unjudged(self) -> None:
        """The run is over: weights whose evaluation never came are of no use."""
        self._evaluated.clear()
        for path in self.by_step("evaluated-step-").values():
            drop_folder(path)

    def drop_outdone(self) -> None:
        """The run is over and saved: of the best evaluations only the last is of use."""
        self.wait()
        self._drop_outdone(None if self.best is None else self.best[0])

    def drop_after(self, step: int) -> None:
        """Drop the checkpoints of later steps, which will be made again, and what is left of one that was half written."""
        for leftover in self.folder.checkpoints.glob(".*.partial"):
            shutil.rmtree(leftover)
        found = [item for prefix in ("step-", "best-step-") for item in self.folder.checkpoints_by_step(prefix).items()]
        # The newest goes first: a run that is killed in between goes on from one whose steps are all in the files.
        for _, path in sorted((item for item in found if item[0] > step), reverse=True):
            logger.warning("%s is dropped: the run goes on from step %d.", path, step)
            drop_folder(path)
        self.drop_unjudged()

    def by_step(self, prefix: str = "step-") -> dict[int, Path]:
        """Whole checkpoints whose name begins with `prefix`, also the one that is being written."""
        self.wait()
        return self.folder.checkpoints_by_step(prefix)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint: weights, optimizer, heads and every part. What came after it stays (drop_after)."""
        self.wait()  # a run that goes back may still be writing one
        # The master weights are in this file, and the model's follow from them: model.safetensors is for readers.
        self.optimizer.load_state(load_file(path / OPTIMIZER))
        for head in self.heads:
            head.load_state_dict(load_file(path / f"{type(head).__name__}.safetensors"))
        try:
            state = read_state(path)
            for name in OWN:
                setattr(self, name, state[name])
            for name, part in self.parts.items():
                part.load_state(state["parts"][name])
        except KeyError as error:
            raise ValueError(
                f"checkpoint {path} was saved by another version of tba: its state has no {error}. Go on with that version, "
                f"or start a new run from its weights, model.path={path}."
            ) from error
        step = json.loads((path / TRAINER).read_text(encoding="utf-8"))["step"]
        self._saved = None if step in self.extra else step
        self._saved_best = None if self.best is None else self.best[0]

    def wait(self) -> None:
        """Wait until everything is on disk; raises what went wrong there."""
        pending, self._pending = self._pending, []
        errors = [error for future in pending if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    # Copies, in the trainer's thread

    def _write(self, step: int) -> None:
        # Runs in the trainer's thread, between two steps: what is copied here is of one moment.
        self._await(self._last_whole)
        states = {name: part.state() for name, part in self.parts.items()}
        tree, arrays = take_snapshot({"parts": states, **{name: getattr(self, name) for name in OWN}})
        tensors: dict[str, Mapping[str, Any]] = {OPTIMIZER: _copied(self.optimizer.state()), ARRAYS: arrays}
        tensors |= {f"{type(head).__name__}.safetensors": _copied(head.state_dict()) for head in self.heads}
        texts = {STATE: tree, TRAINER: {"step": step, "seed": self.seed}}
        kind = "checkpoint of the collapse guard, now" if step in self.extra else "checkpoint"
        self._last_whole = self._write_later(kind, f"step-{step}", tensors, texts, lost=step not in self.extra)

    def _write_later(
        self,
        kind: str,
        name: str,
        tensors: Mapping[str, Mapping[str, Any]],
        values: Mapping[str, Any],
        *,
        lost: bool = False,
    ) -> Future[None]:
        """Copy the model beside tensors and arrays that are copies already, and leave the rest to the writer."""
        if self.gather_weights is not None:
            weights = self.gather_weights()
        else:
            whole, adapted = self.model.state_dict(), has_lora(self.model)
            weights = _copied({name: part for name, part in whole.items() if not adapted or ".lora_" in name})
        path, tokenizer_files = self.folder.checkpoints / name, self._tokenizer_files

        def write() -> None:
            """The folder appears whole or not at all."""
            partial_path = path.with_name(f".{path.name}.partial")
            # A process that was killed may have left a part of the same step.
            shutil.rmtree(partial_path, ignore_errors=True)
            self.model.save_pretrained(partial_path, state_dict=weights)
            for file, content in tokenizer_files.items():
                (partial_path / file).write_bytes(content)
            for file, named in tensors.items():
                # Those of ARRAYS are NumPy's, all others are tensors.
                (save_arrays if file == ARRAYS else save_file)(dict(named), partial_path / file)
            for file, value in values.items():
                (partial_path / file).write_text(json.dumps(value), encoding="utf-8")
            # First the manifest, then the rename: a kill in between leaves a folder that does not count.
            write_manifest(partial_path)
            replace_folder(partial_path, path)

        return self._later(kind, path, write, must_not_be_lost=lost)

    @cached_property
    def _tokenizer_files(self) -> dict[str, bytes]:
        """Contents of the tokenizer's files. Read once and not by the writer: a fast tokenizer that is saved in one thread
        while another encodes raises `Already borrowed`."""
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}

    def _later(self, kind: str, path: Path, job: Callable[[], None], *, must_not_be_lost: bool = False) -> Future[None]:
        """Have the writer do something; raises what went wrong there before."""
        for done in [future for future in self._pending if future.done()]:
            self._await(done)

        def try_to() -> None:
            with self.failures.tolerated(kind, path, must_not_be_lost=must_not_be_lost):
                job()

        self._pending.append(self._writer.submit(try_to))
        return self._pending[-1]

    def _drop_later(self, name: str) -> None:
        path = self.folder.checkpoints / name
        self._later("checkpoint to drop,", path, lambda: drop_folder(path))

    def _await(self, write: Future[None] | None) -> None:
        """Wait until one of them is on disk; raises what went wrong there, once."""
        if write in self._pending:
            self._pending.remove(write)
            write.result()

    def _drop_outdone(self, best: int | None) -> None:
        bests = self.folder.checkpoints_by_step("best-step-")
        # Only once the best itself is there: it may have failed to be written.
        for outdone in bests if best in bests else ():
            if outdone != best:
                drop_folder(bests[outdone])


def read_state(path: Path) -> Any:
    tree = json.loads((path / STATE).read_text(encoding="utf-8"))
    return restore(tree, load_arrays(path / ARRAYS))


def last_row_of(path: Path) -> int | None:
    """Number of the last group in a checkpoint; None = it was saved without durable replay."""
    node = json.loads((path / STATE).read_text(encoding="utf-8"))
    for name in ("parts", "trainer", "last_row"):
        node = dict(node["value"]).get(name)
    return node


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU; tied tensors stay tied, so that they are written once."""
    copies: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    found = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True).contiguous()
        found[name] = copies[key]
    return found


def find_checkpoint(folder: RunFolder) -> Path | None:
    """The newest whole checkpoint that can be resumed, or None. A corrupt one is named in a warning and set aside."""
    for _, path in sorted(folder.checkpoints_by_step().items(), reverse=True):
        try:
            check_manifest(path)
            return path
        except CorruptCheckpoint as error:
            aside = path.with_name(f"corrupt-{path.name}")
            # os.replace moves a folder only where there is none, or an empty one.
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)
            logger.warning("%s It is set aside as %s.", error, aside)
    return None


def write_manifest(path: Path) -> None:
    """Sync every file of a folder to disk and write manifest.json: from now on the folder is whole."""
    files = {}
    for file in sorted(path.iterdir()):
        files[file.name] = {"bytes": file.stat().st_size, "sha256": _digest(file)}
        sync(file)
    manifest = path / MANIFEST
    manifest.write_text(json.dumps({"format": 1, "files": files}, indent=2) + "\n", encoding="utf-8")
    # The manifest is synced last: a power failure before leaves a folder that does not count.
    for name in files:  # safetensors leaves its files to the owner alone: as the umask says
        (path / name).chmod(manifest.stat().st_mode)
    sync(manifest)
    sync(path)


def check_manifest(path: Path) -> None:
    """Raise CorruptCheckpoint unless every file is there, as it was written."""
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"checkpoint {path} has no manifest that can be read ({error}).") from None
    for name, wanted in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != wanted["bytes"]:
            size = file.stat().st_size if file.is_file() else "no"
            raise CorruptCheckpoint(f"checkpoint {path} is damaged: {name} has {size} bytes, not {wanted['bytes']}.")
        if _digest(file) != wanted["sha256"]:
            raise CorruptCheckpoint(
                f"checkpoint {path} is damaged: {name} has another checksum than when it was written."
            )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def drop_folder(path: Path) -> None:
    """Remove a checkpoint, unless it is gone, so that no part of it is ever taken for a whole one."""
    leaving = path.with_name(f".{path.name}.dropped.partial")
    with suppress(FileNotFoundError):  # a user may tidy up too
        os.replace(path, leaving)
        shutil.rmtree(leaving)


def replace_folder(source: Path, target: Path) -> None:
    drop_folder(target)
    os.replace(source, target)
    # The new name is in the folder above, which has to reach the disk too.
    sync(target.parent)


# --- the state of a run as plain data: a JSON tree and named tensors, never pickle -----------------------------------
#
# `take_snapshot` copies the states of a run's parts at once, so that the run can go on while the copy is written. `restore`
# builds the same things again, with dicts in their order and random generators where they were: a restored replay buffer
# draws and evicts as it would have done.

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
    """A part of a run that decides what comes next. Its state is copied before it changes again."""

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
