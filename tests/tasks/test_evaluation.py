"""pass@k and avg@k, mean rewards, KL and the paper's perplexity against numbers worked out by hand."""

import json
import math

import numpy as np
import pytest
from problem import make_config, write_problem
from resolved import resolved

from tba.run.modes import load_inputs
from tba.runtime.counters import SharedCounters
from tba.searcher.loop import make_search_engine
from tba.tasks.evaluation import (
    CountedEngine,
    Distance,
    make_evaluator,
    reward_metrics,
    sampled_metrics,
)
from tba.tasks.outcomes import RewardFailed
from tba.tasks.rewards.pool import DirectRewards
from tba.tasks.task import FinishedGroup
from tba.types import Completion, Prompt, Request


def test_metrics_are_means_over_prompts_with_standard_errors_over_prompts():
    assert sampled_metrics([[True, False], [False, False], [True, True]], 2) == {
        "pass@2": pytest.approx(2 / 3),
        # (1/3)^2 + (2/3)^2 + (1/3)^2 = 2/3, over 2, over 3
        "pass@2_standard_error": pytest.approx((1 / 9) ** 0.5),
        "avg@2": pytest.approx(0.5),
        # 0, -1/2, 1/2: 1/2, over 2, over 3; over the six samples it would be sqrt(1.5 / 5 / 6) = .22
        "avg@2_standard_error": pytest.approx((1 / 12) ** 0.5),
    }


def test_one_prompt_has_no_standard_error():
    assert sampled_metrics([[True, False]], 2) == {"pass@2": 1.0, "avg@2": 0.5}


def test_one_reward_has_its_mean_and_samples_without_one_are_left_out_as_in_training():
    outcomes = [
        [{"score": 0.5}, {"score": 1.5}],
        [{"score": 1.0}, RewardFailed("lost")],
        [{"score": None}],
        [RewardFailed("no")],
        [{"score": 2.5}, {"score": None}],
        [{"score": float("nan")}],
    ]
    # weight 2: prompts have 2, 2 and 5; standard deviation sqrt(3), over sqrt(3)
    assert reward_metrics(outcomes, {"score": 2.0}, name="reward") == {
        "reward": pytest.approx(3.0),
        "reward_standard_error": pytest.approx(1.0),
    }


def test_several_rewards_are_combined_by_their_weights_and_shown_one_by_one():
    outcomes = [[{"right": 1.0, "short": 0.5, "seen": 4.0}], [{"right": 0.0, "short": None, "seen": 2.0}]]
    # .8 + .2 * .5 = .9 and 0; `short` applies to the first only; weight 0 is measured and counts nothing
    found = reward_metrics(outcomes, {"right": 0.8, "short": 0.2, "seen": 0.0}, name="reward@1")
    assert {name: value for name, value in found.items() if not name.endswith("error")} == {
        "reward@1": pytest.approx(0.45),
        "reward@1/right": pytest.approx(0.5),
        "reward@1/short": pytest.approx(0.5),
        "reward@1/seen": pytest.approx(3.0),
    }


def test_where_every_reward_failed_there_is_no_mean():
    assert reward_metrics([[RewardFailed("lost")]], {"score": 1.0}, name="reward") == {}


def test_an_evaluation_of_own_data_has_the_mean_of_a_dense_reward(tmp_path):
    write_problem(tmp_path)
    config = make_config(tmp_path, "evaluate.samples_per_prompt=3", "task.eval_fraction=0.3")
    inputs = load_inputs(config)
    config = resolved(config, inputs.loaded)
    evaluator = make_evaluator(config, inputs.loaded, inputs.task, DirectRewards(inputs.task))
    engine = make_search_engine(config, inputs.loaded)
    row, seen = SharedCounters.create().trainer, []
    found = evaluator(CountedEngine(engine, row), lambda: seen.append((row["done"], row["of"])))
    seen, prompts = [part for part in seen if part[1]], len(evaluator.prompts)
    assert {of for _, of in seen} == {prompts, 3 * prompts}, "who looks sees how much of it is done"
    assert seen == sorted(seen, key=lambda part: part[::-1])
    assert row["of"] == 0
    values = [name for name in found if not name.endswith("_standard_error")]
    assert values == ["reward", "solved", "pass@3", "avg@3", "reward@3", "num_prompts"]
    texts = [
        inputs.loaded.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True).split()
        for completion in engine.generate(
            [Request(prompt=prompt) for prompt in evaluator.prompts], samples_per_prompt=3, sampling=evaluator.sampling
        )
    ]
    shares = [words.count("w7") / max(1, len(words)) for words in texts]
    assert len(shares) == 3 * len(evaluator.prompts)
    assert found["reward@3"] == pytest.approx(sum(shares) / len(shares))
    assert json.loads(json.dumps(found)) == found


def test_responses_without_a_reward_are_told_and_counted(tmp_path, caplog):
    write_problem(tmp_path)
    settings = ("evaluate.samples_per_prompt=3", "task.eval_fraction=0.3")
    config = make_config(tmp_path, *settings, f"task.rewards=[{{function: '{tmp_path}/rewards.py:always_raises'}}]")
    inputs = load_inputs(config)
    config = resolved(config, inputs.loaded)
    evaluator = make_evaluator(config, inputs.loaded, inputs.task, DirectRewards(inputs.task))
    found = evaluator(make_search_engine(config, inputs.loaded))
    lost = 4 * len(evaluator.prompts)
    assert (found["solved"], found["num_responses_without_reward"]) == (0.0, lost)
    told = f"{lost} of the {lost} responses of an evaluation have no reward and count as not solved, the last: always_raises"
    assert told in caplog.text


def test_an_evaluation_leaves_out_and_counts_the_responses_to_which_no_reward_applies(tmp_path, caplog):
    write_problem(tmp_path)
    rewards = tmp_path / "partly.py"
    # Applies to every other prompt only; where it does, the reward is 1.
    rewards.write_text(
        "def partly(completions, use=(), **columns):\n    return [1.0 if own else None for own in use]\n"
    )
    rows = [{"prompt": f"w{i} w5", "use": i % 2} for i in range(3, 9)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (f"task.eval_data={tmp_path}/eval.jsonl", f"task.rewards=[{{function: '{rewards}:partly'}}]")
    config = make_config(tmp_path, *settings, "evaluate.num_prompts=6", "evaluate.samples_per_prompt=2")
    inputs = load_inputs(config)
    config = resolved(config, inputs.loaded)
    found = make_evaluator(config, inputs.loaded, inputs.task, DirectRewards(inputs.task))(
        make_search_engine(config, inputs.loaded)
    )
    assert (found["reward"], found["reward@2"], found["num_responses_without_reward"]) == (1.0, 1.0, 3 * 3)
    assert (found["solved"], found["accuracy"], found["num_prompts"]) == (0.5, 0.5, 6)  # none of them is solved
    assert "9 of the 18 responses of an evaluation have no reward" in caplog.text
    assert "every reward was None (not applicable)" in caplog.text


def test_rewards_of_an_evaluation_are_asked_for_while_other_responses_are_written(tmp_path):
    """With a slot for one response, those of the first prompts are there long before the last is begun."""
    write_problem(tmp_path)
    config = make_config(tmp_path, "evaluate.samples_per_prompt=2", "generate.slots=1", "task.eval_fraction=0.3")
    inputs = load_inputs(config)
    config = resolved(config, inputs.loaded)
    rewards = DirectRewards(inputs.task)
    evaluator = make_evaluator(config, inputs.loaded, inputs.task, rewards)
    seen = []
    found = evaluator(make_search_engine(config, inputs.loaded), lambda: seen.append(rewards.outstanding))
    num_prompts = len(evaluator.prompts)
    assert set(seen) >= set(range(2 * num_prompts)), "all prompts greedily, then all with samples, one after the other"
    assert rewards.outstanding == 0
    assert found == make_evaluator(config, inputs.loaded, inputs.task, rewards)(
        make_search_engine(config, inputs.loaded)
    )


def group(prompt_tokens: int, *log_probs: list[float]) -> FinishedGroup:
    completions = [
        Completion(
            prompt_id="p",
            sample_index=index,
            token_ids=np.zeros(len(own), np.int32),
            behaviour_log_probs=np.array(own, np.float32),
            policy_log_probs=np.array(own, np.float32),
            version_spans=((0, 0),),
            finish="stop",
        )
        for index, own in enumerate(log_probs)
    ]
    prompt = Prompt(id="p", token_ids=np.zeros(prompt_tokens, np.int32), text="")
    return FinishedGroup(prompt=prompt, completions=completions, texts=[""] * len(completions))


class Start:
    """A start model with these log-probabilities of the responses."""

    def __init__(self, *log_probs):
        self.log_probs = [np.array(own) for own in log_probs]

    def score(self, prompts, responses, temperature):
        return self.log_probs


def test_kl_is_summed_over_the_tokens_of_each_response():
    groups = [group(3, [-1.0, -1.0]), group(5, [-0.5])]
    distance = Distance(Start([-2.0, -3.0], [-1.0]))
    assert distance.kl(groups).tolist() == pytest.approx([1 + 2, 0.5])
    # reward 1 each, beta 0.1
    found = distance.means(groups, np.ones(2), 0.1)["regularised_reward"]
    assert found.tolist() == pytest.approx([1 - 0.3, 1 - 0.05])


def test_perplexity_divides_by_all_tokens_prompts_included():
    groups = [group(3, [-1.0, -1.0]), group(5, [-0.5])]
    # 6 nats over 3 + 2 + 5 + 1 = 11 tokens
    found = Distance(Start([-2.0, -3.0], [-1.0])).perplexity(groups)
    assert found["perplexity"] == pytest.approx(math.exp(6 / 11))


def test_perplexity_per_sample_is_that_of_each_response_with_its_own_tokens():
    groups = [group(3, [-1.0, -1.0], [-0.5]), group(5, [-0.5])]
    # 5 nats over 3 + 2 tokens, 2 over 3 + 1, 1 over 5 + 1
    found = Distance(Start([-2.0, -3.0], [-2.0], [-1.0])).perplexity(groups)
    assert found["perplexity_per_sample"] == pytest.approx((math.exp(1) + math.exp(0.5) + math.exp(1 / 6)) / 3)
