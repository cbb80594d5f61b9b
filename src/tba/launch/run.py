"""What a run of either mode is made of: model and task, the ledger of visits, the recorder, and how it is interrupted.
The runs themselves are in sync_run.py and async_run.py.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from tba.config import Config
from tba.generate.make import stop_ids_of
from tba.launch.supervise import ENDING_SIGNALS
from tba.models.load import LoadedModel, load_model
from tba.observe.display import RoleStatus
from tba.observe.recorder import Recorder, RunListener
from tba.observe.run_folder import RunFolder
from tba.runtime.board import Row
from tba.runtime.leases import VisitLedger
from tba.search.loop import group_texts
from tba.tasks.base import Split, Task
from tba.tasks.registry import make_task_for
from tba.tasks.user_task import check_prompts
from tba.types import ResponseCounts


@dataclass(frozen=True, kw_only=True, eq=False)
class RunInputs:
    """RunInputs(loaded=..., task=...)"""

    loaded: LoadedModel
    task: Task

    def longest_prompt(self, *splits: Split) -> int:
        """Number of tokens of the longest prompt of these splits."""
        return max((len(prompt.token_ids) for split in splits for prompt in self.task.prompts(split)), default=1)


def load_inputs(config: Config, *, trains: bool = True) -> RunInputs:
    """Load model and data: what can be wrong with them shows before a run folder exists. `trains` is False where they are
    only evaluated."""
    loaded = load_model(config.model)
    stop_ids_of(loaded.model, loaded.tokenizer)  # refuses a model that could end no response
    task = make_task_for(config, loaded, trains=trains)
    if ":" in config.task.name:
        if trains:
            check_prompts(task, config.task, "train")
        check_prompts(task, config.task, config.evaluate.split)
    task.prompts(config.evaluate.split)  # or a split that the task lacks would only show when a searcher evaluates
    return RunInputs(loaded=loaded, task=task)


def make_ledger(config: Config, task: Task) -> VisitLedger:
    """The run's visits to the prompts of the train split."""
    return VisitLedger(len(task.prompts("train")), seed=config.seed, shuffle=config.search.shuffle)


def make_recorder(
    config: Config,
    folder: RunFolder,
    inputs: RunInputs,
    counts: ResponseCounts,
    *,
    roles: Callable[[], Sequence[RoleStatus]] = list,
    more_metrics: Callable[[], Mapping[str, float]] = dict,
    listener: RunListener | None = None,
    row: Row,
) -> Recorder:
    """`row` are the trainer's numbers that the supervisor sees."""
    return Recorder(
        config,
        folder,
        decode=partial(group_texts, inputs.loaded.tokenizer),
        reward_weights=inputs.task.reward_weights,
        counts=counts,
        roles=roles,
        more_metrics=more_metrics,
        listener=listener,
        tell_height=partial(row.__setitem__, "table_lines"),
    )


class Interrupt:
    """While active, SIGINT, SIGTERM and SIGHUP set `asked`; a second one raises KeyboardInterrupt at once. One that was
    ignored (SIGHUP under nohup) stays ignored.

    A step is never cut in the middle: half an optimizer update must not be saved.
    """

    def __init__(self) -> None:
        self.asked = False
        self.tell: Callable[[], None] = lambda: None
        """Called once, when the run is asked to end, in the middle of anything: it must not wait or write."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.tell()
