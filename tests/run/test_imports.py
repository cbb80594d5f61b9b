"""Existing responses from JSONL."""

import json

import numpy as np
import pytest

from tba.config import ReplayConfig, load_config
from tba.replay import ReplayBuffer
from tba.run.imports import Importer, import_groups
from tba.run.modes import load_inputs
from tba.types import Prompt

EOS = 0


class LetterTokenizer:
    """a = 1, b = 2, ..."""

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) - 96 for letter in text]

    def decode(self, token_ids, *, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(96 + i) for i in token_ids if i != EOS)

    def __len__(self):
        return 27


CHAT = [{"role": "user", "content": "spell it"}]
PROMPTS = [
    Prompt(id="p0", token_ids=np.array([5], np.int32), text="first"),
    Prompt(id="p1", token_ids=np.array([6, 7], np.int32), text=CHAT),
]


@pytest.fixture
def importer(tmp_path):
    scored = []

    def score_rewards(groups):
        scored.extend((group.prompt.id, *group.texts) for group in groups)
        return [{"r": float(len(group.texts[0]))} for group in groups]

    def score_reference(prompt_ids, response_ids):
        return [np.full(len(ids), -float(len(prompt)), np.float32) for prompt, ids in zip(prompt_ids, response_ids)]

    def run(*rows):
        path = tmp_path / "responses.jsonl"
        lines = [json.dumps(row) if isinstance(row, (dict, list)) else row for row in rows]
        path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
        importer = Importer(
            prompts=PROMPTS,
            tokenizer=LetterTokenizer(),
            eos_id=EOS,
            stop_ids={EOS},
            context=20,
            reward_names={"r"},
            score_rewards=score_rewards,
            score_reference=score_reference,
        )
        return importer.groups(path)

    run.scored = scored
    return run


def test_responses_are_matched_tokenised_scored_and_grouped_by_prompt(importer):
    groups = importer(
        {"prompt": "first", "completion": "ab"},
        {"prompt": CHAT, "completion": ""},
        "",
        {"id": "p0", "completion_ids": [3, 3], "rewards": {"r": 9}},
    )
    assert [group.prompt.id for group in groups] == ["p0", "p1"]
    first, second = groups[0].trajectories
    assert first.completion.token_ids.tolist() == [1, 2, EOS]
    assert first.log_ref.tolist() == [-1.0, -1.0, -1.0]
    assert np.isnan(first.completion.behaviour_log_probs).all()
    assert np.isnan(first.completion.policy_log_probs).all()
    assert (first.completion.finish, first.rewards, first.loss_mask.tolist()) == ("stop", {"r": 2.0}, [True] * 3)
    # as it was produced: no EOS, so it was cut off; its reward came with it
    assert (second.completion.token_ids.tolist(), second.completion.finish) == ([3, 3], "length")
    assert (second.rewards, second.completion.sample_index) == ({"r": 9.0}, 1)
    assert groups[1].trajectories[0].completion.token_ids.tolist() == [EOS]
    assert importer.scored == [("p0", "ab"), ("p1", "")]


def test_imported_groups_can_be_sampled(importer):
    config = ReplayConfig(on_policy_probability=0.0)
    buffer = ReplayBuffer(config, fresh_steps=1, seed=0, reward_names=("r",), reward_weights=(1.0,))
    for group in importer({"prompt": "first", "completion": "ab"}, {"prompt": "first", "completion": "c"}):
        buffer.add(group, step=0)
    batch = buffer.sample(1, 2, step=0)
    first, second, end = batch.offsets.tolist()
    drawn = [batch.token_ids_N[first:second].tolist(), batch.token_ids_N[second:end].tolist()]
    assert sorted(drawn) == [[1, 2, EOS], [3, EOS]]


def test_a_text_that_ends_with_eos_gets_no_second_one(importer):
    (group,) = importer({"id": "p0", "completion": "ab`"})  # ` is letter 0, EOS
    assert group.trajectories[0].completion.token_ids.tolist() == [1, 2, EOS]


def test_token_ids_count_and_not_the_text_beside_them(importer):
    (group,) = importer({"id": "p0", "completion": "ab", "completion_ids": [3, EOS]})  # as `tba replay --export` writes
    assert group.trajectories[0].completion.token_ids.tolist() == [3, EOS]


def test_a_line_may_say_how_its_response_ended(importer):
    (group,) = importer(
        {"id": "p0", "completion_ids": [1, 2], "finish": "stop"},  # by another stop token than EOS
        {"id": "p0", "completion_ids": [1, EOS], "finish": "length"},
    )
    assert [trajectory.completion.finish for trajectory in group.trajectories] == ["stop", "length"]


def test_a_null_reward_is_not_applicable(importer):
    (group,) = importer({"id": "p0", "completion": "a", "rewards": {"r": None}})
    assert np.isnan(group.trajectories[0].rewards["r"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{oops", "line 2 is not JSON"),
        ([1], "line 2 is a list, not an object"),
        ({"prompt": "first"}, "line 2 needs `completion` or `completion_ids`"),
        ({"completion": "a"}, "line 2 has neither `id` nor `prompt`"),
        ({"prompt": "third", "completion": "a"}, "line 2 prompt 'third' is none of the task's 2 prompts"),
        ({"id": "p9", "completion": "a"}, "line 2 id 'p9' is none of the task's 2 prompts"),
        ({"id": "p0", "completion": 3}, "line 2 `completion` is a int, not text"),
        ({"id": "p0", "completion_ids": []}, "line 2 `completion_ids` must be a non-empty list"),
        ({"id": "p0", "completion_ids": [27]}, "integers from 0 to 26"),
        ({"id": "p0", "completion": "a", "finish": "done"}, 'line 2 `finish` is \'done\': write "stop" or "length"'),
        ({"id": "p0", "completion": "a", "rewards": {"r": "x"}}, "line 2 `rewards` must be an object of numbers"),
        ({"id": "p0", "completion": "a", "rewards": [1]}, "line 2 `rewards` is a list, not an object of numbers"),
        ({"id": "p0", "completion": "a", "rewards": {"r": 10**400}}, "of at most 1e+30, or null"),
        ({"id": "p0", "completion": "a", "rewards": {"r": float("inf")}}, "of at most 1e+30, or null"),
        ({"id": "p0", "completion": "a", "rewards": {"r": float("nan")}}, "of at most 1e+30, or null"),
        (
            {"id": "p1", "completion_ids": [1] * 19},
            "19 tokens, which with the 2 of its prompt exceed the model's context",
        ),
        ({"id": "p0", "completion": "\ud800"}, "line 2 'utf-8' codec can't encode"),
        (b'{"id": "p0", "completion": "\xe9"}', "line 2 'utf-8' codec can't decode byte 0xe9"),
        ("[" * 100_000, "line 2 is not JSON: maximum recursion depth exceeded"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_imported(importer, row, message):
    with pytest.raises(ValueError, match="1 bad lines, so nothing was imported") as error:
        importer({"prompt": "first", "completion": "a"}, row)
    assert message in str(error.value)
    assert importer.scored == []


def test_many_bad_lines_are_counted_and_the_first_five_shown(importer):
    with pytest.raises(ValueError, match="7 bad lines") as error:
        importer(*["nonsense"] * 7)
    assert "line 5 " in str(error.value)
    assert "line 6 " not in str(error.value)


def test_an_empty_or_missing_file_is_an_error(importer, tmp_path):
    with pytest.raises(ValueError, match="holds no responses"):
        importer("")
    missing = tmp_path / "missing.jsonl"
    config = load_config(None, [f"replay.imports=[{missing}]", "task.num_train_prompts=3"])
    with pytest.raises(ValueError, match=r"missing\.jsonl does not exist"):
        import_groups(config, load_inputs(config))


def import_arithmetic(tmp_path, *rows, change=lambda loaded: None):
    """Import rows into the arithmetic task with its shipped model; `change` may alter the model before."""
    path = tmp_path / "responses.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(None, [f"replay.imports=[{path}]", "task.num_train_prompts=3"])
    inputs = load_inputs(config)
    change(inputs.loaded)
    return import_groups(config, inputs), inputs


def solution(index=0):
    """Id, token ids and EOS of a right response to a training problem."""
    inputs = load_inputs(load_config(None, ["task.num_train_prompts=3"]))
    prompt, tokenizer = inputs.task.prompts("train")[index], inputs.loaded.tokenizer
    return prompt.id, tokenizer.encode(prompt.columns["solution"], add_special_tokens=False), tokenizer.eos_token_id


def test_token_ids_without_eos_are_graded_as_cut_off(tmp_path):
    # Arithmetic has the no-EOS rule: a response that did not end by itself is wrong, whatever it says.
    prompt_id, ids, eos_id = solution()
    rows = [{"id": prompt_id, "completion_ids": ids}, {"id": prompt_id, "completion_ids": [*ids, eos_id]}]
    ((group,), _) = import_arithmetic(tmp_path, *rows)
    assert [t.completion.finish for t in group.trajectories] == ["length", "stop"]
    assert [t.rewards["exact_match"] for t in group.trajectories] == [0.0, 1.0]


def test_token_ids_that_end_with_another_stop_token_of_the_model_are_finished(tmp_path):
    prompt_id, ids, eos_id = solution()
    other = ids[-1]

    def stop_at_both(loaded):
        loaded.model.generation_config.eos_token_id = [eos_id, other]

    ((group,), _) = import_arithmetic(tmp_path, {"id": prompt_id, "completion_ids": ids}, change=stop_at_both)
    (trajectory,) = group.trajectories
    assert (trajectory.completion.finish, trajectory.rewards["exact_match"]) == ("stop", 1.0)


def test_a_text_is_closed_with_the_tokenizers_eos_even_where_its_id_is_0(tmp_path):
    prompt_id, _, _ = solution()

    def end_with_id_0(loaded):
        loaded.tokenizer.eos_token = loaded.tokenizer.convert_ids_to_tokens(0)
        loaded.model.generation_config.eos_token_id = 3

    ((group,), inputs) = import_arithmetic(tmp_path, {"id": prompt_id, "completion": "4+4=8"}, change=end_with_id_0)
    assert inputs.loaded.tokenizer.eos_token_id == 0
    assert group.trajectories[0].completion.token_ids[-1] == 0
    assert group.trajectories[0].completion.finish == "stop"
