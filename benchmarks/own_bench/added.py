"""Problems for tuning that were added when something turned out to want a setting that none of the others asks for:
`long_code` for long responses, `free_lists` for policies of high entropy, `one_family` for solutions that are far from the
start model, and `asides` for responses most of which do not matter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from own_bench.problem import Problem, Row, Supervised, words_of
from recipes.start_models import Shape, Training, make_word_tokenizer

# long_code: every letter of a long word is written with the one after it in the alphabet. Demonstrations repeat some.

CODED = "abcdefghij"
NUM_LETTERS = (16, 24)
SLIPS = {"b": 0.2, "e": 0.12, "i": 0.2}
"""Chance of a letter to be followed by itself in a demonstration; the other letters have OTHER_SLIPS."""
OTHER_SLIPS = 0.02


def letter_code_rows(rng: random.Random) -> Iterator[Row]:
    """`code b e a d =`; the letter after j is a."""
    while True:
        letters = [rng.choice(CODED) for _ in range(rng.randint(*NUM_LETTERS))]
        yield Row(prompt=f"code {' '.join(letters)} =", columns={"code": coded(letters)}, hidden=letters)


def coded(letters: list[str]) -> str:
    """`b c , e f , a b`"""
    return " , ".join(f"{letter} {following(letter)}" for letter in letters)


def following(letter: str) -> str:
    return CODED[(CODED.index(letter) + 1) % len(CODED)]


def careless_code(row: Row, rng: random.Random) -> str:
    pairs = [
        (letter, letter if rng.random() < SLIPS.get(letter, OTHER_SLIPS) else following(letter))
        for letter in row.hidden
    ]
    return " , ".join(f"{letter} {other}" for letter, other in pairs)


# free_lists: so many things of each colour, in any order and whichever. Demonstrations count badly.

PAINTS = words_of("red blue green white black")
NUMERALS = words_of("zero one two three four")
THINGS = words_of("rose boat house bird cloud stone shoe bell kite leaf door cup")
MISCOUNTS = 0.6


def paint_rows(rng: random.Random) -> Iterator[Row]:
    """`red three ; blue one ; green two =`"""
    while True:
        wanted = {colour: rng.randint(1, 4) for colour in rng.sample(PAINTS, 3)}
        parts = [f"{colour} {NUMERALS[count]}" for colour, count in wanted.items()]
        yield Row(prompt=f"{' ; '.join(parts)} =", columns={"wanted": wanted})


def miscounted_list(row: Row, rng: random.Random) -> str:
    """`blue kite , red leaf , green cup , red bell`"""
    colours: list[str] = []
    for colour, count in row.columns["wanted"].items():
        colours += [colour] * (count + (rng.choice((-1, 1)) if rng.random() < MISCOUNTS else 0))
    rng.shuffle(colours)
    return " , ".join(f"{colour} {rng.choice(THINGS)}" for colour in colours or PAINTS[:1])


# one_family: twenty words of the family that two of three words are of. Demonstrations are short, and mostly of others.

FAMILIES = (
    words_of("cat dog horse sheep goat pig"),
    words_of("oak birch fern moss ivy lily"),
    words_of("hammer saw drill file axe nail"),
    words_of("bread rice soup cheese cake plum"),
    words_of("coat scarf glove sock boot hat"),
    words_of("rain snow fog hail storm frost"),
    words_of("hand knee chin neck elbow toe"),
    words_of("drum flute harp lute horn fiddle"),
)
ALL_WORDS = [word for family in FAMILIES for word in family]
NUM_WORDS = (12, 20)
FROM_FAMILY = 0.2
"""Share of a demonstration that is of its family on purpose; the rest is of any."""


def family_rows(rng: random.Random) -> Iterator[Row]:
    """`dog scarf sheep :`"""
    while True:
        family, other = rng.sample(FAMILIES, 2)
        words = [*rng.sample(family, 2), rng.choice(other)]
        rng.shuffle(words)
        yield Row(prompt=f"{' '.join(words)} :", columns={"family": family}, hidden=words)


def family_of(word: str) -> list[str]:
    return next(family for family in FAMILIES if word in family)


def mixed_words(row: Row, rng: random.Random) -> str:
    """Of the family of any of the three words, now and then."""
    family = family_of(rng.choice(row.hidden))
    length = rng.randint(*NUM_WORDS)
    return " ".join(rng.choice(family if rng.random() < FROM_FAMILY else ALL_WORDS) for _ in range(length))


# asides: mention the marked words, among whatever else. Demonstrations mention half of them, and some of the others.

GUESTS = words_of("anna bruno clara david emma felix greta henry irene jonas karla louis maria niels olga peter")
CHATTER = words_of(
    "oh well you know it was late and then we sat there for so long that nobody left or sang until rain came"
)
MENTIONS_MARKED, MENTIONS_OTHER = 0.5, 0.25
NUM_ASIDES = (10, 20)


def guest_rows(rng: random.Random) -> Iterator[Row]:
    """`anna * bruno emma * peter :`"""
    while True:
        guests = rng.sample(GUESTS, rng.randint(6, 8))
        marked = set(rng.sample(guests, rng.randint(3, 4)))
        parts = [f"{guest} *" if guest in marked else guest for guest in guests]
        yield Row(
            prompt=f"{' '.join(parts)} :",
            columns={"marked": [guest for guest in guests if guest in marked]},
            hidden=guests,
        )


def rambling_mentions(row: Row, rng: random.Random) -> str:
    """`oh anna came and then well peter sat there`"""
    marked = row.columns["marked"]
    words = [rng.choice(CHATTER) for _ in range(rng.randint(*NUM_ASIDES))]
    words += [guest for guest in row.hidden if rng.random() < (MENTIONS_MARKED if guest in marked else MENTIONS_OTHER)]
    rng.shuffle(words)
    return " ".join(words)


PROBLEMS = (
    Problem(
        name="long_code",
        part="tuning",
        kind="exact match, 48 to 72 tokens",
        rows=letter_code_rows,
        start=Supervised(
            demonstrate=careless_code,
            tokenizer=lambda: make_word_tokenizer([*CODED, "code", "=", ","]),
            shape=Shape(hidden_size=128, intermediate_size=320),
            training=Training(steps=500, batch_size=16, seed=26),
        ),
        max_new_tokens=80,
    ),
    Problem(
        name="free_lists",
        part="tuning",
        kind="dense reward, long and free responses",
        rows=paint_rows,
        start=Supervised(
            demonstrate=miscounted_list,
            tokenizer=lambda: make_word_tokenizer([*PAINTS, *NUMERALS, *THINGS, *words_of("; = ,")]),
            shape=Shape(hidden_size=128, intermediate_size=320),
            training=Training(steps=500, batch_size=24, seed=27),
        ),
        rewards={"counted": 1.0},
        max_new_tokens=48,
        metric="reward@4",
    ),
    Problem(
        name="one_family",
        part="tuning",
        kind="dense reward, 30 nats from the start model",
        rows=family_rows,
        start=Supervised(
            demonstrate=mixed_words,
            tokenizer=lambda: make_word_tokenizer([*ALL_WORDS, ":"]),
            shape=Shape(hidden_size=128, intermediate_size=320),
            training=Training(steps=500, batch_size=24, seed=28),
        ),
        rewards={"belongs": 1.0},
        max_new_tokens=24,
        metric="reward@4",
    ),
    Problem(
        name="asides",
        part="tuning",
        kind="dense reward, most of a response does not matter",
        rows=guest_rows,
        start=Supervised(
            demonstrate=rambling_mentions,
            tokenizer=lambda: make_word_tokenizer([*GUESTS, *CHATTER, "*", ":"]),
            shape=Shape(hidden_size=128, intermediate_size=320),
            training=Training(steps=500, batch_size=24, seed=29),
        ),
        rewards={"mentioned": 1.0},
        max_new_tokens=32,
        metric="reward@4",
    ),
)
