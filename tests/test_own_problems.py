"""The bench of own problems: generators repeat themselves, splits are apart, rewards have the values worked out by hand."""

import importlib.util
import json
import random
import signal
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from commands import Command, become_python
from problem import wait_for
from safetensors.torch import load_file

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from own_bench import added, budgets, real, reported, runs, trl_grpo, tuning  # noqa: E402
from own_bench import problem as bench  # noqa: E402
from own_bench.problem import Row, demonstrations, fingerprint, prompt_text, splits  # noqa: E402

ORDERS = ["lamp", "bed", "desk"]
PROBLEMS = (*tuning.PROBLEMS, *added.PROBLEMS, *reported.PROBLEMS)


def rewards_of(name):
    spec = importlib.util.spec_from_file_location(
        f"rewards_{name}", BENCHMARKS / "own_bench" / "rewards" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reply(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture(params=PROBLEMS, ids=lambda problem: problem.name)
def problem(request):
    return request.param


def test_which_problems_are_for_tuning_stays_so():
    parts = {part: [problem.name for problem in PROBLEMS if problem.part == part] for part in ("tuning", "reported")}
    assert parts == {
        "tuning": [
            *("word_sums", "sort_digits", "dense_copy", "one_prompt", "sparse"),
            *("long_code", "free_lists", "one_family", "asides"),
        ],
        "reported": ["long_sums", "rare_mode", "noisy_judge", "long_temptation"],
    }


def test_a_problem_is_the_same_every_time(problem):
    assert splits(problem) == splits(problem)
    first, second = (
        list(islice(demonstrations(problem, problem.start, problem.start.tokenizer(), random.Random(3)), 50))
        for _ in range(2)
    )
    assert first == second


def test_the_fingerprint_tells_another_edition_of_a_problem():
    problem = tuning.PROBLEMS[0]
    longer = replace(problem, start=replace(problem.start, training=replace(problem.start.training, steps=7)))
    heavier = replace(problem, rewards={"correct": 2.0})
    assert fingerprint(problem) == fingerprint(replace(problem))
    assert len({fingerprint(edition) for edition in (problem, longer, heavier)}) == 3


def test_held_out_prompts_are_neither_trained_on_nor_demonstrated(problem):
    train, held_out = ([json.dumps(row.prompt) for row in rows] for rows in splits(problem))
    if problem.name == "one_prompt":
        assert len(train) == 1
        assert train == held_out
        return
    assert len(set(train)) >= 1_000
    assert len(set(held_out)) >= 200
    assert not set(train) & set(held_out)
    tokenizer = problem.start.tokenizer()
    unseen = {prompt_text(row.prompt, tokenizer) for row in splits(problem)[1]}
    shown = islice(demonstrations(problem, problem.start, tokenizer, random.Random(3)), 2_000)
    assert not unseen & {prompt for prompt, _ in shown}


def test_the_tokenizer_knows_every_prompt_and_demonstration_and_they_fit(problem):
    tokenizer = problem.start.tokenizer()
    for prompt, answer in islice(demonstrations(problem, problem.start, tokenizer, random.Random(3)), 300):
        prompt_ids = tokenizer(prompt)["input_ids"]
        answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in prompt_ids + answer_ids
        assert tokenizer.decode(answer_ids) == answer
        assert len(answer_ids) < problem.max_new_tokens  # one more is the end
        assert len(prompt_ids) + problem.max_new_tokens <= problem.start.shape.context


def test_every_reward_is_a_function_of_the_problems_file(problem):
    module = rewards_of(problem.name)
    assert all(callable(getattr(module, name)) for name in problem.rewards)
    assert sum(problem.rewards.values()) == pytest.approx(1.0)


def test_some_demonstrations_are_right_and_some_are_not(problem):
    """RL can only find what the start model says now and then."""
    module, rng = rewards_of(problem.name), random.Random(3)
    rows = list(islice(problem.rows(rng), 400))
    totals = []
    for row in rows:
        text = problem.start.demonstrate(row, rng)
        completion = text if isinstance(row.prompt, str) else reply(text)
        columns = {name: [value] for name, value in row.columns.items()}
        values = {
            name: getattr(module, name)(prompts=[row.prompt], completions=[completion], **columns)[0]
            for name in problem.rewards
        }
        totals.append(sum(problem.rewards[name] * value for name, value in values.items()))
    mean = sum(totals) / len(totals)
    bounds = {"sparse": (0.005, 0.05), "rare_mode": (0.05, 0.12), "free_lists": (0.7, 0.8)}
    low, high = bounds.get(problem.name, (0.15, 0.75))
    assert low < mean < high


def test_a_row_turned_round():
    row = next(reported.letter_rows(random.Random(3)))
    said = {reported.other_order(row, random.Random(seed)) for seed in range(80)}
    letters = row.hidden
    assert said == {" ".join(letters), " ".join(sorted(letters)), " ".join(letters[::-1])}
    correct = rewards_of("rare_mode").correct
    assert correct(completions=["d c b a", "a b c d", "d c b"], turned=["d c b a"] * 3) == [1.0, 0.0, 0.0]


def test_sums_in_words():
    assert [tuning.in_words(number) for number in (0, 13, 20, 27)] == ["zero", "thirteen", "twenty", "twenty seven"]
    # 7 + 5 = 12 writes 2 and forgets the carry; 5 from 2 becomes 2 from 5
    assert tuning.by_digits(27, 1, 15) == 32
    assert tuning.by_digits(42, -1, 15) == 33
    correct = rewards_of("word_sums").correct
    assert correct(completions=["twenty seven", "twenty", ""], answer=["twenty seven"] * 3) == [1.0, 0.0, 0.0]


def test_places_of_words():
    places_right = rewards_of("dense_copy").places_right
    # all; 2 of 3; one too few: 2 of 3; one too many: 3 of 4; shifted by one: none of 3
    texts = ["a b c", "a x c", "a b", "a b c d", "x a b"]
    assert places_right(completions=texts, target=["a b c"] * 5) == pytest.approx([1, 2 / 3, 2 / 3, 3 / 4, 0])


def test_brackets_that_match():
    module = rewards_of("one_prompt")
    texts = [
        "([])[]([])()",
        "()()()()()()",
        "()()()()()()",
        "([)]()()()()",
        "()()()()()",
        "()()()()()((",
        ")(()()()()()",
    ]
    assert module.correct(completions=texts) == [1, 1, 1, 0, 0, 0, 0]
    assert module.distinct(completions=texts) == [1, 1, 0, 0, 0, 0, 0]
    # Catalan number of 6 = 132 shapes, 2 ** 6 kinds of pairs
    drawn = {tuning.matching_brackets(6, random.Random(seed)) for seed in range(500)}
    assert sum(module.correct(completions=sorted(drawn))) == len(drawn)


def test_a_long_code_is_right_as_a_whole_or_not_at_all():
    assert added.coded(["b", "e", "j"]) == "b c , e f , j a"
    correct = rewards_of("long_code").correct
    texts = ["b c , e f , j a", " b c ,  e f , j a ", "b b , e f , j a", "b c , e f", "b c , e f , j a , a b"]
    assert correct(completions=texts, code=["b c , e f , j a"] * 5) == [1, 1, 0, 0, 0]


def test_a_free_list_is_paid_by_the_thing():
    row = Row(prompt="red two ; blue one =", columns={"wanted": {"red": 2, "blue": 1}})
    assert added.miscounted_list(row, random.Random(4)) == "red house , blue boat"  # a red one is missing
    counted = rewards_of("free_lists").counted
    texts = {
        "red rose , blue boat , red cup": 1.0,
        "blue boat , red cup": 2 / 3,  # one is missing
        "red rose , blue boat , red cup , red cup": 3 / 4,  # one too many
        "red rose , blue boat , green cup": 1 / 3,  # one is missing, another is too many
        "red rose blue boat red cup": 0.0,
        "red rose , , blue boat , red cup": 3 / 4,
    }
    assert counted(completions=list(texts), wanted=[row.columns["wanted"]] * len(texts)) == pytest.approx(
        list(texts.values())
    )


def test_words_of_a_family_are_paid_and_missing_ones_are_not():
    row = next(added.family_rows(random.Random(3)))
    own = [word for word in row.hidden if word in row.columns["family"]]
    assert len(own) == 2
    belongs = rewards_of("one_family").belongs
    texts = {" ".join(own * 10): 1.0, " ".join(own * 12): 1.0, " ".join(own): 0.1, f"{own[0]} moon {own[0]} : ,": 0.1}
    assert belongs(completions=list(texts), family=[row.columns["family"]] * 4) == pytest.approx(list(texts.values()))
    words = added.mixed_words(row, random.Random(4)).split()
    assert 12 <= len(words) <= 20
    assert set(words) <= set(added.ALL_WORDS)


def test_marked_words_are_paid_wherever_they_are_mentioned():
    row = next(added.guest_rows(random.Random(3)))
    marked = row.columns["marked"]
    assert marked == [guest for guest in row.hidden if f"{guest} *" in row.prompt]
    mentioned = rewards_of("asides").mentioned
    first, last = marked[0], marked[-1]
    texts = {
        " ".join(row.hidden): 1.0,
        f"oh {first} well {first}": 1 / len(marked),
        f"{last} {first}": 2 / len(marked),
        "": 0.0,
    }
    assert mentioned(completions=list(texts), marked=[marked] * 4) == pytest.approx(list(texts.values()))
    words = added.rambling_mentions(row, random.Random(4)).split()
    assert set(words) <= {*added.CHATTER, *row.hidden}
    assert 10 <= sum(word in added.CHATTER for word in words) <= 20


def test_a_written_sum_and_its_answer():
    # 38 + 45: 13 writes 3 carries 1; 3 + 4 + 1 = 8
    text, total = reported.add_in_columns(38, 45, random.Random(31))  # .012 is below .1: the carry is lost
    assert (text, total) == ("8 + 5 = 1 3 , 3 + 4 = 7 , 0 + 0 = 0 so 0 7 3", 73)
    text, total = reported.add_in_columns(38, 45, random.Random(3))  # .238: it is kept
    assert (text, total) == ("8 + 5 = 1 3 , 3 + 4 + 1 = 8 , 0 + 0 = 0 so 0 8 3", 83)
    correct = rewards_of("long_sums").correct
    texts = [f"{text} ; answer 8 3", "answer 7 3 no answer 8 3", "8 3", "answer 8 4"]
    assert correct(completions=texts, answer=["83"] * 4) == [1, 1, 0, 0]


def test_the_parts_of_the_noisy_reward():
    module = rewards_of("noisy_judge")
    texts = ["answer : two .", "two", "let me see so answer : two .", "answer : two"]
    assert module.form(completions=texts) == [1, 0, 1, 0]
    assert module.brevity(completions=[*texts, "so " * 16, "so " * 10]) == pytest.approx([1, 1, 8 / 12, 1, 0, 0.5])
    # .6 right + .2 form + .2 brevity; the last two are wrong
    found = module.true(completions=[*texts[:2], "answer : six .", "six"], answer=["two"] * 4)
    assert found == pytest.approx([1.0, 0.8, 0.4, 0.2])


def test_the_judge_errs_on_one_in_five_and_always_on_the_same():
    module = rewards_of("noisy_judge")
    prompts = [f"question {index}" for index in range(2_000)]
    judged = module.judged(prompts=prompts, completions=["two"] * 2_000, answer=["two"] * 2_000)
    assert judged == module.judged(prompts=prompts, completions=["two"] * 2_000, answer=["two"] * 2_000)
    assert sum(judged) / 2_000 == pytest.approx(0.8, abs=0.03)  # three standard errors of .009


def test_length_pays_and_the_true_score_makes_it_cost():
    module = rewards_of("long_temptation")
    plain = "late : lamp , bed ."  # 6 words, all free
    half = "late : lamp ."
    repeated = "late : lamp , bed , lamp , lamp ."  # 10 words, 4 too many; named again twice
    false = "late : lamp , desk ."
    texts = [plain, half, repeated, false]
    completions, columns = [reply(text) for text in texts], {"late": [["lamp", "bed"]] * 4, "orders": [ORDERS] * 4}
    assert module.named(completions=completions, **columns) == [1, 0.5, 1, 0.5]
    assert module.detail(completions=completions, **columns) == pytest.approx([6 / 40, 4 / 40, 10 / 40, 6 / 40])
    assert module.true(completions=completions, **columns) == pytest.approx([1, 0.5, 1 - 0.4 - 0.08, 0.5 - 0.2])


def test_the_last_number_is_the_sum():
    texts = ["7 + 4 = 11", "It is 11.", "11 or 12", "eleven"]
    correct = rewards_of("chat_sums").correct
    assert correct(completions=[reply(text) for text in texts], answer=["11"] * 4) == [1, 1, 0, 0]
    train, held_out = ({json.dumps(row.prompt) for row in rows} for rows in splits(real.PROBLEMS[-1]))
    assert (len(train), len(held_out), len(train & held_out)) == (1_000, 50, 0)


def test_settings_of_the_command_line():
    assert runs.parse_setting("defaults") == ("defaults", ())
    assert runs.parse_setting(
        "a=train.learning_rate=1e-4,objective.beta={kind: linear, start: 1, end: 2},mode=sync"
    ) == (
        "a",
        ("train.learning_rate=1e-4", "objective.beta={kind: linear, start: 1, end: 2}", "mode=sync"),
    )


def test_runs_with_a_line_are_skipped_and_a_changed_setting_or_problem_is_refused():
    problems, settings = tuning.PROBLEMS[:2], {"defaults": (), "sync": ("mode=sync",)}
    line = {"problem": "word_sums", "setting": "sync", "seed": 0, "overrides": ["mode=sync"]}
    lines = [line | {"fingerprint": fingerprint(problems[0])}]
    todo = [run.key for run in runs.runs_to_do(problems, settings, [0], lines)]
    assert todo == [
        (*key, None)
        for key in (("word_sums", "defaults", 0), ("sort_digits", "defaults", 0), ("sort_digits", "sync", 0))
    ]
    with pytest.raises(SystemExit, match="give the new one another name"):
        list(runs.runs_to_do(problems, {"sync": ("mode=async",)}, [0], lines))
    with pytest.raises(SystemExit, match="word_sums has changed since its runs"):
        list(runs.runs_to_do(problems, settings, [0], [line | {"fingerprint": "another"}]))


ENDLESS = f"""
import signal, sys
from pathlib import Path
sys.path.insert(0, {str(BENCHMARKS)!r})
import own_problems
from own_bench import runs, tuning

class Endless(runs.Run):
    def command(self, folder, output):
        program = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w')); time.sleep(600)"
        return [sys.executable, "-c", program, str(folder / f"begun-{{self.seed}}")]

signal.signal(signal.SIGTERM, own_problems.end_runs)
both = [Endless(problem=tuning.PROBLEMS[0], setting="endless", overrides=(), seed=seed) for seed in (0, 1)]
runs.run_all(both, folder=Path.cwd(), out=Path("out.jsonl"), jobs=1)
"""


def test_a_bench_that_is_told_to_end_ends_its_runs_and_begins_no_other(tmp_path):
    (tmp_path / "bench.py").write_text(ENDLESS)
    begun = tmp_path / "begun-0"
    with Command([str(tmp_path / "bench.py")], folder=tmp_path, target=become_python) as bench:
        assert wait_for(lambda: begun.exists() and begun.read_text().endswith("\n"))
        run = int(begun.read_text())
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(60) != 0
    assert wait_for(lambda: not psutil.pid_exists(run))
    assert not (tmp_path / "begun-1").exists()


def test_the_table_has_means_and_standard_errors():
    line = {"problem": "p", "setting": "s", "metric": "avg@4", "start": 0.25, "true_final": None, "collapse": None}
    line |= {"model": "0123456789abcdef", "seconds": 10.0, "responses_generated": 100, "lag": {"mean": 2.0}}
    rows = runs.table_of([line | {"final": 0.5}, line | {"final": 0.7, "collapse": {"step": 3}}])
    # standard deviation .2 / sqrt 2 = .1414, by sqrt 2 again .1
    assert rows[-1] == "| p | 0123456 | s | 2 | avg@4 | 0.250 | 0.600 ± 0.100 | - | 1 | 10 | 100 | 2.0 |"


def test_runs_with_a_budget_end_by_it_and_leave_evaluating_for_later(tmp_path):
    (problem,) = (problem for problem in real.PROBLEMS if problem.name == "three_words")
    asked = budgets.budgets_of([60.0, 180.0], [30])
    lines = [{"problem": "three_words", "setting": "s", "seed": 0, "overrides": [], "budget": "60 s"}]
    lines[0]["fingerprint"] = fingerprint(problem)
    todo = list(runs.runs_to_do([problem], {"s": ()}, [0], lines, asked))
    assert [run.key[3] for run in todo] == ["180 s", "30 steps"]
    given = [dict(word.partition("=")[::2] for word in run.command(tmp_path, tmp_path / "out")[4:]) for run in todo]
    limits = [(own["train.max_steps"], own.get("train.max_seconds")) for own in given]
    assert limits == [("null", "180"), ("30", None)]
    assert {(own["evaluate.every"], own["evaluate.num_prompts"]) for own in given} == {("0", "1")}
    own = runs.evaluation(problem, tmp_path / "model", tmp_path, seed=3)
    assert {"evaluate.num_prompts=50", "evaluate.samples_per_prompt=4", "seed=3"} <= set(own)


def test_trl_saves_at_the_end_of_the_first_step_that_uses_a_budget_up_and_saving_takes_no_time(tmp_path):
    now, saved = [100.0], []

    def save(path):
        now[0] += 5.0
        saved.append(path.name)

    saving = trl_grpo.SaveAtBudgets(budgets.budgets_of([60, 180], [2]), save, tmp_path, clock=lambda: now[0])
    now[0] += 50.0  # the model loads
    saving.begins()
    ends = []
    for step in range(1, 6):
        now[0] += 40.0
        ends.append(saving.step_ends(step))
    # 80 s after two steps, which uses up 60 s and 2 steps; 200 s after five: the ten seconds of saving are left out
    assert ends == [False, False, False, False, True]
    assert saved == ["model-60-s", "model-2-steps", "model-180-s"]
    lines = runs.read_lines(tmp_path / trl_grpo.SAVED)
    assert [(line["budget"], line["seconds"], line["steps"]) for line in lines] == [
        *(("60 s", 80.0, 2), ("2 steps", 80.0, 2), ("180 s", 200.0, 5)),
    ]


def test_the_table_by_seconds_compares_with_trls_best_rate_and_counts():
    def line(problem, setting, final, budget="60 s"):
        own = {
            "problem": problem,
            "setting": setting,
            "final": final,
            "budget": budget,
            "model": "m",
            "steps": 4,
            "seconds": 62.0,
        }
        return own | {"metric": "reward@4", "start": 0.1, "final_scores": {"reward@4_standard_error": 0.03}}

    lines = [line("far", "defaults", final) for final in (0.5, 0.7)]  # .6, standard error .1
    lines += [line("far", "trl_1e-4", final) for final in (0.4, 0.5)]  # .45 and .05: .15 more, error .112
    lines += [line("far", "trl_1e-3", 0.2)]
    lines += [line("near", "defaults", 0.50), line("near", "trl_1e-4", 0.54)]  # of one seed: .03 each, so .042
    lines += [line("low", "defaults", 0.50), line("low", "trl_3e-4", 0.55), line("low", "defaults", 0.9, "600 s")]
    rows = budgets.budget_tables(lines)
    assert (
        rows[2]
        == "| far | reward@4 | 0.100 | 0.600 ± 0.100 | 2 | 4 in 62 s | 0.450 ± 0.050 | 2 | 4 in 62 s | 1e-4 | ahead |"
    )
    assert [row.split(" | ")[-1] for row in rows[3:5]] == ["behind |", "level |"]
    assert rows[5] == "60 s, defaults: 1 ahead, 1 level, 1 behind of 3 (by one standard error)"
    assert rows[-1].endswith("| - | - | - | - | - |"), "nothing to compare with"
    assert runs.table_of(lines) == rows


def test_runs_from_two_start_models_are_not_averaged():
    line = {"problem": "p", "setting": "s", "metric": "avg@4", "start": 0.25, "true_final": None, "collapse": None}
    line |= {"final": 0.5, "seconds": 10.0, "responses_generated": 100, "lag": {"mean": 2.0}}
    rows = runs.table_of([line | {"model": "a" * 16}, line | {"model": "b" * 16}, line])
    assert [row.split(" | ")[1] for row in rows[2:]] == ["a" * 7, "b" * 7, "unknown"]


def test_a_start_model_that_was_shipped_is_the_same_on_every_machine(tmp_path, monkeypatch):
    """Rounded to fp16 once; what is made from it has exactly those weights. Of another recipe it is not used."""
    monkeypatch.setattr(bench, "START_MODELS", tmp_path / "shipped")
    problem = tuning.PROBLEMS[3]
    tiny = replace(problem, start=replace(problem.start, training=replace(problem.start.training, steps=2)))
    trained = tmp_path / tiny.name / "model"
    bench.train_model(tiny, tiny.start, trained)
    before = bench.fingerprint(tiny)
    path = bench.ship_model(tiny, tmp_path)
    assert bench.shipped_model(tiny) == path
    assert bench.shipped_model(problem) is None
    assert bench.fingerprint(tiny) != before
    bench.train_model(tiny, tiny.start, tmp_path / "again")
    first, again = (load_file(folder / "model.safetensors") for folder in (trained, tmp_path / "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name].half().float(), again[name]) for name in first)


def test_the_study_file_has_the_settings_of_the_problems():
    study = yaml.safe_load((BENCHMARKS.parent / "configs" / "studies" / "own_problems.yaml").read_text())
    folder = Path("runs/own_problems")
    assert study["rows"] == {
        problem.name: {
            "model.path": f"{folder}/{problem.name}/model",
            **problem.run_settings(folder),
            "train.max_steps": problem.steps,
        }
        for problem in PROBLEMS
    }
    assert study["quick"]["rows"] == [problem.name for problem in (*tuning.PROBLEMS, *added.PROBLEMS)]
