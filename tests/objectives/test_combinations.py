"""Objectives from configs: defaults, settings, and combinations that are refused in words."""

import pytest
from resolved import resolved

from tba.config import ConfigError, load_config
from tba.objectives.registry import OBJECTIVES, make_objective


def config(*overrides: str):
    return load_config(None, overrides)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_runs_with_its_defaults_and_declares_what_it_needs(name):
    filled = resolved(config(f"objective.name={name}"))
    objective = make_objective(filled)
    assert type(objective) is OBJECTIVES[name]
    assert filled.objective.beta.start == objective.default_beta
    assert filled.replay.deduplicate is False
    assert filled.reference.reset_every == (50 if name == "tba_prime" else 0)
    assert resolved(filled) == filled


@pytest.mark.parametrize(
    ("name", "max_new_tokens", "beta"),
    [("tb", 16, 0.01), ("tb", 64, 0.01), ("tb", 128, 0.005), ("tb", 400, 0.0016), ("rloo", 400, 0.05)],
)
def test_the_pull_of_trajectory_balance_is_weaker_where_responses_are_long(name, max_new_tokens, beta):
    overrides = [f"objective.name={name}", f"generate.max_new_tokens={max_new_tokens}"]
    assert resolved(config(*overrides)).objective.beta.start == pytest.approx(beta)
    given = resolved(config(*overrides, "objective.beta=0.02"))
    assert given.objective.beta.start == 0.02


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective.name=grop"], "objective.name=grop is unknown: did you mean grpo"),
        (["objective.name=xyz"], "choose one of tb, tb_learned_z, subtb, tba_prime"),
        (["objective.trust_regio=exact"], "unknown key objective.trust_regio for objective.name=tb: did you mean"),
        (["objective.name=rloo", "objective.clip=0.2"], "rloo takes beta."),
        (["objective.name=ppo", "objective.clip=2"], "objective.clip: Input should be less than 1, got 2"),
        (["objective.beta=-1"], "objective.beta must stay above 0 for tb, got start=-1.0"),
        (["objective.beta={kind: linear, start: 0.05}"], "got start=0.05, end=0.0: set objective.beta.end"),
        (["objective.name=grpo", "objective.beta=-0.1"], "objective.beta must not be negative"),
        (["train.samples_per_prompt=1"], "train.samples_per_prompt must be at least 2 for tb, got 1"),
        (["objective.name=grpo", "replay.imports=[a.jsonl]"], "replay.imports cannot be used with grpo"),
        (["objective.name=tba_prime", "replay.imports=[a.jsonl]"], "replay.imports cannot be used with tba_prime"),
        (["objective.name=vineppo", "train.truncated=drop"], "train.truncated=drop biases vineppo"),
        (
            ["objective.name=ppo", "search.explore.reference_share=0.25"],
            "search.explore.reference_share=0.25 cannot be used with ppo: it needs the log-probs of the policy itself",
        ),
        (["objective.name=tba_prime", "train.updates_per_batch=4"], "reference.reset_every=50 falls between"),
        (["objective.name=rloo", "replay.imports=[a.jsonl]"], "replay.imports cannot be used with rloo"),
        (["objective.name=grpo", "replay.deduplicate=true"], "replay.deduplicate=true biases grpo"),
        (["objective.name=rloo", "generate.top_p=0.9"], "rloo takes every response for a sample of the policy itself"),
        (["objective.name=rloo", "generate.min_new_tokens=3"], "rloo takes every response for a sample of the policy"),
        (["objective.name=reinforce", "train.samples_per_prompt=1"], "must be at least 2 for reinforce, got 1"),
        (["objective.name=dr_grpo", "reference.reset_every=10"], "with objective.beta=0 dr_grpo has no reference"),
        (["objective.name=ppo", "train.updates_per_batch=4", "reference.reset_every=10"], "make it a multiple"),
    ],
)
def test_senseless_combinations_are_refused_in_words(overrides, message):
    with pytest.raises(ConfigError) as error:
        make_objective(config(*overrides))
    assert message in str(error.value)


def test_without_a_reference_there_is_nothing_to_reset():
    for without in ("objective.beta=0", "model.lora={}"):
        assert resolved(config("objective.name=tba_prime", without)).reference.reset_every == 0


def test_samples_of_the_reference_are_allowed_where_the_log_probs_of_the_policy_are_not_needed():
    share = "search.explore.reference_share=0.25"
    make_objective(config("objective.name=tba_prime", share))
    make_objective(config("objective.name=ppo", "objective.beta=0", share))


def test_one_response_per_prompt_is_enough_for_objectives_that_compare_none():
    for name in ("tb_learned_z", "ppo", "vineppo"):
        make_objective(config(f"objective.name={name}", "train.samples_per_prompt=1"))


def test_the_constant_length_follows_the_longest_response():
    resolved = config("objective.name=dr_grpo", "generate.max_new_tokens=77")
    assert make_objective(resolved).normal_length == 77
    assert make_objective(config("objective.name=dr_grpo", "objective.normal_length=5")).normal_length == 5
