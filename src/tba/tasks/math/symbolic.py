r"""Whether two formulas are equal, by math-verify and sympy, in a process of its own.

sympy may compute for hours over one line of a model's babble (`9^{9^{9^9}}`), inside C code that no alarm interrupts, and
math-verify's own time limit works in a main thread of POSIX alone. So comparisons run in a worker that is killed when one
takes too long. A comparison that fails there counts as not equal: the first is reported, all are counted.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tba.runtime.links import Failed
from tba.tasks.rewards.worker import JobService, WorkerProcess

logger = logging.getLogger("tba.tasks")

START_SECONDS = 120.0
"""Deadline for the worker to import sympy."""
COMPARISON_SECONDS = 3.0
"""Deadline of one comparison. Most take milliseconds; one that takes longer is killed."""
WORKER_BYTES = 4 * 2**30
"""Memory of the worker: a large power must not take the machine's."""
RELATIVE_TOLERANCE = 1e-4
"""Relative difference beyond which two numbers are not equal, however small they are."""
READY = "ready"


@cache
def symbolic_equality() -> SymbolicEquality:
    """Comparison of formulas in this process: tasks share its worker."""
    return SymbolicEquality()


def require_math_verify() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            "task.name=math compares formulas with the `math-verify` package, which is not installed: "
            "`pip install 'tba-rl[math]'` or `pip install math-verify`."
        )


class SymbolicEquality:
    """`equal(given, wanted)`, never longer than the limit and never an exception. The worker starts with the first call."""

    def __init__(self, *, comparison_seconds: float = COMPARISON_SECONDS) -> None:
        self._comparison_seconds = comparison_seconds
        self._worker: WorkerProcess | None = None
        self._lock = threading.Lock()
        self.num_failures = 0
        """Number of comparisons that were killed or raised."""
        # Samples of one prompt often give the same wrong answer.
        self.equal = lru_cache(maxsize=10_000)(self._equal)

    def close(self) -> None:
        """End the worker; the next call starts another. Without it the worker ends with this process."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _equal(self, given: str, wanted: str) -> bool:
        # One worker, one question at a time: threads of a searcher must not take each other's answers.
        with self._lock:
            try:
                answer = self._ask(given, wanted)
            except OSError as error:  # no process could be started
                answer = f"{type(error).__name__}: {error}"
            except BaseException:  # Ctrl-C: an answer that comes after all must not be taken for the next one's
                self.close()
                raise
        if isinstance(answer, bool):
            return answer
        self.num_failures += 1
        if self.num_failures == 1:
            failed = f"{given!r} could not be compared with {wanted!r} ({answer}): not equal."
            logger.warning("%s", f"{failed} Reported for the first only.")
        return False

    def _ask(self, given: str, wanted: str) -> bool | str:
        """The worker's answer, or the reason why there is none."""
        if self._worker is None or self._worker.link.closed:
            # The guard and limits of reward workers: sympy is no safer than a user's code.
            self._worker = WorkerProcess(Comparer, log=Path(os.devnull), memory_bytes=WORKER_BYTES)
            if (word := self._worker.link.receive(START_SECONDS)) != READY:
                self.close()
                return f"the worker did not start: {word.error if isinstance(word, Failed) else 'no word from it'}"
        self._worker.link.send((given, wanted))
        answer: Any = self._worker.link.receive(self._comparison_seconds)
        if isinstance(answer, bool | str):
            return answer
        # Asked before close(), after which the link is closed in any case.
        died = isinstance(answer, Failed) or self._worker.link.closed
        self.close()
        return "the worker died" if died else f"it took longer than {self._comparison_seconds:g} s"


class Comparer(JobService):
    """Compares formulas in the worker. It imports no torch, so that a killed one is soon replaced."""

    greeting = READY

    def __init__(self) -> None:
        from math_verify import LatexExtractionConfig

        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._how = [LatexExtractionConfig(boxed_match_priority=0)]
        # The first loads grammars, for which a busy machine takes longer than one comparison may take.
        self("x+1", "1+x")

    def __call__(self, given: str, wanted: str) -> bool | str:
        """Whether they are equal, or the error of sympy."""
        from math_verify import parse, verify

        try:
            # Their alarms are off: the parent kills.
            left, right = (parse(f"\\boxed{{{text}}}", self._how, parsing_timeout=None) for text in (given, wanted))
            # verify takes the stored answer first, and its rules are not symmetric.
            if not verify(right, left, timeout_seconds=None):
                return False
            # math-verify rounds to six decimals, so all tiny numbers agree there. parse gives a list, of which the first
            # is the parsed expression.
            numbers = [parsed[0] for parsed in (left, right) if getattr(parsed[0], "is_number", False)]
            if len(numbers) < 2 or numbers[1].evalf() == 0:
                return True
            return not abs((numbers[0] / numbers[1]).evalf() - 1) > RELATIVE_TOLERANCE
        except Exception as error:  # sympy may raise anything; the parent gets the message and counts it
            return f"{type(error).__name__}: {error}"[:200]
