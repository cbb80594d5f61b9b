"""Problems for pretrained models: a story model of 15M parameters and a chat model of 135M.

The models are third parties' repackagings, fetched by shared/tools/real_model.py where a folder above the checkout has it.
Which problem is in which part was fixed before the first RL run on it.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from own_bench.problem import CannotFetch, Fetched, Problem, Row, words_of

TOOL = Path("shared/tools/real_model.py")
"""Beside the checkout or above it; chat models need the package gguf."""

ANIMALS = words_of("cat dog bird fish frog bear duck mouse pig cow horse rabbit fox owl bee ant lion hen sheep turtle")
OBJECTS = words_of(
    "ball hat cake book cup box car boat drum kite bell spoon coat sock lamp rope apple egg flower shoe bag ring key map"
)
PLACES = words_of("park beach farm forest garden house kitchen lake school shop river hill barn zoo cave bridge")
NAMES = words_of("Tom Lily Ben Sue Max Mia Sam Anna Tim Jane Jack Lucy")
FEELINGS = words_of("happy sad angry scared proud tired shy brave")


def three_word_rows(rng: random.Random) -> Iterator[Row]:
    """The story has to name an animal, an object and a place. (tuning)"""
    while True:
        words = [rng.choice(ANIMALS), rng.choice(OBJECTS), rng.choice(PLACES)]
        yield Row(prompt=f"A story with the words {', '.join(words)}.\nOnce upon a time", columns={"words": words})


def two_friend_rows(rng: random.Random) -> Iterator[Row]:
    """The story has to name two children and what they found: other words in another form. (reported)"""
    while True:
        (first, second), found = rng.sample(NAMES, 2), rng.choice(OBJECTS)
        prompt = f"{first} and {second} found a {found}.\nThis is what they did."
        yield Row(prompt=prompt, columns={"words": [first, second, found]})


def opening_rows(rng: random.Random) -> Iterator[Row]:
    """`One day, Lily went to the park with a red ball.`"""
    while True:
        name, place, thing = rng.choice(NAMES), rng.choice(PLACES), rng.choice(OBJECTS)
        adjective = rng.choice(words_of("red big old new small blue"))
        yield Row(prompt=f"One day, {name} went to the {place} with a {adjective} {thing}.", columns={"name": name})


def feeling_rows(rng: random.Random) -> Iterator[Row]:
    """Rows that begin a story, such as `Tom was sad.`"""
    while True:
        name, other, place = rng.choice(NAMES), rng.choice(ANIMALS), rng.choice(PLACES)
        yield Row(prompt=f"{name} was {rng.choice(FEELINGS)}. {name} saw a {other} near the {place}.")


def person_rows(rng: random.Random) -> Iterator[Row]:
    """A request for a JSON object, as a user's message."""
    while True:
        name, age, city = (
            rng.choice(NAMES),
            rng.randint(5, 80),
            rng.choice(words_of("Paris Rome Oslo Lima Cairo Delhi")),
        )
        content = f"{name} is {age} years old and lives in {city}. Write this as JSON with the keys name, age and city."
        yield Row(prompt=[{"role": "user", "content": content}], columns={"name": name, "age": age, "city": city})


def small_sum_rows(rng: random.Random) -> Iterator[Row]:
    """`What is 7 plus 4? Reply with only the number.`, as a user's message."""
    questions = ("What is {a} plus {b}?", "How much is {a} + {b}?", "Add {a} and {b}.")
    while True:
        left, right = rng.randint(1, 20), rng.randint(1, 20)
        content = f"{rng.choice(questions).format(a=left, b=right)} Reply with only the number."
        yield Row(prompt=[{"role": "user", "content": content}], columns={"answer": str(left + right)})


def fetch(name: str, folder: Path) -> None:
    tools = [parent / TOOL for parent in Path(__file__).resolve().parents if (parent / TOOL).is_file()]
    if not tools:
        raise CannotFetch(f"no folder above {Path(__file__).resolve().parent} has {TOOL}, which fetches the model.")
    command = [sys.executable, str(tools[0]), name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CannotFetch(f"{tools[0]} failed: {reason}")


STORIES = Fetched(fetch=partial(fetch, "stories15m"))
SMOLLM = Fetched(fetch=partial(fetch, "smollm2-135m"))
story = partial(
    Problem, start=STORIES, max_new_tokens=64, metric="reward@4", num_train=1_000, num_held_out=50, steps=60
)
chat = partial(
    Problem,
    start=SMOLLM,
    metric="reward@4",
    num_train=1_000,
    num_held_out=50,
    steps=60,
    settings={"train.responses_per_step": 32},
)

PROBLEMS = (
    story(name="three_words", part="real_tuning", kind="content: words that the prompt names", rows=three_word_rows,
          rewards={"named": 1.0}),
    story(name="dialogue", part="real_tuning", kind="style: direct speech", rows=opening_rows, rewards={"spoken": 1.0}),
    story(name="happy", part="real_tuning", kind="sentiment by a list of words", rows=feeling_rows,
          rewards={"cheerful": 1.0}),
    chat(name="json_person", part="real_tuning", kind="format: JSON with given keys", rows=person_rows,
         rewards={"parses": 0.4, "keys": 0.3, "values": 0.3}, max_new_tokens=48),
    story(name="two_friends", part="real_reported", kind="content: words that the prompt names", rows=two_friend_rows,
          rewards={"named": 1.0}),
    story(name="brief", part="real_reported", kind="length: short sentences", rows=feeling_rows, rewards={"short": 1.0}),
    story(name="rhyme", part="real_reported", kind="rhyme: sentences that end alike", rows=opening_rows,
          rewards={"rhymed": 1.0}),
    story(name="rubric", part="real_reported", kind="a rubric of four parts", rows=opening_rows,
          rewards={"hero": 0.25, "reason": 0.25, "question": 0.25, "varied": 0.25}),
    chat(name="chat_sums", part="real_reported", kind="sums, right or wrong", rows=small_sum_rows,
         rewards={"correct": 1.0}, metric="avg@4", max_new_tokens=12),
)  # fmt: skip
