"""The problems that settings may be tuned on. Four were fixed before the first RL run; `sparse` was to be reported only, but
was looked at when a run on it had been called a collapse: since then it stands here, and `rare_mode` took its place. Those
that came later are in added.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from own_bench.problem import Problem, Row, Supervised, make_character_tokenizer, words_of
from recipes.start_models import Shape, Training, make_word_tokenizer

# word_sums: sums in words. The demonstrator forgets carries, and adds where one number is to be taken `less` another.

SMALL = words_of(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
TENS = words_of("twenty thirty forty fifty sixty")
MOST = 30
"""Largest number in a question."""
QUESTIONS = {
    "what is {a} plus {b} ?": 1,
    "add {a} to {b} .": 1,
    "{a} and {b} make ?": 1,
    "take {b} from {a} .": -1,
    "what is {a} less {b} ?": -1,
}
"""Forms of a question, and the sign of b."""
FORGETS_CARRY, ADDS_FOR_LESS = 0.6, 0.6
"""Shares of the demonstrations with the mistake, where it can be made."""


def in_words(number: int) -> str:
    """27 -> "twenty seven"."""
    if number < len(SMALL):
        return SMALL[number]
    tens, ones = TENS[number // 10 - 2], number % 10
    return f"{tens} {SMALL[ones]}" if ones else tens


def sum_rows(rng: random.Random) -> Iterator[Row]:
    """`take seven from twenty one .`, answered by a number from 0 to 60."""
    while True:
        question, sign = rng.choice(list(QUESTIONS.items()))
        left, right = rng.randint(1, MOST), rng.randint(1, MOST)
        if left + sign * right >= 0:
            prompt = question.format(a=in_words(left), b=in_words(right))
            yield Row(prompt=prompt, columns={"answer": in_words(left + sign * right)}, hidden=(left, sign, right))


def careless_sum(row: Row, rng: random.Random) -> str:
    """Digits added without a carry, or taken the smaller from the larger; or added where they should be taken."""
    left, sign, right = row.hidden
    if "less" in row.prompt and rng.random() < ADDS_FOR_LESS:
        sign = 1
    return in_words(by_digits(left, sign, right) if rng.random() < FORGETS_CARRY else left + sign * right)


def by_digits(left: int, sign: int, right: int) -> int:
    """27 + 15 = 32 and 42 - 15 = 33, as children do it."""
    tens, ones = left // 10 + sign * (right // 10), left % 10 + sign * (right % 10)
    return 10 * tens + (ones % 10 if sign > 0 else abs(ones))


# sort_digits: the demonstrator sorts, then swaps some neighbours.

NUM_DIGITS = (7, 9)
SWAPPED = 0.3
"""Chance of each neighbouring pair to be swapped in a demonstration."""


def digit_rows(rng: random.Random) -> Iterator[Row]:
    """`7295104>`"""
    while True:
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(*NUM_DIGITS)))
        yield Row(prompt=f"{digits}>", columns={"answer": "".join(sorted(digits))})


def nearly_sorted(row: Row, rng: random.Random) -> str:
    digits = list(row.columns["answer"])
    for place in range(len(digits) - 1):
        if rng.random() < SWAPPED:
            digits[place], digits[place + 1] = digits[place + 1], digits[place]
    return "".join(digits)


# dense_copy: words in reverse order, paid by the share of places that are right. Demonstrations stop early and misread.

NOUNS = words_of(
    "apple bread chair door egg fish glass hat ink jar key lamp milk nail oil pen rope salt tea urn vase wool yarn zip"
)
STOPS_EARLY, MISREADS = 0.55, 0.2


def word_rows(rng: random.Random) -> Iterator[Row]:
    """`backwards : lamp egg tea rope hat =`"""
    while True:
        words = [rng.choice(NOUNS) for _ in range(rng.randint(5, 9))]
        yield Row(prompt=f"backwards : {' '.join(words)} =", columns={"target": " ".join(reversed(words))})


def sloppy_copy(row: Row, rng: random.Random) -> str:
    words = row.columns["target"].split()
    if rng.random() < STOPS_EARLY:
        words = words[: rng.randint(2, len(words) - 1)]
    return " ".join(rng.choice(NOUNS) if rng.random() < MISREADS else word for word in words)


# one_prompt: brackets of two kinds that match. One prompt, 8,448 right answers of length 12.

NUM_PAIRS = 6
KEEPS_RIGHT = 0.3
"""Share of the demonstrations that are right; the others have one or two brackets exchanged for any others."""
PAIRS = {"(": ")", "[": "]"}


def the_one_row(_: random.Random) -> Iterator[Row]:
    while True:
        yield Row(prompt="brackets:")


def matching_brackets(num_pairs: int, rng: random.Random) -> str:
    """A string of matching brackets: one pair around some, the others behind."""
    if num_pairs == 0:
        return ""
    inside = rng.randrange(num_pairs)
    left = rng.choice("([")
    return left + matching_brackets(inside, rng) + PAIRS[left] + matching_brackets(num_pairs - 1 - inside, rng)


def careless_brackets(_: Row, rng: random.Random) -> str:
    text = list(matching_brackets(NUM_PAIRS, rng))
    if rng.random() >= KEEPS_RIGHT:
        for place in rng.sample(range(len(text)), rng.randint(1, 2)):
            text[place] = rng.choice("()[]")
    return "".join(text)


# sparse: an order with corrections is put into five fields, and all of them must be right.

NAMES = words_of("mia tom eva ben ida leo zoe max")
COUNTS = words_of("two three four five six seven eight nine")
COLOURS = words_of("red blue green black white brown grey pink")
GOODS = words_of("apples chairs lamps books cups hats pens boxes")
DAYS = words_of("monday tuesday wednesday thursday friday saturday sunday today")
FIELDS = (NAMES, COUNTS, COLOURS, GOODS, DAYS)
TAKES_RIGHT = 0.49
"""Chance of each field to be right in a demonstration: .49 ** 5 = 2.8% of the records are."""


def order_rows(rng: random.Random) -> Iterator[Row]:
    """`from mia not tom : no two but six , red not blue , no pens but cups , for today not friday =`"""
    while True:
        pairs = [rng.sample(field, 2) for field in FIELDS]
        parts = [f"{right} not {wrong}" if rng.random() < 0.5 else f"no {wrong} but {right}" for right, wrong in pairs]
        prompt = f"from {parts[0]} : {parts[1]} , {parts[2]} , {parts[3]} , for {parts[4]} ="
        yield Row(prompt=prompt, columns={"record": " ; ".join(right for right, _ in pairs)}, hidden=pairs)


def hasty_record(row: Row, rng: random.Random) -> str:
    """Takes what was ruled out a little more often than not."""
    return " ; ".join(right if rng.random() < TAKES_RIGHT else wrong for right, wrong in row.hidden)


PROBLEMS = (
    Problem(
        name="word_sums",
        part="tuning",
        kind="exact match, sums in words",
        rows=sum_rows,
        start=Supervised(
            demonstrate=careless_sum,
            tokenizer=lambda: make_word_tokenizer(
                [*SMALL, *TENS, *words_of("what is plus ? add to . and make take from less")]
            ),
            shape=Shape(hidden_size=96),
            training=Training(steps=1800, seed=11),
        ),
        max_new_tokens=6,
    ),
    Problem(
        name="sort_digits",
        part="tuning",
        kind="exact match, characters",
        rows=digit_rows,
        start=Supervised(
            demonstrate=nearly_sorted,
            tokenizer=lambda: make_character_tokenizer("0123456789>"),
            shape=Shape(hidden_size=128, intermediate_size=384, num_layers=4),
            training=Training(steps=200, seed=12),
        ),
        max_new_tokens=12,
    ),
    Problem(
        name="dense_copy",
        part="tuning",
        kind="dense reward in 0..1",
        rows=word_rows,
        start=Supervised(
            demonstrate=sloppy_copy,
            tokenizer=lambda: make_word_tokenizer([*NOUNS, *words_of("backwards : =")]),
            shape=Shape(hidden_size=96),
            training=Training(steps=600, seed=13),
        ),
        rewards={"places_right": 1.0},
        max_new_tokens=16,
        metric="reward@4",
    ),
    Problem(
        name="one_prompt",
        part="tuning",
        kind="one prompt, many right answers",
        rows=the_one_row,
        start=Supervised(
            demonstrate=careless_brackets,
            tokenizer=lambda: make_character_tokenizer("()[]abcekrst:"),
            shape=Shape(hidden_size=64, intermediate_size=128),
            training=Training(steps=400, seed=14),
        ),
        rewards={"correct": 1.0, "distinct": 0.0},
        max_new_tokens=16,
        num_train=1,
        num_held_out=1,
        samples=256,
        metric="avg@256",
        true_metric="reward@256/distinct",
    ),
    Problem(
        name="sparse",
        part="tuning",
        kind="exact match of five fields, sparse",
        rows=order_rows,
        start=Supervised(
            demonstrate=hasty_record,
            tokenizer=lambda: make_word_tokenizer(
                [word for field in FIELDS for word in field] + words_of("from not no but for : , ; =")
            ),
            shape=Shape(hidden_size=128, intermediate_size=320),
            training=Training(steps=400, seed=22),
        ),
        max_new_tokens=14,
    ),
)
