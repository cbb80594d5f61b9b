"""What a run writes: samples show the reward that is trained on, sinks agree, no file is seen half written."""

import json
import math

import numpy as np
import pytest

from tba.observe.files import JsonlSink, RunFolder, SampleLog, write_json
from tba.types import Completion, Prompt, Trajectory, TrajectoryGroup, total_reward


def group(*responses: tuple[dict[str, float], str]) -> TrajectoryGroup:
    """One response of a single token for each (rewards, finish)."""
    trajectories = tuple(
        Trajectory(
            completion=Completion(
                prompt_id="p",
                sample_index=index,
                token_ids=np.array([index + 3], np.int32),
                behaviour_log_probs=np.zeros(1, np.float32),
                policy_log_probs=np.zeros(1, np.float32),
                version_spans=((0, 0),),
                finish=finish,
            ),
            rewards=rewards,
            log_ref=np.zeros(1, np.float32),
            reference_version=0,
            loss_mask=np.ones(1, bool),
        )
        for index, (rewards, finish) in enumerate(responses)
    )
    prompt = Prompt(id="p", token_ids=np.array([1], np.int32), text="p")
    return TrajectoryGroup(id="g", prompt=prompt, trajectories=trajectories)


def written(log: SampleLog, *responses: tuple[dict[str, float], str]) -> list[dict]:
    log.write(7, group(*responses), [f"text {index}" for index in range(len(responses))])
    return json.loads(log.path.read_text())["responses"]


def test_best_and_worst_are_by_the_weighted_reward(tmp_path):
    log = SampleLog(path=tmp_path / "samples.jsonl", reward_weights={"right": 2.0, "words": -0.5})
    shown = written(
        log,
        ({"right": 1.0, "words": 3.0}, "stop"),  # 2 - 1.5 = 0.5, the unweighted best
        ({"right": 1.0, "words": 1.0}, "stop"),  # 2 - 0.5 = 1.5
        ({"right": 0.0, "words": 2.0}, "stop"),  # -1
        ({"right": 0.0, "words": math.nan}, "stop"),  # 0: the words do not apply
    )
    assert [(response["text"], response["reward"]) for response in shown] == [("text 1", 1.5), ("text 2", -1.0)]
    assert shown[0]["rewards"] == {"right": 1.0, "words": 1.0}, "the components stay as they were scored"


def test_a_penalised_response_is_shown_with_the_penalty(tmp_path):
    log = SampleLog(path=tmp_path / "samples.jsonl", reward_weights={"right": 1.0}, cut_off_reward=-1.0)
    shown = written(log, ({"right": 1.0}, "length"), ({"right": 0.0}, "stop"))
    assert [response["reward"] for response in shown] == [-1.0, 0.0]


def test_components_that_do_not_apply_are_left_out_of_the_sum():
    # 0.5 x 1 + 2 x 3, 2 x 1, 0.5 x 4
    totals = total_reward([np.array([1.0, np.nan, 4.0]), np.array([3.0, 1.0, np.nan])], [0.5, 2.0])
    assert totals.tolist() == [6.5, 2.0, 2.0]
    assert total_reward([None, 1.0], [5.0, 0.25]) == pytest.approx(0.25)


def test_jsonl_lines_are_valid_json_also_for_nan(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(3, {"reward": math.nan, "loss": 0.5})
    sink.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "reward": None, "loss": 0.5}


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from tba.observe.files import TensorBoardSink

    sink = TensorBoardSink(tmp_path)
    sink.write(3, {"reward": 0.5})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(3, 0.5)]


def test_a_missing_logger_is_named_before_training(tmp_path, monkeypatch):
    import sys

    from tba.config import load_config
    from tba.observe.files import make_sinks

    monkeypatch.setitem(sys.modules, "wandb", None)
    folder = RunFolder.create(tmp_path / "run", overwrite=False)
    with pytest.raises(ValueError, match="pip install wandb"):
        make_sinks(load_config(None, ["observe.sinks=[wandb]"]), folder)


def test_writes_leave_no_partial_file(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"x": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_that_is_no_run_is_never_replaced(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not a run folder"):
        RunFolder.create(tmp_path, overwrite=True)
    assert (tmp_path / "precious.txt").exists()
