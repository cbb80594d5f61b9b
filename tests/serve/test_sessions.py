"""Calls of an episode are joined by exact token prefixes, worked out by hand."""

import numpy as np
import pytest

from tba.serve.chat import Call
from tba.serve.sessions import KEY_PREFIX, Session, Sessions, TooManySessions, join_calls


def call(id, prompt, tokens, *, spans=((0, 3),), finish="stop"):
    values = np.arange(len(tokens), dtype=np.float32) / -4
    return Call(
        id=id,
        prompt_ids=np.array(prompt, np.int32),
        token_ids=np.array(tokens, np.int32),
        policy_log_probs=values,
        behaviour_log_probs=values - 1,
        version_spans=spans,
        finish=finish,
    )


def test_calls_that_continue_each_other_become_one_trajectory():
    calls = [call("a", [5, 6], [9, 2]), call("b", [5, 6, 9, 2, 7, 7], [8], spans=((0, 4),), finish="length")]
    (found,) = join_calls(calls, {"b": 0.5})
    assert found.as_json() == {
        "prompt_ids": [5, 6],
        "token_ids": [9, 2, 7, 7, 8],
        "loss_mask": [1, 1, 0, 0, 1],
        "log_probs": [0.0, -0.25, None, None, 0.0],
        "behaviour_log_probs": [-1.0, -1.25, None, None, -1.0],
        "version_spans": [[0, 3], [4, 4]],
        "turns": [
            {"id": "a", "first": 0, "end": 2, "reward": None},
            {"id": "b", "first": 4, "end": 5, "reward": 0.5},
        ],
        "finish_reason": "length",
    }


def test_a_prompt_that_differs_in_one_token_begins_a_trajectory_of_its_own():
    calls = [call("a", [5, 6], [9, 2]), call("b", [5, 6, 9, 3, 7], [8])]
    assert [found.token_ids.tolist() for found in join_calls(calls, {})] == [[9, 2], [8]]


def test_two_calls_after_the_same_beginning_train_its_tokens_once():
    """The first continues the trajectory; for the second, what came before is a prompt."""
    calls = [call("a", [5], [9]), call("b", [5, 9, 7], [8]), call("c", [5, 9, 7], [4])]
    first, second = join_calls(calls, {})
    assert (first.prompt_ids.tolist(), first.token_ids.tolist()) == ([5], [9, 7, 8])
    assert (second.prompt_ids.tolist(), second.token_ids.tolist()) == ([5, 9, 7], [4])


def test_the_longest_of_two_beginnings_is_continued():
    """Two agents with one beginning: [5] -> [9], and [5, 9, 7] -> [8]; the third call has all of the second."""
    calls = [call("a", [5], [1]), call("b", [5, 1, 7], [8]), call("c", [5, 1], [7]), call("d", [5, 1, 7, 8, 2], [3])]
    assert [found.token_ids.tolist() for found in join_calls(calls, {})] == [[1, 7, 8, 2, 3], [7]]


def test_a_span_goes_on_over_calls_of_one_version():
    calls = [call("a", [5], [9, 9], spans=((0, 1), (1, 2))), call("b", [5, 9, 9], [8, 8], spans=((0, 2), (1, 3)))]
    (found,) = join_calls(calls, {})
    assert found.version_spans == ((0, 1), (1, 2), (3, 3))


def test_a_reward_is_the_episodes_or_a_calls():
    session = Session(id="s", task_id=None, used=0.0, calls=[call("a", [5], [9])])
    session.set_reward(1.0, None)
    session.set_reward(0.5, "a")
    with pytest.raises(KeyError, match="no response of this session"):
        session.set_reward(0.5, "b")
    found = session.as_json()
    assert (found["reward"], found["trajectories"][0]["turns"][0]["reward"]) == (1.0, 0.5)


def test_sessions_are_found_by_their_keys_until_they_end():
    sessions = Sessions(most=2, idle_seconds=10.0, clock=lambda: 0.0)
    key, session = sessions.start("task-1")
    assert key.startswith(KEY_PREFIX)
    assert sessions.find(key) is session
    assert sessions.end(key) is session
    assert sessions.find(key) is None


def test_a_session_that_nobody_uses_makes_room_for_another():
    now = [0.0]
    sessions = Sessions(most=1, idle_seconds=10.0, clock=lambda: now[0])
    key, _ = sessions.start()
    with pytest.raises(TooManySessions):
        sessions.start()
    now[0] = 11.0
    sessions.start()
    assert sessions.find(key) is None
