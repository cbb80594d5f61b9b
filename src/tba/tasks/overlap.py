"""Train rows whose question is held out too: counted, reported once and left out of training.

A policy that was trained on a question says nothing about new ones by answering it. Questions are compared by their words
in lower case: other white space or capital letters do not make another question.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from hashlib import blake2b

logger = logging.getLogger("tba.tasks")


def question_key(question: str | Sequence[dict[str, str]]) -> int:
    """64 bits, the same for equal questions: those of " Two\\nTWOS" are those of "two twos". A chat counts whole."""
    messages = [question] if isinstance(question, str) else [f"{m['role']}: {m['content']}" for m in question]
    text = "\n".join(" ".join(message.split()).casefold() for message in messages)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def not_held_out(train_keys: Sequence[int], held_out_keys: AbstractSet[int], *, data: str, held_out: str) -> list[bool]:
    """For each train row whether it may be trained on; `data` and `held_out` name the two sources in the warning."""
    kept = [key not in held_out_keys for key in train_keys]
    dropped = len(kept) - sum(kept)
    if dropped:
        words = (
            "%s: %d of %d rows to train on have a question that is held out too (%s): they are left out of training."
        )
        logger.warning(words, data, dropped, len(kept), held_out)
    return kept


def nothing_left(data: str | None) -> ValueError:
    """The error for a run that has nothing to train on. An evaluation may ask for trained questions: it needs no others."""
    return ValueError(
        f"task.data={data}: every row to train on has a question that is held out too, so nothing is left to train on. Give "
        "other train rows as task.data, or other rows to report on as task.eval_data."
    )
