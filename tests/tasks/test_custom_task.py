"""A user's own problem: data files, tokens, reward functions, and what is said when one of them is wrong."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tba.config import RewardConfig, TaskConfig, load_config
from tba.launch import train
from tba.tasks.arithmetic.prepare import make_tokenizer
from tba.tasks.base import RewardFailed
from tba.tasks.data.prompts import encode
from tba.tasks.registry import make_task, prepare_task
from tba.tasks.rewards.functions import RewardFunction, RewardSet, load_reward_function
from tba.types import Completion

CHAT = [{"role": "user", "content": "Mia has 3 pens."}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}####{% endif %}"
)


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def write(tmp_path):
    """Write a file into the test's folder: text as it is, rows as JSONL."""

    def write_file(name, content):
        text = textwrap.dedent(content) if isinstance(content, str) else "\n".join(map(json.dumps, content))
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_file


def custom(tokenizer, data, *functions, max_prompt_tokens=50, **settings):
    rewards = tuple(RewardConfig(function=function) for function in functions)
    config = TaskConfig(name="custom", data=data, rewards=rewards, **settings)
    return make_task(config, tokenizer, max_prompt_tokens=max_prompt_tokens)


def call(function, texts, *, prompt="Mia has 3 pens.", **columns):
    """Values of a reward for responses of one token each, numbered from 5."""
    return RewardFunction(function)(prompt, columns, texts, [[5 + i] for i in range(len(texts))])


def completion(*token_ids):
    logs = np.zeros(len(token_ids), np.float32)
    return Completion(
        prompt_id="q1",
        sample_index=0,
        token_ids=np.array(token_ids, np.int32),
        behaviour_log_probs=logs,
        policy_log_probs=logs,
        version_spans=((0, 0),),
        finish="stop",
    )


ROWS = [{"prompt": f"Mia has {i} pens.", "answer": str(i)} for i in range(1, 60)]
SCORE = """
def score(prompts, completions, answer, **kwargs):
    return [1.0 if text.strip() == a else 0.0 for text, a in zip(completions, answer)]
"""


def test_prompts_and_columns_reach_the_reward(tokenizer, write):
    task = custom(tokenizer, write("data.jsonl", ROWS), write("rewards.py", SCORE) + ":score", eval_fraction=0.0)
    first = task.prompts("train")[0]
    assert (first.text, first.columns["answer"]) == ("Mia has 1 pens.", "1")
    outcomes = task.score(first, ["1", "2"], [completion(5), completion(6)])
    assert outcomes == [{"score": 1.0}, {"score": 0.0}]
    assert [task.solved(outcome) for outcome in outcomes] == [True, False]


def test_several_rewards_keep_their_names_and_weights(write):
    file = write("rewards.py", "def short(completions): return [float(len(c) < 3) for c in completions]\n" + SCORE)
    rewards = RewardSet(
        [RewardConfig(function=f"{file}:score"), RewardConfig(function=f"{file}:short", weight=0.5, name="brevity")]
    )
    assert rewards.weights == {"score": 1.0, "brevity": 0.5}
    assert rewards.score("Mia has 3 pens.", {"answer": "12"}, ["12", "1234"], [[5], [6]]) == [
        {"score": 1.0, "brevity": 1.0},
        {"score": 0.0, "brevity": 0.0},
    ]


def test_two_rewards_of_one_name_are_refused(write):
    file = write("rewards.py", SCORE)
    with pytest.raises(ValueError, match="same name: score, score"):
        RewardSet([RewardConfig(function=f"{file}:score")] * 2)


def test_held_out_prompts_are_a_share_and_never_train(tokenizer, write):
    data, file = write("data.jsonl", ROWS), write("rewards.py", SCORE)
    task = custom(tokenizer, data, f"{file}:score", eval_fraction=0.3)
    train, held_out = ({p.text for p in task.prompts(split)} for split in ("train", "held_out"))
    assert not train & held_out
    assert len(train | held_out) == len(ROWS)
    assert 8 <= len(held_out) <= 28  # 59 prompts at 0.3: 17.7, three standard deviations of 3.5 either way


def test_equal_prompts_fall_on_the_same_side(tokenizer, write):
    data, file = write("data.jsonl", ROWS * 2), write("rewards.py", SCORE)
    task = custom(tokenizer, data, f"{file}:score", eval_fraction=0.3)
    assert not {p.text for p in task.prompts("train")} & {p.text for p in task.prompts("held_out")}


def test_eval_data_is_the_held_out_split(tokenizer, write):
    file = write("rewards.py", SCORE)
    task = custom(
        tokenizer,
        write("data.jsonl", ROWS[:3]),
        f"{file}:score",
        eval_data=write("eval.jsonl", ROWS[3:5]),
        eval_fraction=0.5,
    )
    assert [len(task.prompts(split)) for split in ("train", "held_out")] == [3, 2]


def test_a_validation_split_is_refused_before_there_is_a_run_folder(write, tmp_path):
    function = write("rewards.py", SCORE) + ":score"
    task = {"name": "custom", "data": write("data.jsonl", ROWS), "rewards": [{"function": function}]}
    config = load_config(None, ["evaluate.split=validation", f"output={tmp_path}/runs"], task=task)
    with pytest.raises(
        ValueError, match=r"no validation split.* as task\.eval_data, .*`tba evaluate RUN task\.eval_data"
    ):
        train(config)
    assert not (tmp_path / "runs").exists()


def test_the_id_column_names_the_prompt(tokenizer, write):
    rows = [{"prompt": "Mia has 3 pens.", "id": 17}]
    task = custom(tokenizer, write("data.jsonl", rows), write("rewards.py", SCORE) + ":score", eval_fraction=0.0)
    assert task.prompts("train")[0].id == "17"


def test_text_never_gets_a_second_bos(tokenizer):
    bos = tokenizer.bos_token_id
    assert encode("Mia has 3 pens.", tokenizer).count(bos) == 1
    assert encode("<bos>Mia has 3 pens.", tokenizer) == encode("Mia has 3 pens.", tokenizer)
    tokenizer.chat_template = TEMPLATE
    assert encode(CHAT, tokenizer).count(bos) == 1


def test_chat_messages_go_through_the_template_up_to_the_answer(tokenizer):
    tokenizer.chat_template = TEMPLATE
    assert tokenizer.decode(encode(CHAT, tokenizer)) == "<bos>Mia has 3 pens.\n####"


def test_chat_without_a_template_is_refused(tokenizer):
    with pytest.raises(ValueError, match="no chat template"):
        encode(CHAT, tokenizer)


def test_chat_completions_come_as_messages():
    seen = {}

    def reward(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return [1.0]

    assert call(reward, ["4"], prompt=CHAT) == [1.0]
    assert seen == {"prompts": [CHAT], "completions": [[{"role": "assistant", "content": "4"}]]}


def test_a_function_gets_only_the_arguments_it_names():
    assert call(lambda completion_ids: [ids[0] for ids in completion_ids], ["a", "b"], answer="3", other="x") == [
        5.0,
        6.0,
    ]


def test_async_functions_and_none_are_understood():
    async def reward(completions, **kwargs):
        return [None if text == "skip" else 2.0 for text in completions]

    assert call(reward, ["skip", "go"]) == [None, 2.0]


def test_verl_functions_are_called_sample_by_sample():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, extra_info) == ("toy", {"split": "train"})
        return {"score": float(solution_str == ground_truth)}

    row = {"data_source": "toy", "reward_model": {"ground_truth": "3"}, "extra_info": {"split": "train"}}
    assert call(compute_score, ["3", "4"], **row) == [1.0, 0.0]


def test_one_sample_that_raises_costs_only_itself_and_names_file_and_line(write):
    file = write("rewards.py", "def score(completions):\n    return [1 / len(text) for text in completions]\n")
    values = call(load_reward_function(f"{file}:score"), ["ab", "", "abcd"])
    assert (values[0], values[2]) == (0.5, 0.25)
    assert isinstance(values[1], RewardFailed)
    assert "score failed" in str(values[1])
    assert "rewards.py:2: ZeroDivisionError" in str(values[1])


def test_nan_is_a_failure_not_a_reward():
    values = call(lambda completions: [float(text) for text in completions], ["1", "nan", "inf"])
    assert values[0] == 1.0
    assert "returned nan" in str(values[1])
    assert "returned inf" in str(values[2])


def test_a_wrong_number_of_values_is_named():
    values = call(lambda completions: [1.0, 2.0, 3.0], ["a"])
    assert "returned 3 values for 1 completions" in str(values[0])


def test_a_missing_column_is_named():
    values = call(lambda completions, ground_truth: [1.0], ["a"])
    assert "ground_truth" in str(values[0])


def test_a_failed_sample_is_not_solved(tokenizer, write):
    task = custom(tokenizer, write("data.jsonl", ROWS), write("rewards.py", SCORE) + ":score", eval_fraction=0.0)
    assert not task.solved(RewardFailed("score failed"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "data.jsonl line 2 is not valid JSON"),
        ('{"prompt": "a"}\n\n{"question": "b"}\n', "data.jsonl line 3 has no usable `prompt` column"),
        ('{"prompt": [{"role": "user"}]}', "data.jsonl line 1 has no usable `prompt` column"),
        ('["a"]', "data.jsonl line 1 has no usable `prompt` column"),
        ("\n", "data.jsonl is empty"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}', "line 2: id '1' occurs twice"),
        ('{"prompt": "Mia has 3 pens. Mia has 3 pens."}', "has 11 tokens, beyond the 10"),
    ],
)
def test_bad_data_is_named_by_line(tokenizer, write, content, message):
    with pytest.raises(ValueError, match=message.replace("`", "[`]")):
        custom(tokenizer, write("data.jsonl", content), write("rewards.py", SCORE) + ":score", max_prompt_tokens=10)


def test_a_missing_data_file_is_named(tokenizer, write, tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.jsonl does not exist"):
        custom(tokenizer, str(tmp_path / "nowhere.jsonl"), write("rewards.py", SCORE) + ":score")


def test_bad_reward_specifications_are_named(write):
    file = write("rewards.py", SCORE)
    with pytest.raises(ValueError, match=r"file nowhere.py does not exist"):
        load_reward_function("nowhere.py:score")
    with pytest.raises(ValueError, match=r"has no function 'scores'; it has score\."):
        load_reward_function(f"{file}:scores")
    with pytest.raises(ValueError, match=r"write file.py:function"):
        load_reward_function("rewards.py")


def test_unknown_tasks_are_named(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"'arithmetik' is not known: it may be arithmetic, gsm8k, custom"):
        make_task(TaskConfig(name="arithmetik"), tokenizer, max_prompt_tokens=10)
    with pytest.raises(ValueError, match="'custom' has nothing to prepare"):
        prepare_task("custom", tmp_path)


def test_what_a_reward_worker_imports_is_light():
    """A worker is started anew after every call that hangs: torch or transformers would take seconds each time."""
    check = (
        "import sys, tba.tasks.rewards.functions; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
