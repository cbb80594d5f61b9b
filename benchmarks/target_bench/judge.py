"""A reward that waits as a remote judge does: a call for the responses of one visit takes a fixed time and no CPU.

Rows whose column `waits` is false are judged at once: those that the run is only measured on.
"""

import time

SECONDS = 2.0
"""Time that a call takes."""


def judged(completions: list[str], answer: list[str], waits: list[bool], **_: object) -> list[float]:
    """1 where what follows `####` is the answer."""
    if waits[0]:
        time.sleep(SECONDS)
    return [float(text.rpartition("####")[2].strip() == want) for text, want in zip(completions, answer)]
