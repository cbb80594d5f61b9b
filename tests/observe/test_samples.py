"""samples.jsonl shows the reward that is trained on."""

import json
import math

import numpy as np
import pytest

from tba.observe.recorder import SampleLog
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
