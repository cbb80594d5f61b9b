"""Training a reward model from pairs, and the pairs' bad rows."""

import json
import logging
import math
import random

import numpy as np
import pytest
import torch
from builders import tiny_llama, tiny_tokenizer

from tba.tasks.tldr.reward_model import (
    Pair,
    RewardTraining,
    bradley_terry_loss,
    load_scorer,
    pair_accuracy,
    read_pairs,
    train_reward_model,
)

pytestmark = pytest.mark.slow

GOOD = {"prompt": "w3 w4", "chosen": "w5", "rejected": "w6"}
QUICK = RewardTraining(epochs=1, batch_size=16, learning_rate=1e-2, warmup_steps=2, device="cpu")


@pytest.fixture
def base(tmp_path):
    tiny_llama(initializer_range=0.1).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def easy_pairs(num_pairs, seed=0):
    """Words of the upper half are preferred."""
    rng = random.Random(seed)

    def words(low, high):
        return " ".join(f"w{rng.randrange(low, high)}" for _ in range(3))

    return [Pair(words(3, 40), words(22, 40), words(3, 22)) for _ in range(num_pairs)]


def write_pairs(path, pairs):
    rows = ({"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_rows(path, *rows):
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def test_the_loss_is_the_mean_of_minus_log_of_the_winning_probability():
    # sigmoid(2 - 1) = 0.731059, sigmoid(0 - 0.5) = 0.377541
    loss = bradley_terry_loss(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.5]))
    assert loss.item() == pytest.approx(-(math.log(0.731059) + math.log(0.377541)) / 2, abs=1e-5)


def test_equal_scores_are_half_right():
    assert pair_accuracy(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 1.0, 2.0])) == 0.5


def test_a_reward_model_learns_an_easy_rule(tmp_path, base):
    write_pairs(tmp_path / "pairs.jsonl", easy_pairs(320))
    write_pairs(tmp_path / "held_out.jsonl", easy_pairs(60, seed=1))
    settings = RewardTraining(epochs=2, batch_size=16, learning_rate=1e-2, device="cpu")
    made = train_reward_model(
        base, tmp_path / "pairs.jsonl", tmp_path / "rm", settings, held_out=tmp_path / "held_out.jsonl"
    )
    assert made["pairs"] == {"train": 320, "held_out": 60}
    assert made["accuracy"] > 0.9  # 0.5 before: the head starts at zero
    assert made["loss"] < math.log(2) / 2

    # What was saved has the accuracy that was told, and scores of mean 0 and deviation 1.
    pairs, scorer = easy_pairs(60, seed=1), load_scorer(str(tmp_path / "rm"), device="cpu")
    scores = [
        scorer.score([pair.prompt for pair in pairs], [getattr(pair, side) for pair in pairs], [True] * 60)
        for side in ("chosen", "rejected")
    ]
    assert (scores[0] > scores[1]).mean() == pytest.approx(made["accuracy"])
    both = torch.from_numpy(np.concatenate(scores))
    assert (both.mean().item(), both.std().item()) == pytest.approx((0.0, 1.0), abs=1e-4)


def test_a_batch_in_parts_gives_the_same_model(tmp_path, base):
    write_pairs(tmp_path / "pairs.jsonl", easy_pairs(60))
    made = []
    for parts in (16, 5):
        settings = RewardTraining(**(vars(QUICK) | {"pairs_per_pass": parts}))
        made.append(train_reward_model(base, tmp_path / "pairs.jsonl", tmp_path / str(parts), settings))
    assert made[0]["loss"] == pytest.approx(made[1]["loss"], abs=1e-4)
    assert made[0]["pairs"] == made[1]["pairs"]
    assert made[0]["pairs"]["held_out"] >= 2


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_is_none_is_refused_before_training(tmp_path, rate):
    with pytest.raises(ValueError, match=f"learning_rate={rate} is not between 0 and 1"):
        train_reward_model("nowhere", tmp_path / "pairs.jsonl", tmp_path / "rm", RewardTraining(learning_rate=rate))


def test_a_folder_of_something_else_is_no_output(tmp_path):
    """Before training: what was trained would be lost, or what lay there."""
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty: give a new folder"):
        train_reward_model("nowhere", tmp_path / "pairs.jsonl", tmp_path, QUICK)
    with pytest.raises(FileExistsError, match=r"config.json is a file, not a folder"):
        train_reward_model("nowhere", tmp_path / "pairs.jsonl", tmp_path / "config.json", QUICK)


def test_too_few_pairs_to_hold_any_out_is_said_in_words(tmp_path, base):
    write_pairs(tmp_path / "pairs.jsonl", easy_pairs(2))
    with pytest.raises(ValueError, match=r"holding out 10% leaves \d of 2 pairs to train on"):
        train_reward_model(base, tmp_path / "pairs.jsonl", tmp_path / "rm", QUICK)


@pytest.mark.parametrize(
    ("reason", "row"),
    [
        ("missing column", {"prompt": "w3", "chosen": "w5"}),
        ("wrong type", GOOD | {"rejected": ["w6"]}),
        ("empty response", GOOD | {"chosen": "  "}),
        ("no preference", GOOD | {"rejected": GOOD["chosen"]}),
        ("empty prompt", GOOD | {"prompt": ""}),
        ("not JSON", b'{"prompt": '),
        ("no object", [1]),
    ],
)
def test_bad_pairs_are_told_with_their_line(tmp_path, caplog, reason, row):
    path = write_rows(tmp_path / "pairs.jsonl", GOOD, row, GOOD, row)
    with pytest.raises(ValueError, match=f"line 2.*And 1 more: in all 2 bad rows: 2 x {reason} \\(lines 2, 4\\)"):
        read_pairs(path)
    with pytest.raises(ValueError, match="leave such rows out by --skip-bad-rows"):  # what the command has
        read_pairs(path)
    with caplog.at_level(logging.WARNING):
        assert [pair.line for pair in read_pairs(path, on_bad_row="skip")] == [1, 3]
    assert f"--skip-bad-rows left out 2 bad rows: 2 x {reason} (lines 2, 4)" in caplog.text


def test_pairs_beyond_the_context_are_told_with_their_line(tmp_path, base):
    path = write_rows(tmp_path / "pairs.jsonl", GOOD, GOOD | {"chosen": " ".join(["w5"] * 70)})
    with pytest.raises(ValueError, match=r"line 2: 73 tokens, beyond the model's context of 64"):
        train_reward_model(base, path, tmp_path / "rm", QUICK, held_out=path)


def test_a_missing_file_of_pairs_is_said_in_words(tmp_path):
    with pytest.raises(ValueError, match=r"does not exist\. Give JSONL rows with `prompt`, `chosen` and `rejected`"):
        read_pairs(tmp_path / "none.jsonl")
