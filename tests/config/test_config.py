"""Config: resolution order, schedules, and every error by its message."""

from pathlib import Path

import pytest
from resolved import resolved

from tba.config import ConfigError, Schedule, dump_config, load_config
from tba.config.reading import make_config, read_yaml

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("seed: 3\ntrain:\n  max_steps: 7\n  samples_per_prompt: 4\n")
    config = load_config(path, ["train.max_steps=9", "objective.beta=1e-3"])
    assert (config.seed, config.train.max_steps, config.train.samples_per_prompt) == (3, 9, 4)
    assert config.objective.beta.start == 1e-3
    assert config.train.responses_per_step == 128


def test_a_section_that_is_given_as_a_whole_leaves_the_other_settings_of_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  max_steps: 7\n  learning_rate: 1e-3\n")
    train = load_config(path, ["train.weight_decay=0.1", "train={max_steps: 9, keep_checkpoints: 1}"]).train
    assert (train.max_steps, train.learning_rate.start, train.weight_decay, train.keep_checkpoints) == (9, 1e-3, 0.1, 1)


def test_whole_numbers_are_decimal():
    """YAML 1.1 reads 0100 as 64, and 1:30 as 90."""
    config = load_config(None, ["train.max_steps=0100", "seed=0x10", "name=007", "replay.capacity=2_000"])
    assert (config.train.max_steps, config.seed, config.name, config.replay.capacity) == (100, 16, "007", 2000)
    with pytest.raises(ConfigError, match=r"train\.max_seconds: .* unable to parse string as a number, got '1:30'"):
        load_config(None, ["train.max_seconds=1:30"])


def test_a_reward_may_be_its_function_alone():
    config = load_config(None, ["task.name=custom", "task.data=d.jsonl", "task.rewards=[r.py:f]"])
    assert [(reward.function, reward.weight) for reward in config.task.rewards] == [("r.py:f", 1.0)]


def test_yaml_reads_scientific_numbers_in_a_file_too(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  learning_rate: 1e-5\nobjective:\n  beta: {kind: linear, start: 1e-1, end: 1e-2}\n")
    config = load_config(path)
    assert (config.train.learning_rate.start, config.objective.beta.end) == (1e-5, 1e-2)


def test_a_file_in_utf_16_is_read_too(tmp_path):
    """Editors and shells of Windows write it, and YAML knows it by its mark."""
    path = tmp_path / "run.yaml"
    path.write_bytes("name: größer\ntrain: {max_steps: 3}\n".encode("utf-16"))
    config = load_config(path)
    assert (config.name, config.train.max_steps) == ("größer", 3)
    path.write_bytes("name: größer\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"run\.yaml is not valid YAML: character 8 is not utf-8: invalid"):
        load_config(path)


def test_words_that_look_like_numbers_stay_words():
    assert [load_config(None, [f"name={name}"]).name for name in ("nan", "inf", "run-1e5")] == ["nan", "inf", "run-1e5"]


def test_the_dumped_config_loads_to_the_same_config(tmp_path):
    config = load_config(
        None,
        ["objective.beta=0.05", "objective.beta.kind=linear", "objective.beta.end=0.01", "train.learning_rate=3e-6"],
    )
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_loads(path):
    load_config(path, ["model.path=some/model"])  # which one of them leaves to the user


def test_there_are_shipped_configs():
    assert CONFIGS


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.max_step=3", "unknown key train.max_step: did you mean train.max_steps?"),
        ("max_steps=3", "unknown key max_steps: did you mean train.max_steps?"),
        ("lr=1e-5", "unknown key lr: did you mean train.learning_rate?"),
        ("zzz=3", "unknown key zzz: the config takes name, output"),
        ("train.samples_per_prompt=0", "train.samples_per_prompt: Input should be greater than or equal to 1, got 0"),
        ("train.responses_per_step=30", "is not divisible by train.samples_per_prompt=8: use 24 or 32"),
        ("generate.temperature=0", "generate.temperature: Input should be greater than 0, got 0"),
        ("objective.beta.end=0.1", "objective.beta.start: Field required"),
        ("objective.beta={start: 0.2, end: 0.1}", "objective.beta: a constant schedule has end=0.1"),
        ("train.max_steps", "override 'train.max_steps' has no value"),
        ("replay.capacity=10", "replay.capacity=10 cannot hold one step"),
        ("replay.capacity_per_prompt=4", "replay.capacity_per_prompt=4 cannot hold one rollout's 8 responses"),
        ("generate.min_new_tokens=100", "generate.min_new_tokens=100 is above generate.max_new_tokens=64"),
        (
            "task.rewards=[{function: 3}]",
            "task.rewards.0.function: 3 is neither `file.py:name` nor a Python",
        ),
        ("task.name=custom", "task.data is needed for task.name=custom"),
        ("task.rewards=[5]", "task.rewards.0: a section is needed, got 5: write task.rewards=[{SETTING: VALUE}]"),
        ("objective=grpo", "got 'grpo': write objective.name=grpo, or objective: {name: grpo} in a file."),
        ("model.lora=true", "got True: write model.lora={}, or lora: {} in a file."),
        ("model.lora=false", "got False: write model.lora=null, or lora: null in a file."),
        (
            "task.prompt_template=Q",
            "task.prompt_template is for gsm8k and math, and task.name=arithmetic asks by its own",
        ),
        (
            "objective.beta={start: 1, begin: 2}",
            "unknown key objective.beta.begin: objective.beta takes kind, start, end, steps",
        ),
        (
            "train.learning_rate.warmup_steps=-1",
            "train.learning_rate.warmup_steps: Input should be greater than or equal",
        ),
    ],
)
def test_a_bad_setting_is_explained(override, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["task.name=custom", "task.environment=game.py:Game", "objective.name=vineppo"],
            "objective.name=vineppo continues responses from their middle",
        ),
        (
            ["task.name=custom", "task.environment=game.py:Game", "search.explore.reference_share=0.5"],
            "search.explore.reference_share is for responses of one turn",
        ),
        (
            ["task.name=custom", "task.environment={agent: a.py:run, tools: [t.py:f]}"],
            "task.environment.agent plays whole episodes, with tools of its own",
        ),
        (["mode=sync", "train.publish_every=3"], "train.publish_every=3 makes no sense in sync mode"),
        (["mode=sync", "search.num_searchers=2"], "search.num_searchers=2 needs mode=async"),
        (["replay.max_lag=0", "train.publish_every=2"], "replay.max_lag=0 cannot be kept"),
        (["search.explore.temperature=[2, 1]"], "search.explore: temperature=[2.0, 1.0] is no range"),
        (["replay.durability=node"], "this run has only one: use power, or"),
        (["replay.durability=node", "runtime.kind=ray"], "with runtime.kind=ray and the runtime.address of a cluster"),
        (
            ["replay.durability=node", "runtime.kind=ray", "runtime.address=auto", "mode=sync"],
            "replay.durability=node keeps a second copy on another node",
        ),
        (
            [
                "task.name=custom",
                "task.data=d.jsonl",
                "task.rewards=[{function: r.py:f}]",
                "task.eval_fraction=0",
                "evaluate.best_metric=accuracy",
            ],
            "evaluate.best_metric=accuracy needs evaluations, and task.eval_fraction=0 holds no prompt out",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    assert message in str(error.value)


def test_all_problems_are_listed_at_once():
    with pytest.raises(ConfigError) as error:
        make_config({"train": {"max_stepz": 1}, "generate": {"temperature": -1}})
    assert len(str(error.value).splitlines()) == 2


def test_a_missing_or_broken_file_is_explained(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "nothing.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("train: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(broken)
    broken.write_text("train.max_steps: 5")
    with pytest.raises(ConfigError, match=r"in a file sections are nested, write train: \{max_steps: VALUE\}"):
        load_config(broken)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 7\n", "line 2, column 1: the key seed is given twice, first in line 1"),
        ("train:\n  max_steps: 1\nseed: 1\ntrain:\n  settle: 0\n", "line 4, column 1: the key train is given twice"),
        ("objective: {beta: 0.1, name: tb, beta: 0.2}\n", "line 1, column 34: the key beta is given twice"),
    ],
)
def test_a_key_that_a_file_gives_twice_is_refused_with_its_line(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "run.yaml")


def test_a_mapping_may_take_over_another_one_and_change_it():
    text = "a: &a {x: 1, y: 1}\nb: &b\n  <<: *a\n  x: 2\nc:\n  <<: *b\n  y: 3\n"
    assert read_yaml(text) == {"a": {"x": 1, "y": 1}, "b": {"x": 2, "y": 1}, "c": {"x": 2, "y": 3}}


def test_linear_schedule_by_hand():
    schedule = Schedule(kind="linear", start=1.0, end=0.0, steps=4)
    assert [schedule.at(step, progress=step / 100) for step in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_a_schedule_over_the_run_follows_its_progress_by_hand():
    line = Schedule(kind="linear", start=1.0, end=0.0)
    assert [line.at(step, progress=done) for step, done in ((0, 0.0), (3, 0.25), (5, 0.9))] == pytest.approx(
        [1, 0.75, 0.1]
    )
    # Warm-up of 2 steps; at step 4 half of the run is done, so a step is an eighth of it: (.5 - .25) / (1 - .25) = 1/3.
    warm = Schedule(kind="linear", start=3.0, end=0.0, warmup_steps=2)
    assert [warm.at(step, progress=done) for step, done in ((0, 0.0), (1, 0.1), (4, 0.5))] == pytest.approx(
        [1.5, 3.0, 2.0]
    )
    # The last fifth falls; decay_steps=2 are a quarter of the run where a step is an eighth.
    wsd = Schedule(kind="wsd", start=1.0, end=0.0)
    assert [wsd.at(8, progress=done) for done in (0.8, 0.9, 1.0)] == pytest.approx([1.0, 0.5, 0.0])
    assert Schedule(kind="wsd", start=1.0, end=0.0, decay_steps=2).at(7, progress=7 / 8) == pytest.approx(0.5)


def test_a_run_has_as_many_steps_as_were_given_or_200_or_with_seconds_as_many_as_there_is_time_for():
    def limits(*overrides):
        train = load_config(None, list(overrides)).train
        return train.max_steps, train.max_seconds

    assert limits() == (200, None)
    assert limits("train.max_seconds=90") == (None, 90.0)
    assert limits("train.max_seconds=90", "train.max_steps=5") == (5, 90.0)
    config = load_config(None, ["train.max_seconds=90", "train.max_steps=5"])
    assert [config.progress_at(*done) for done in ((1, 9.0), (1, 45.0), (4, 45.0), (5, 1.0), (1, 95.0))] == [
        *(0.2, 0.5, 0.8, 1.0, 1.0),
    ]
    with pytest.raises(ConfigError, match=r"train\.max_seconds"):
        load_config(None, ["train.max_seconds=0"])


def test_cosine_schedule_by_hand():
    schedule = Schedule(kind="cosine", start=2.0, end=0.0, steps=2)
    assert [schedule.at(step, progress=step / 9) for step in range(3)] == pytest.approx([2.0, 1.0, 0.0])


def test_warm_up_stable_decay_by_hand():
    schedule = Schedule(kind="wsd", start=1.0, end=0.0, steps=10, warmup_steps=2, decay_steps=2)
    values = [schedule.at(step, progress=step / 10) for step in range(11)]
    assert values == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.5, 0])


def test_a_schedule_that_jumps_to_its_end_by_hand():
    schedule = Schedule(kind="linear", start=1.0, end=0.2, steps=8, end_from_step=3)
    assert [schedule.at(step, progress=step / 100) for step in range(6)] == pytest.approx(
        [1.0, 0.9, 0.8, 0.2, 0.2, 0.2]
    )
    with pytest.raises(ValueError, match="end_from_step=3 needs a schedule with an `end`"):
        Schedule(kind="linear", start=1.0, end_from_step=3)
    with pytest.raises(ValueError, match="must not lie in the warm-up of 5 steps"):
        Schedule(kind="linear", start=1.0, end=0.2, warmup_steps=5, end_from_step=3)


def test_a_reciprocal_schedule_is_linear_in_1_over_its_value():
    # 1 / value from 1 to 5 in 4 steps: 1, 2, 3, 4, 5
    schedule = Schedule(kind="reciprocal", start=1.0, end=0.2, steps=4)
    assert [schedule.at(step, progress=step / 100) for step in (0, 1, 2, 4, 50)] == pytest.approx(
        [1, 1 / 2, 1 / 3, 0.2, 0.2]
    )
    with pytest.raises(ValueError, match="reciprocal schedule needs start and end above 0"):
        Schedule(kind="reciprocal", start=1.0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["search.explore.reference_share=0.01"], "of the 8 responses of a rollout is 0"),
        (["search.explore.reference_share=0.99"], "of the 8 responses of a rollout is 8"),
    ],
)
def test_a_reference_share_must_leave_both_something_to_say(overrides, words):
    with pytest.raises(ConfigError, match=words):
        load_config(None, overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["mode=sync", "replay.max_replay_ratio=2"], "replay.max_replay_ratio=2 cannot be kept"),
        (["mode=fixed_lag", "replay.max_lag=0"], "replay.max_lag=0 is no lag for mode=fixed_lag: use mode=sync"),
        (["replay.max_lag=1", "train.publish_every=4"], "allow at least 3"),
    ],
)
def test_what_replay_cannot_keep_is_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        load_config(None, overrides)


@pytest.mark.parametrize(
    ("overrides", "m", "deduplicate", "reuse"),
    [
        (["mode=sync"], 1.0, False, 1.0),
        (["mode=sync", "train.updates_per_batch=3"], 1.0, False, 3.0),
        (["mode=sync", "replay.on_policy_probability=0.5", "replay.deduplicate=true"], 0.5, True, 1.0),
        (["mode=fixed_lag", "replay.max_lag=2"], 1.0, False, 1.0),
        (["replay.max_replay_ratio=2"], 1.0, False, 2.0),
    ],
)
def test_what_the_mode_decides_about_replay_gives_way_to_what_was_set(overrides, m, deduplicate, reuse):
    replay = resolved(load_config(None, overrides)).replay
    assert replay.on_policy_probability == m
    assert deduplicate is None or replay.deduplicate is deduplicate
    assert reuse is None or replay.max_replay_ratio == reuse


PACE, DROP, KEEP = (True, False), (False, True), (False, False)
"""Whether searchers keep pace, and whether old responses expire."""


@pytest.mark.parametrize(
    ("overrides", "uses", "staleness"),
    [
        ([], 1, PACE),
        (["search.num_searchers=12"], 1, PACE),
        (["replay.max_lag=3"], 1, PACE),
        (["replay.max_replay_ratio=4"], 4, PACE),
        (["replay.max_replay_ratio=4", "train.updates_per_batch=2"], 2, PACE),
        (["replay.max_replay_ratio=1.5"], None, KEEP),
        (["replay.max_replay_ratio=0.5"], None, KEEP),
        (["replay.on_policy_probability=0.9"], None, KEEP),
        (["replay.on_policy_probability=0.9", "replay.max_lag=3"], None, DROP),
        (["replay.imports=[old.jsonl]"], None, KEEP),
        (["reference.reset_every=50"], 1, KEEP),
        (["reference.reset_every=50", "replay.max_lag=3"], 1, DROP),
        (["reference.reset_every=50", "replay.on_reference_reset=recompute"], 1, PACE),
        (["mode=sync"], None, KEEP),
        (["mode=sync", "replay.on_policy_probability=0.5", "replay.max_lag=3"], None, DROP),
        (["mode=fixed_lag", "replay.max_lag=3"], None, KEEP),
    ],
)
def test_what_is_trained_a_whole_number_of_times_waits_in_a_queue_that_searchers_keep_pace_with(
    overrides, uses, staleness
):
    config = load_config(None, overrides)
    assert (config.uses_per_group, (config.keeps_pace, config.expires)) == (uses, staleness)
    filled = resolved(config)
    assert (filled.uses_per_group, (filled.keeps_pace, filled.expires)) == (uses, staleness)


def test_two_steps_of_groups_may_wait_where_nothing_else_bounds_their_age():
    assert load_config(None, ["reference.reset_every=50"]).max_waiting_groups == 32
    assert load_config(None, ["reference.reset_every=50", "replay.max_lag=3"]).max_waiting_groups is None
    assert load_config(None).max_waiting_groups is None


def test_sections_and_lists_of_a_file_with_nothing_below_them_are_at_their_defaults(tmp_path):
    path = tmp_path / "commented.yaml"
    path.write_text(
        "train:\n  # max_steps: 5\ntask:\n  name: arithmetic\n  red_team:\nobserve:\n  sinks:\n  # - wandb\n"
    )
    assert load_config(path) == load_config()
    assert load_config(path, ["train.max_steps=7"]) == load_config(None, ["train.max_steps=7"])


def test_null_is_a_value_where_a_setting_may_be_none(tmp_path):
    path = tmp_path / "null.yaml"
    path.write_text("train: {max_grad_norm: }\n")
    assert load_config(path).train.max_grad_norm is None  # no clipping; the default is 1


def test_a_list_that_is_written_without_brackets_is_told_how_to_write_it():
    with pytest.raises(
        ConfigError, match=r"observe\.sinks: a list is needed, got 'wandb': write observe\.sinks=\[wandb\]"
    ):
        load_config(None, ["observe.sinks=wandb"])
