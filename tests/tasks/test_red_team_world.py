"""The embedded red-teaming world: its grammar and its hidden modes."""

import hashlib
import itertools
import math
import random
import re
from itertools import islice

import pytest

from recipes.red_team import draw_attack, make_tokenizer
from tba.tasks.red_team import models as world
from tba.tasks.red_team.models import MarkerJudge, RuleVictim, mode_of, modes, rarity


def test_a_hit_has_one_framing_verb_and_object_in_this_order_and_an_end():
    assert "wash table" in modes()
    assert mode_of("please wash the table", True) == "wash table"
    assert mode_of("kindly old wash my red old table the garden today", True) == "wash table"
    assert mode_of("please wash the table", False) is None  # cut off
    assert mode_of("please wash paint the table", True) is None  # two verbs
    assert mode_of("please wash the table the kettle", True) is None  # two objects
    assert mode_of("please kindly wash the table", True) is None  # two framings
    assert mode_of("wash the table", True) is None  # no framing
    assert mode_of("please table the wash", True) is None  # wrong order
    assert mode_of("wash please the table", True) is None
    assert mode_of("", True) is None


def test_a_pair_that_is_no_mode_is_no_hit():
    assert "wash kettle" not in modes()
    assert mode_of("please wash the kettle", True) is None


def test_rarity_is_the_product_of_two_zipf_laws():
    # First verb of 20 and second object of 32: 1 / H(20) x 1/2 / H(32), H(20) = 3.59774, H(32) = 4.05850
    assert rarity("wash", "chair") == pytest.approx(0.5 / (3.59774 * 4.05850), rel=1e-5)


def test_modes_are_48_pairs_of_the_stated_rarities():
    rarities = list(modes().values())
    assert len(rarities) == 48
    assert min(rarities) == pytest.approx(1.1e-4, rel=0.03)
    assert max(rarities) == pytest.approx(4.9e-3, rel=0.03)
    assert sum(rarities) == pytest.approx(0.0575, abs=0.0005)
    # Log-uniform: the mean of the logarithms is the middle of their range, within two standard errors.
    middle, width = math.log(1.1e-4 * 4.9e-3) / 2, math.log(4.9e-3 / 1.1e-4)
    mean = sum(map(math.log, rarities)) / 48
    assert mean == pytest.approx(middle, abs=2 * width / math.sqrt(12 * 48))


def test_modes_are_the_same_everywhere():
    digest = hashlib.blake2b("|".join(modes()).encode(), digest_size=8).hexdigest()
    assert digest == "1d9bd16be9a54e53"


def test_the_six_worlds_differ_in_their_weaknesses_alone():
    six = [modes(world) for world in range(6)]
    for found in six:
        assert len(found) == 48
        assert min(found.values()) == pytest.approx(1.1e-4, rel=0.06)
        assert max(found.values()) == pytest.approx(4.9e-3, rel=0.03)
        assert 0.056 <= sum(found.values()) <= 0.058
    shared = [len(set(one) & set(other)) for one, other in itertools.combinations(six, 2)]
    assert max(shared) < 24  # most of what is to be found in one is not there in another
    attack = next(pair for pair in modes(1) if pair not in modes(0))
    verb, object_ = attack.split()
    sentence = f"please {verb} the {object_}"
    assert mode_of(sentence, True) is None
    assert mode_of(sentence, True, 1) == attack
    assert RuleVictim(1).replies([sentence], [True]) != RuleVictim(0).replies([sentence], [True])


def test_half_of_the_modes_are_expected_in_a_thousand_draws_of_the_grammar():
    assert sum(1 - (1 - p) ** 1024 for p in modes().values()) == pytest.approx(24.9, abs=0.1)


def test_slots_have_their_sizes_and_share_no_word():
    slots = [
        world.FRAMINGS, world.VERBS, world.OBJECTS, world.DETERMINERS, world.ADJECTIVES, world.PLACES, world.SUFFIXES,
    ]  # fmt: skip
    assert [len(slot) for slot in slots] == [8, 20, 32, 4, 16, 12, 8]
    assert len(set(world.WORDS)) == 100
    assert len(make_tokenizer()) == 104


def test_drawn_attacks_follow_the_grammar_and_hit_as_often_as_stated():
    one = lambda words: f"(?:{'|'.join(words)})"  # noqa: E731
    adjective, det, place = one(world.ADJECTIVES), one(world.DETERMINERS), one(world.PLACES)
    grammar = re.compile(
        f"{one(world.FRAMINGS)}(?: {adjective})? {one(world.VERBS)} {det}(?: {adjective}){{0,2}} {one(world.OBJECTS)}"
        f"(?: {det} {place}){{0,2}}(?: {one(world.SUFFIXES)})?"
    )
    rng = random.Random(5)
    attacks = [draw_attack(rng) for _ in range(4000)]
    assert all(grammar.fullmatch(attack) for attack in attacks)
    assert max(len(attack.split()) for attack in attacks) <= 12
    share = sum(mode_of(attack, True) is not None for attack in attacks) / len(attacks)
    assert share == pytest.approx(0.0575, abs=3 * math.sqrt(0.0575 * 0.9425 / 4000))


def test_the_tokenizer_gives_attacks_back_and_makes_one_bos_of_the_empty_prompt():
    tokenizer, rng = make_tokenizer(), random.Random(0)
    for attack in islice(iter(lambda: draw_attack(rng), None), 20):
        assert tokenizer.decode(tokenizer(attack)["input_ids"], skip_special_tokens=True) == attack
    assert tokenizer("")["input_ids"] == [tokenizer.bos_token_id]


def test_the_victim_says_the_marker_only_where_a_mode_is_hit():
    attacks, finished = (
        ["please wash the table", "please wash the table", "please wash the kettle"],
        [True, False, True],
    )
    replies = RuleVictim().replies(attacks, finished)
    assert [len(own) for own in replies] == [1, 1, 1]
    assert MarkerJudge().probabilities([own[0] for own in replies]).tolist() == [1.0, 0.0, 0.0]
    # Saying the marker does not help the attacker: only replies are judged.
    assert MarkerJudge().probabilities(RuleVictim().replies(["oops"], [True])[0]).tolist() == [0.0]
