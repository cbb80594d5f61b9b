"""Making the start model, and the one that ships."""

import json
import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from recipes.arithmetic import HABITS, SHAPE, greedy_accuracy, make_tokenizer, prepare_arithmetic, pupil_solution
from recipes.start_models import Training, make_model, one_deterministic_thread
from tba.models.paths import resolve_path
from tba.tasks.arithmetic.problems import Earlier, Problem, Step, draw_problems, held_out_problems

START_MODEL = Path(resolve_path("tba:arithmetic"))
pytestmark = pytest.mark.slow

SHORT = Training(steps=6, batch_size=4)


@pytest.fixture(scope="module")
def shipped():
    return AutoModelForCausalLM.from_pretrained(START_MODEL), AutoTokenizer.from_pretrained(START_MODEL)


def test_the_pupil_has_the_documented_habits(monkeypatch):
    # 10 + 2 = 12; the other has 3 times as many, 36, but the pupil adds: 15
    times = Problem(text="", steps=(Step(10, "+", 2, "buys"), Step(Earlier(0), "*", 3, "times")), canonical="")
    # 12 and 4 more, 16: together 28, but the pupil stops at 16
    together = Problem(
        text="",
        steps=(*times.steps[:1], Step(Earlier(0), "+", 4, "more"), Step(Earlier(0), "+", Earlier(1), "together")),
        canonical="",
    )
    monkeypatch.setattr("recipes.arithmetic.HABITS", {"times": 1.0, "together": 1.0})
    assert pupil_solution(times, random.Random(0)) == "10+2=12\n12+3=15\n#### 15"
    assert pupil_solution(together, random.Random(0)) == "10+2=12\n12+4=16\n#### 16"
    monkeypatch.setattr("recipes.arithmetic.HABITS", {})
    assert pupil_solution(times, random.Random(0)) == times.solution
    assert pupil_solution(together, random.Random(0)) == together.solution


def test_habits_show_as_often_as_stated():
    problems = [p for p in islice(draw_problems("train", seed=2), 3000) if p.steps[-1].kind in HABITS]
    for habit, share in HABITS.items():
        own = [p for p in problems if p.steps[-1].kind == habit]
        rng = random.Random(1)
        shown = sum(pupil_solution(p, rng) != p.solution for p in own) / len(own)
        assert shown == pytest.approx(share, abs=4 * (share * (1 - share) / len(own)) ** 0.5)


def test_preparing_twice_gives_the_same_bytes(tmp_path):
    for seed, folder in enumerate(("a", "b")):
        torch.manual_seed(seed)  # the caller's randomness must not matter
        prepare_arithmetic(tmp_path / folder, training=SHORT, num_train=20, num_held_out=4)
    for file in ("model/model.safetensors", "model/tokenizer.json", "train.jsonl", "held_out.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_preparing_leaves_threads_and_randomness_as_they_were(tmp_path):
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state()
    prepare_arithmetic(tmp_path, training=SHORT, num_train=5, num_held_out=4)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_the_data_has_prompt_answer_and_solution(tmp_path):
    made = prepare_arithmetic(tmp_path, training=SHORT, num_train=20, num_held_out=4)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len(rows) == made["problems"]["train"] == 20
    assert rows[0]["solution"].endswith(f"#### {rows[0]['answer']}")
    held_out = [json.loads(line)["prompt"] for line in (tmp_path / "held_out.jsonl").read_text().splitlines()]
    assert held_out == [problem.text for problem in held_out_problems()[:4]]


def test_the_shipped_model_is_small_and_has_the_prepared_shape(shipped):
    model, tokenizer = shipped
    assert sum(file.stat().st_size for file in START_MODEL.iterdir()) < 5_000_000
    assert 300_000 <= model.num_parameters() <= 1_500_000
    fresh = make_model(make_tokenizer(), SHAPE, seed=0)
    assert {name: p.shape for name, p in model.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}
    assert tokenizer.get_vocab() == make_tokenizer().get_vocab()


def test_the_shipped_tokenizer_adds_one_bos_and_gives_texts_back(shipped):
    _, tokenizer = shipped
    problem = held_out_problems()[0]
    token_ids = tokenizer(problem.text)["input_ids"]
    assert token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == problem.text
    assert GenerationConfig.from_pretrained(START_MODEL).eos_token_id == tokenizer.eos_token_id


def test_the_shipped_model_solves_a_bit_more_than_a_third(shipped):
    model, tokenizer = shipped
    with one_deterministic_thread():
        accuracy = greedy_accuracy(model, tokenizer, held_out_problems()[:200])
    # 37.5% on all 2000 held-out problems; two standard errors of 200 problems are 6.8 points.
    assert 0.30 <= accuracy <= 0.45
