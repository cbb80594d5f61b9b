"""The four problems that are only ever reported: no setting is chosen by looking at them. Fixed before their first run."""

from __future__ import annotations

import random
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from own_bench.problem import Problem, Row, Supervised, words_of
from recipes.start_models import Shape, Training, make_word_tokenizer

# long_sums: several numbers added one after the other in written columns, 60 to 120 tokens. Carries get lost.

NUM_TERMS = (3, 3, 4, 5)
LOSES_CARRY = {1: 0.1, 10: 0.4, 100: 0.0}
"""Chance of a carry out of the units or the tens to be lost in a demonstration; what follows builds on the wrong sum."""


def long_sum_rows(rng: random.Random) -> Iterator[Row]:
    """`3 8 + 4 5 + 2 7 =`"""
    while True:
        terms = [rng.randint(10, 99) for _ in range(rng.choice(NUM_TERMS))]
        prompt = " + ".join(" ".join(str(term)) for term in terms) + " ="
        yield Row(prompt=prompt, columns={"answer": str(sum(terms))}, hidden=terms)


def written_sum(row: Row, rng: random.Random) -> str:
    """`8 + 5 = 1 3 , 3 + 4 + 1 = 8 , 0 + 0 = 0 so 0 8 3 ; ... answer 1 1 0`: units, tens, hundreds of each addition."""
    total, *others = row.hidden
    lines = []
    for term in others:
        words, total = add_in_columns(total, term, rng)
        lines.append(words)
    return f"{' ; '.join(lines)} ; answer {' '.join(str(total))}"


def add_in_columns(left: int, right: int, rng: random.Random) -> tuple[str, int]:
    """The written addition and what it comes to."""
    columns, carry, result = [], 0, 0
    for place in (1, 10, 100):
        one, other = left // place % 10, right // place % 10
        column = one + other + carry
        carried = f" + {carry}" if carry else ""
        columns.append(f"{one} + {other}{carried} = {' '.join(str(column))}")
        carry = 1 if column >= 10 and rng.random() >= LOSES_CARRY[place] else 0
        result += place * (column % 10)
    return f"{' , '.join(columns)} so {' '.join(f'{result:03d}')}", result


# rare_mode: turn a row of letters round; most demonstrations copy it or sort it, one in twelve does what is asked.

LETTERS = "abcdefgh"
SORTS, TURNS_ROUND = 0.32, 0.08
"""Shares of the demonstrations; the rest copies."""


def letter_rows(rng: random.Random) -> Iterator[Row]:
    """`turn c a f b round :`; rows that read the same sorted and turned round are left out."""
    while True:
        letters = rng.sample(LETTERS, rng.randint(4, 5))
        if letters[::-1] != sorted(letters):
            yield Row(
                prompt=f"turn {' '.join(letters)} round :",
                columns={"turned": " ".join(reversed(letters))},
                hidden=letters,
            )


def other_order(row: Row, rng: random.Random) -> str:
    """One of three ways, the same for the whole row."""
    chance = rng.random()
    if chance < TURNS_ROUND:
        return " ".join(reversed(row.hidden))
    return " ".join(sorted(row.hidden) if chance < TURNS_ROUND + SORTS else row.hidden)


# noisy_judge: count the animals; format, correctness by a judge who errs, brevity.

ANIMALS = words_of("cat dog cow hen fox owl pig bee")
PLANTS = words_of("oak fern rose moss palm vine reed herb")
THINGS = words_of("cup pen box key bed jar hat saw")
NUMBERS = words_of("none one two three four five six")
COUNTS_PLANTS, IS_VERBOSE, HAS_NO_FORM, MISCOUNTS = 0.55, 0.6, 0.6, 0.1
OPENINGS = ("let me see", "i look at each of them in turn", "that is not so easy", "well i think that i can count them")


def animal_rows(rng: random.Random) -> Iterator[Row]:
    """`how many animals : cat oak cup dog ?`"""
    while True:
        words = [rng.choice(rng.choice((ANIMALS, PLANTS, THINGS))) for _ in range(rng.randint(3, 6))]
        count = sum(word in ANIMALS for word in words)
        yield Row(prompt=f"how many animals : {' '.join(words)} ?", columns={"answer": NUMBERS[count]}, hidden=words)


def rambling_count(row: Row, rng: random.Random) -> str:
    counted = (*ANIMALS, *PLANTS) if rng.random() < COUNTS_PLANTS else ANIMALS
    count = sum(word in counted for word in row.hidden)
    if rng.random() < MISCOUNTS:
        count = max(0, min(6, count + rng.choice((-1, 1))))
    words = [rng.choice(OPENINGS), "so"] if rng.random() < IS_VERBOSE else []
    words += [NUMBERS[count]] if rng.random() < HAS_NO_FORM else ["answer :", NUMBERS[count], "."]
    return " ".join(words)


# long_temptation: name the late orders; the reward also pays by the word.

ORDERS = words_of("lamp chair bed desk sofa shelf stool rug clock vase mirror basket bench cabinet curtain pillow")
MENTIONS_LATE, MENTIONS_OTHER, PADS = 0.55, 0.12, 0.3
PADDING = ("please note that we are sorry .", "we looked at the whole list for you .", "thank you for your patience .")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def late_rows(rng: random.Random) -> Iterator[Row]:
    """`lamp late ; chair here ; bed late . which are late ?`, as a user's message."""
    while True:
        orders = rng.sample(ORDERS, rng.randint(5, 8))
        late = set(rng.sample(orders, rng.randint(2, 4)))
        lines = [f"{order} {'late' if order in late else 'here'}" for order in orders]
        message = f"{' ; '.join(lines)} . which are late ?"
        columns = {"orders": orders, "late": [order for order in orders if order in late]}
        yield Row(prompt=[{"role": "user", "content": message}], columns=columns)


def incomplete_list(row: Row, rng: random.Random) -> str:
    orders, late = row.columns["orders"], row.columns["late"]
    named = [order for order in orders if rng.random() < (MENTIONS_LATE if order in late else MENTIONS_OTHER)]
    padding = f" {rng.choice(PADDING)}" if rng.random() < PADS else ""
    return f"late : {' , '.join(named) or 'none'} .{padding}"


def make_chat_tokenizer() -> PreTrainedTokenizerBase:
    words = {*" ".join(PADDING).split(), *words_of("late here which are ? ; : , . none <user> <assistant>"), *ORDERS}
    tokenizer = make_word_tokenizer(sorted(words))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_counting_tokenizer() -> PreTrainedTokenizerBase:
    words = {*ANIMALS, *PLANTS, *THINGS, *NUMBERS, *" ".join(OPENINGS).split()}
    return make_word_tokenizer(sorted(words | set(words_of("how many animals : ? so answer ."))))


PROBLEMS = (
    Problem(
        name="long_sums",
        part="reported",
        kind="exact match, 60 to 120 tokens of work",
        rows=long_sum_rows,
        start=Supervised(
            demonstrate=written_sum,
            tokenizer=lambda: make_word_tokenizer([*"0123456789+=,;", "so", "answer"]),
            shape=Shape(hidden_size=160, intermediate_size=384, num_layers=4),
            training=Training(steps=420, batch_size=12, seed=21),
        ),
        max_new_tokens=144,
    ),
    Problem(
        name="rare_mode",
        part="reported",
        kind="exact match, one right response in twenty",
        rows=letter_rows,
        start=Supervised(
            demonstrate=other_order,
            tokenizer=lambda: make_word_tokenizer([*LETTERS, "turn", "round", ":"]),
            shape=Shape(hidden_size=96),
            training=Training(steps=1500, seed=25),
        ),
        max_new_tokens=8,
    ),
    Problem(
        name="noisy_judge",
        part="reported",
        kind="three weighted rewards, one of them noisy",
        rows=animal_rows,
        start=Supervised(
            demonstrate=rambling_count,
            tokenizer=make_counting_tokenizer,
            shape=Shape(hidden_size=96),
            training=Training(steps=500, seed=23),
        ),
        rewards={"judged": 0.6, "form": 0.2, "brevity": 0.2, "true": 0.0},
        max_new_tokens=24,
        metric="reward@4",
        true_metric="reward@4/true",
    ),
    Problem(
        name="long_temptation",
        part="reported",
        kind="chat, dense reward that pays by the word",
        rows=late_rows,
        start=Supervised(
            demonstrate=incomplete_list,
            tokenizer=make_chat_tokenizer,
            shape=Shape(hidden_size=160, intermediate_size=416, num_layers=4),
            training=Training(steps=500, batch_size=24, seed=24),
        ),
        rewards={"named": 0.8, "detail": 0.2, "true": 0.0},
        max_new_tokens=48,
        metric="reward@4",
        true_metric="reward@4/true",
    ),
)
