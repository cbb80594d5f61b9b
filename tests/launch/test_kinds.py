"""A run whose searchers are not all alike."""

import json
import math

import numpy as np
import pytest
from problem import make_config, wait_for
from test_failures import steps_done, when

from tba.config import ConfigError, load_config
from tba.launch import train
from tba.launch.checks import check_before_loading
from tba.launch.defaults import with_objective_defaults
from tba.launch.operate import ask_for_searchers, describe, read_status, stop_run
from tba.launch.resume import resumed_config
from tba.objectives.registry import make_objective
from tba.observe.files import RunFolder
from tba.replay.database import find_database, load_groups

SHARP = "sharp: {count: 1, top_p: 0.5, slots: 8, explore: {probability: 0.5, temperature: [3, 3]}}"
KINDS = f"search.kinds={{{SHARP}, plain: {{count: 1, engine: transformers}}}}"
MANY_GROUPS = 12


def last_metrics(config) -> dict:
    lines = RunFolder(config.run_folder).metrics.read_text().splitlines()
    whole = (json.loads(line) for line in reversed(lines) if line.endswith("}"))
    return next((record for record in whole if "loss" in record), {})


def gaps_by_searcher(config) -> dict[int, list[np.ndarray]]:
    """Behaviour minus policy log-probs of each stored group, by the searcher that made it."""
    found: dict[int, list[np.ndarray]] = {}
    for stored in load_groups(find_database(RunFolder(config.run_folder).replay)):
        completions = [trajectory.completion for trajectory in stored.group.trajectories]
        gaps = [completion.behaviour_log_probs - completion.policy_log_probs for completion in completions]
        found.setdefault(stored.group.searcher, []).append(np.concatenate(gaps))
    return found


def test_a_run_of_two_kinds_stores_what_each_has_sampled_and_a_later_searcher_has_its_kind(folder):
    placed = "runtime.placement={trainer: [cpu], searchers: [cpu]}"
    config = make_config(
        folder, "name=kinds", "train.max_steps=500", KINDS, placed, "generate.top_p=1", "search.num_searchers=null"
    )
    seen = {}

    def operate() -> None:
        ask_for_searchers(config.run_folder, 3)
        names = ("searcher/0-sharp/groups", "searcher/1-plain/groups", "searcher/2-sharp/groups")
        seen["all"] = wait_for(lambda: min(last_metrics(config).get(name, 0) for name in names) >= MANY_GROUPS)
        seen["status"] = read_status(config.run_folder)
        stop_run(config.run_folder)

    thread = when(lambda: RunFolder(config.run_folder).status.is_file() and steps_done(config) >= 1, operate)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    thread.join(30.0)
    assert seen["all"]
    assert [role["kind"] for role in seen["status"]["roles"]] == [None, "sharp", "plain", "sharp"]
    assert "searcher-2 (sharp)" in describe(seen["status"])
    assert 0.0 <= last_metrics(config)["searcher/1-plain/mismatch_kl"] < 1e-8
    assert not math.isnan(last_metrics(config)["searcher/2-sharp/mismatch_kl"])

    gaps = gaps_by_searcher(config)
    assert sorted(gaps) == [0, 1, 2]
    assert all(np.allclose(gap, 0.0, atol=1e-5) for gap in gaps[1]), "the plain kind samples from the policy itself"
    for searcher in (0, 2):
        # A nucleus of half the probability makes what is in it up to twice as probable; exploring visits have all tokens,
        # at three times the temperature.
        in_nucleus = [gap.min() > -1e-5 for gap in gaps[searcher]]
        assert any(in_nucleus)
        assert not all(in_nucleus)
        assert all(gap.max() <= math.log(2.0) + 1e-5 for gap, cut in zip(gaps[searcher], in_nucleus) if cut)

    stored = load_config(RunFolder(config.run_folder).config)
    assert {name: kind.slots for name, kind in stored.search.kinds.items()} == {"sharp": 8, "plain": 16}
    again = resumed_config(with_device(config), RunFolder(config.run_folder))
    assert again.search.kinds["plain"].slots == 16


def with_device(config):
    """The same run on another machine: what it was filled in with is kept, and a kind may have moved."""
    kinds = {**config.search.kinds, "plain": config.search.kinds["plain"].model_copy(update={"device": "cuda:3"})}
    moved = config.model_copy(update={"search": config.search.model_copy(update={"kinds": kinds})})
    return with_objective_defaults(moved)


def test_an_objective_that_needs_the_policys_own_samples_refuses_the_kind_that_has_others():
    with pytest.raises(ConfigError) as error:
        make_objective(load_config(None, ["objective.name=reinforce", KINDS]))
    assert str(error.value).startswith("search.kinds.sharp: reinforce takes every response for a sample of the policy")
    truncates, does_not = "generate.top_p=0.9", "search.kinds={a: {count: 1, top_p: 1}}"
    make_objective(load_config(None, ["objective.name=reinforce", truncates, does_not]))


def test_vllm_is_missed_for_the_kind_that_wants_it(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load_config(
        None, ["search.kinds={a: {count: 1}, fast: {count: 1, engine: vllm}}", f"output={tmp_path}/runs"]
    )
    with pytest.raises(ValueError, match=r"search\.kinds\.fast\.engine=vllm needs vLLM, which is not installed"):
        check_before_loading(config)
