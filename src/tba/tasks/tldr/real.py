"""Rows of the real edition: posts with the summaries that people wrote.

    {"query": "... POST: I went for a run and ...\\n\\nTL;DR:", "reference_response": " I broke my foot.<|endoftext|>"}

The post may also be called `prompt`, the summary `reference` or `summary`. Held out are the rows of task.eval_data, or the
validation rows of the data (the paper evaluates there), or a folder's test rows. Those to tune on, split `validation`, are
train rows that a hash of the post picks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tba.config import TaskConfig
from tba.tasks.base import Split
from tba.tasks.maths.questions import Problem, Source, make_splits, read_problems
from tba.tasks.rows import SUFFIXES, BadRow, Row, prompt_column, require_object, text_column

PROMPT_COLUMNS = ("query", "prompt")
REFERENCE_COLUMNS = ("reference_response", "reference", "summary")
"""The first that a row has counts."""

WHY_MISSING: dict[Split, str] = {
    "validation": "task.num_validation_prompts is 0: set it to a number of train posts to tune on.",
    "held_out": "task.data={data} is one file, taken as the train rows. Give the rows to report on as task.eval_data, or a "
    "folder with both as task.data, or evaluate on evaluate.split=validation.",
}


def read_splits(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> dict[Split, list[Problem]]:
    """The splits that the data has, in the order of their files: posts as questions, reference summaries as answers."""
    assert config.data is not None, "only the real edition has rows"
    source = Source(hub_subset="default", read=lambda row: read_row(row, tokenizer))
    held_out = config.eval_data or config.data
    has_held_out = config.eval_data is not None or not Path(held_out).expanduser().is_file()
    return make_splits(
        config,
        read_problems(config, config.data, "train", source),
        read_problems(config, held_out, held_out_name(held_out), source) if has_held_out else None,
    )


def held_out_name(data: str) -> str:
    """Which rows of a folder or hub dataset are held out: `validation`, or `test` of a folder that has no such file."""
    folder = Path(data).expanduser()
    if not folder.is_dir():
        return "validation"
    for name in ("validation", "test"):
        if any((folder / f"{name}{suffix}").is_file() for suffix in SUFFIXES):
            return name
    raise ValueError(
        f"task.data: folder {folder} has no rows to report on: it needs validation.jsonl or test.jsonl (or .jsonl.gz), or "
        "give them as task.eval_data."
    )


def read_row(row: Row, tokenizer: PreTrainedTokenizerBase) -> Problem:
    require_object(row, columns="a `query` and a `reference_response`")
    question = prompt_column(row, _first_column(row, PROMPT_COLUMNS))
    column = _first_column(row, REFERENCE_COLUMNS)
    # The paper's data has the EOS as text at the end; scorers add the token themselves.
    reference = text_column(row, column).strip().removesuffix(tokenizer.eos_token or "").strip()
    if not reference:
        raise BadRow("empty reference", f"{row.place}: `{column}` is empty.")
    # A space parts it from the prompt, as in what a policy writes.
    return Problem(line=row.line, question=question, answer=f" {reference}", place=row.place)


def _first_column(row: Row, columns: Sequence[str]) -> str:
    """The first of these that the row has; if none, the first, which the error then names."""
    return next((column for column in columns if column in row.value), columns[0])
