"""The evaluators that tasks make: of preference tuning and red-teaming, on the shipped models, and of a new task."""

import numpy as np
import pytest
from resolved import resolved

from tba.config import load_config
from tba.engine.make_engine import make_scorer
from tba.run.modes import load_inputs
from tba.run.start import evaluate_model
from tba.run.start import train as run_training
from tba.searcher.loop import make_search_engine
from tba.tasks.arithmetic.problems import ArithmeticTask, held_out_problems
from tba.tasks.evaluation import make_evaluator
from tba.tasks.red_team.attacking import effective_modes
from tba.tasks.registry import TASKS
from tba.tasks.rewards.pool import DirectRewards
from tba.tasks.tldr.posts import wins
from tba.types import Request

pytestmark = pytest.mark.slow


def evaluator_and_engine(*overrides):
    config = load_config(None, list(overrides))
    inputs = load_inputs(config)
    config = resolved(config, inputs.loaded)
    evaluator = make_evaluator(
        config,
        inputs.loaded,
        inputs.task,
        DirectRewards(inputs.task),
        start=lambda: make_scorer(inputs.loaded.model, max_length=inputs.loaded.context),
    )
    return evaluator, make_search_engine(config, inputs.loaded), inputs


RED_TEAM = (
    "task.name=red_team",
    "model.path=tba:red_team",
    "generate.max_new_tokens=16",
    "objective.beta=0.13",
    "evaluate.samples_per_prompt=256",
)
TLDR = (
    *("task.name=tldr", "model.path=tba:tldr", "generate.max_new_tokens=14", "evaluate.num_prompts=60"),
    "task.num_train_prompts=50",
)


@pytest.fixture(scope="module")
def red_team():
    """Evaluator, engine and inputs of the start model, for tests that change none of them."""
    return evaluator_and_engine(*RED_TEAM)


@pytest.fixture(scope="module")
def attacks_and_scores(red_team):
    """Text and whether it ended of each attack of the start model, and what the evaluator found."""
    evaluator, engine, inputs = red_team
    attacks = engine.generate(
        [Request(prompt=evaluator.prompts[0])], samples_per_prompt=256, sampling=evaluator.sampling
    )
    texts = [
        (inputs.loaded.tokenizer.decode(c.token_ids.tolist(), skip_special_tokens=True), c.finish == "stop")
        for c in attacks
    ]
    return texts, evaluator(engine)


def test_ties_count_half():
    # above, tie, below
    assert wins(np.array([2.0, 1.0, 0.0]), np.array([1.0, 1.0, 1.0])).mean() == pytest.approx(0.5)


def test_attacks_of_the_start_model_have_no_kl_and_their_own_modes(red_team, attacks_and_scores):
    _, _, inputs = red_team
    attacks, found = attacks_and_scores
    modes = [mode for mode in (inputs.task.mode_of(*attack) for attack in attacks) if mode is not None]
    assert found["success"] == pytest.approx(len(modes) / 256)
    assert found["modes"] == len(set(modes))
    assert found["effective_modes"] == pytest.approx(effective_modes([modes.count(mode) for mode in set(modes)]))
    assert found["kl"] == pytest.approx(0.0, abs=1e-4)
    assert found["regularised_reward"] == pytest.approx(found["success"], abs=1e-4)
    share = len(modes) / 256
    assert found["success_standard_error"] == pytest.approx((share * (1 - share) / 255) ** 0.5)
    assert (found["num_prompts"], found["num_attacks"]) == (1, 256)


def test_diversity_is_told_of_the_successes_and_of_all_attacks(red_team, attacks_and_scores):
    _, _, inputs = red_team
    pairs, found = attacks_and_scores
    succeeded = [text for text, end in pairs if inputs.task.mode_of(text, end) is not None]
    for name, texts in (("cosine_distance", succeeded), ("cosine_distance_all_attacks", [text for text, _ in pairs])):
        x = inputs.task.embed(texts)
        cosines = (x @ x.T)[~np.eye(len(x), dtype=bool)]
        assert found[name] == pytest.approx(1 - cosines.mean(), abs=1e-5)
    assert found["distinct_all_attacks"] == len({text for text, _ in pairs}) / 256


def test_summaries_of_the_start_model():
    evaluator, engine, _ = evaluator_and_engine(*TLDR)
    found = evaluator(engine)
    assert next(iter(found)) == "win_rate"
    assert 0.1 < found["win_rate"] < 0.5  # 28% on 2,000 posts, standard error here 6 points
    assert found["kl"] == pytest.approx(0.0, abs=1e-4)
    assert found["win_rate_greedy"] > found["win_rate"]
    assert 1.0 < found["perplexity"] < 1.5
    assert 1.0 < found["perplexity_per_sample"] < 1.5
    assert found["num_prompts"] == 60
    # Ties apart, a share p of 60 posts has the standard error sqrt(p (1 - p) / 59).
    share = found["win_rate"]
    assert found["win_rate_standard_error"] == pytest.approx((share * (1 - share) / 59) ** 0.5, rel=0.15)
    assert found["regularised_reward"] == pytest.approx(found["reward"] - 0.05 * found["kl"], abs=1e-3)


def test_a_trained_run_is_measured_from_its_start_model(tmp_path):
    """One step away the KL is small but not 0, in the run's own evaluation and in `tba evaluate` alike."""
    settings = ["train.max_steps=2", "train.learning_rate=1e-2", "train.responses_per_step=16", "mode=sync"]
    settings += [f"output={tmp_path}", "name=run", "observe.progress=false", "train.samples_per_prompt=8"]
    summary = run_training(load_config(None, [*TLDR, *settings]))
    assert summary["final"]["kl"] > 0.01
    assert not [name for name in summary["final"] if name.endswith("standard_error") or name.startswith("num_")]
    assert summary["final_standard_error"].keys() >= {"win_rate", "win_rate_greedy", "gold", "reward", "kl"}
    assert summary["evaluated"] == {"num_prompts": 60}
    again = evaluate_model(str(tmp_path / "run"), [])
    assert again["kl"] == pytest.approx(summary["final"]["kl"], rel=0.02)
    assert again["win_rate"] == pytest.approx(summary["final"]["win_rate"], abs=1e-6)
    error = summary["final_standard_error"]["win_rate"]
    assert again["win_rate_standard_error"] == pytest.approx(error, abs=1e-6)


def test_a_bare_model_has_no_start_to_measure_from():
    found = evaluate_model("tba:tldr", ["task.name=tldr", "generate.max_new_tokens=14", "evaluate.num_prompts=10"])
    assert "win_rate" in found
    assert "kl" not in found


def test_no_success_is_no_error(tmp_path):
    """Attacks cut off after two words never succeed."""
    evaluator, engine, _ = evaluator_and_engine(*RED_TEAM, "generate.max_new_tokens=2")
    found = evaluator(engine)
    assert found["success"] == found["modes"] == found["cosine_distance"] == found["self_bleu"] == 0.0


def test_evaluations_do_not_reuse_the_random_numbers_of_training(red_team):
    evaluator, engine, inputs = red_team
    trained, evaluated = (
        {
            c.sample_index: c.token_ids.tolist()
            for c in engine.generate([Request(prompt=prompt)], samples_per_prompt=64, sampling=evaluator.sampling)
        }
        for prompt in (inputs.task.prompts("train")[0], evaluator.prompts[0])
    )
    assert sum(trained[index] == evaluated[index] for index in trained) < 10


def test_the_cut_off_rule_of_training_counts_in_the_reward(monkeypatch):
    monkeypatch.setattr("tba.config.sections.CUT_OFF_REWARD", -7.0)  # far below what a summary gets
    rewards = {}
    for rule in ("keep", "penalise"):
        settings = ["generate.max_new_tokens=6", f"train.truncated={rule}"]
        evaluator, engine, _ = evaluator_and_engine(*TLDR, *settings)
        rewards[rule] = evaluator(engine)
    share = rewards["keep"]["cut_off"]
    assert share > 0.1
    assert rewards["penalise"]["reward"] < rewards["keep"]["reward"] - 3 * share


class FirstWordTask(ArithmeticTask):
    """A task with a metric of its own: the share of problems that begin with a given name."""

    name = "first_word"

    def make_evaluator(self, inputs):
        return FirstWordEvaluator(inputs.prompts(self))


class FirstWordEvaluator:
    def __init__(self, prompts):
        self.prompts = prompts

    def __call__(self, engine, between_steps=None):
        return {"begins_with_mia": sum(prompt.text.startswith("Mia ") for prompt in self.prompts) / len(self.prompts)}


def test_a_new_task_is_one_line_in_the_registry_and_is_evaluated_by_its_own_metrics(monkeypatch):
    monkeypatch.setitem(TASKS, "first_word", FirstWordTask)
    found = evaluate_model("tba:arithmetic", ["task.name=first_word", "evaluate.num_prompts=40"])
    begins = [problem.text.split()[0] == "Mia" for problem in held_out_problems()[:40]]
    assert found == {"begins_with_mia": pytest.approx(sum(begins) / 40)}
    assert 0 < sum(begins) < 40
