"""Responses of an evaluation in a file, and paired differences of two files."""

import json
import random

import numpy as np
import pytest
from typer.testing import CliRunner

from tba.cli import app
from tba.tasks.evaluation import difference, paired_differences, responses_file


def write(path, shares, kind="sampled", samples=4):
    """Prompts p0, p1, ... with so many of their samples solved."""
    lines = [
        {
            "prompt_id": f"p{index}",
            "kind": kind,
            "prompt": "?",
            "responses": [{"text": "", "rewards": {}, "solved": sample < solved} for sample in range(samples)],
        }
        for index, solved in enumerate(shares)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_difference_is_taken_prompt_by_prompt(tmp_path):
    own, other = write(tmp_path / "a.jsonl", [4, 2, 0, 1]), write(tmp_path / "b.jsonl", [3, 2, 1])
    found = paired_differences(own, other)["avg@4"]
    # 1 - .75, .5 - .5, 0 - .25; the fourth prompt is in one file only
    assert found["difference"] == pytest.approx(0.0)
    assert found["standard_error"] == pytest.approx(0.25 / 3**0.5)
    assert found["num_prompts"] == 3


def test_rewards_that_are_neither_0_nor_1_are_compared_too(tmp_path):
    """By their components, where they have values: of a dense reward the share that is solved says little."""
    files = []
    for name, values in (
        ("a.jsonl", [[0.5, None], [0.25, 0.75], [None, None]]),
        ("b.jsonl", [[0.0, 1.0], [1.0, 1.0], [1.0, 1.0]]),
    ):
        lines = [
            {
                "prompt_id": f"p{index}",
                "kind": "sampled",
                "prompt": "?",
                "responses": [
                    *({"text": "", "rewards": {"dense": value, "right": 1.0}, "solved": False} for value in own),
                    {"text": "", "reward_failed": "lost", "solved": False},
                ],
            }
            for index, own in enumerate(values)
        ]
        files.append(tmp_path / name)
        files[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = paired_differences(*files)
    assert set(found) == {"avg@3", "reward@3/dense"}  # `right` is 0 or 1, as `solved` is
    # .5 - .5 and .5 - 1; of the third prompt one file has no value
    assert found["reward@3/dense"]["difference"] == pytest.approx(-0.25)
    assert found["reward@3/dense"]["num_prompts"] == 2


def test_what_makes_both_models_right_or_wrong_does_not_widen_the_interval():
    hard = np.repeat([0.0, 1.0], 200)
    gaps = np.tile([0.0, 0.0, 0.0, 0.25], 100)
    found = difference(list((hard + gaps) - hard))
    assert found["difference"] == pytest.approx(0.0625)
    assert 0.05 < found["low"] < 0.0625 < found["high"] < 0.075
    unpaired = (2 * hard.var() / len(hard)) ** 0.5
    assert found["standard_error"] < unpaired / 6


def test_the_interval_is_that_of_a_bootstrap_done_one_draw_at_a_time():
    gaps, draw = [0.5, -0.25, 0.0, 0.25, 1.0, 0.0, 0.25, -0.5], random.Random(1)
    means = sorted(sum(draw.choice(gaps) for _ in gaps) / len(gaps) for _ in range(10_000))
    found = difference(gaps)
    assert found["low"] == pytest.approx(means[250], abs=0.02)
    assert found["high"] == pytest.approx(means[9_750], abs=0.02)


def test_files_without_a_common_metric_are_refused(tmp_path):
    own, other = write(tmp_path / "a.jsonl", [4]), write(tmp_path / "b.jsonl", [1], kind="greedy", samples=1)
    with pytest.raises(ValueError, match=r"no prompt and metric in common .avg@4 of 1 prompts; accuracy of 1 prompts"):
        paired_differences(own, other)


@pytest.mark.parametrize("text", ["no json", '{"prompt_id": "p0"}', "[]"])
def test_a_file_of_something_else_is_named(tmp_path, text):
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other.jsonl is not what --responses writes"):
        paired_differences(path, path)


def test_a_model_is_evaluated_against_the_responses_of_another(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    evaluate = ["evaluate", "tba:arithmetic", "--num-prompts", "6", "--samples", "2", "model.device=cpu"]
    result = CliRunner().invoke(app, [*evaluate, "--responses", str(first)], catch_exceptions=False)
    found = json.loads(result.stdout.strip().splitlines()[-1])
    lines = [json.loads(line) for line in first.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["greedy"] * 6 + ["sampled"] * 6
    sampled = [response["solved"] for line in lines[6:] for response in line["responses"]]
    assert found["avg@2"] == pytest.approx(np.mean(sampled))
    result = CliRunner().invoke(
        app, [*evaluate, "seed=1", "--responses", str(second), "--against", str(first)], catch_exceptions=False
    )
    found = json.loads(result.stdout.strip().splitlines()[-1])["against"]
    assert found["accuracy"]["difference"] == 0.0, "the same model, greedily"
    assert found["avg@2"]["num_prompts"] == 6


def test_an_evaluation_that_fails_leaves_the_file_of_an_earlier_one(tmp_path):
    path = write(tmp_path / "a.jsonl", [1])
    before = path.read_text()
    assert CliRunner().invoke(app, ["evaluate", "tba:arithmetic", "--task", "none", "--responses", str(path)]).exit_code
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_unusual_line_ends_in_a_response_are_read_back(tmp_path):
    path = write(tmp_path / "a.jsonl", [1, 2])
    path.write_text(path.read_text().replace('"text": ""', '"text": "a\u2028b\u0085c"'), encoding="utf-8")
    assert paired_differences(path, path)["avg@4"]["num_prompts"] == 2


def test_the_file_that_is_compared_with_is_not_overwritten(tmp_path):
    path = write(tmp_path / "a.jsonl", [1])
    before = path.read_text()
    wrong = ["evaluate", "tba:arithmetic", "--responses", str(path), "--against", str(path)]
    assert CliRunner().invoke(app, wrong).exit_code == 2
    assert path.read_text() == before


def test_the_difference_on_one_prompt_has_no_standard_error():
    assert difference([0.25]) == {"difference": 0.25, "low": 0.25, "high": 0.25, "num_prompts": 1.0}


def test_responses_replace_earlier_ones_and_nothing_else(tmp_path):
    own = tmp_path / "prompts.jsonl"
    own.write_text('{"prompt": "mine"}\n')
    with (
        pytest.raises(ValueError, match=r"--responses .*prompts.jsonl is there and holds something else"),
        responses_file(own),
    ):
        pass
    assert own.read_text() == '{"prompt": "mine"}\n'
    with responses_file(write(tmp_path / "earlier.jsonl", [1])):
        pass
    with (
        pytest.raises(ValueError, match=f"--responses {tmp_path} is a folder: give the name of a file"),
        responses_file(tmp_path),
    ):
        pass
