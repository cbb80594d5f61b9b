"""A user's own problem: data files, tokens, reward functions, and what is said when one of them is wrong."""

import asyncio
import json
import re
import subprocess
import sys
import textwrap

import games
import numpy as np
import pytest

from recipes.arithmetic import make_tokenizer
from tba.config import RewardConfig, TaskConfig, load_config
from tba.run import train
from tba.tasks.data.make_prompt import encode
from tba.tasks.outcomes import RewardFailed
from tba.tasks.registry import make_task
from tba.tasks.rewards.functions import RewardFunction, RewardSet, named_rewards
from tba.tasks.rewards.load_function import check_reward_function, load_reward_function
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
    configs = [
        RewardConfig(function=f"{file}:score"),
        RewardConfig(function=f"{file}:short", weight=0.5, name="brevity"),
    ]
    assert list(named_rewards(configs)) == ["score", "brevity"]
    assert RewardSet(named_rewards(configs)).score("Mia has 3 pens.", {"answer": "12"}, ["12", "1234"], [[5], [6]]) == [
        {"score": 1.0, "brevity": 1.0},
        {"score": 0.0, "brevity": 0.0},
    ]


def test_two_rewards_of_one_name_are_refused(write):
    file = write("rewards.py", SCORE)
    with pytest.raises(ValueError, match="same name: score, score"):
        named_rewards([RewardConfig(function=f"{file}:score")] * 2)


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


def test_rows_of_environments_need_no_prompt(tokenizer, write):
    data = write("data.jsonl", [{"environment": name} for name in ("talk", "game") * 20])
    task = custom(tokenizer, data, environment=f"{games.__file__}:Guess")
    train, held_out = (task.prompts(split) for split in ("train", "held_out"))
    # Each is another episode: they are told apart by their ids, and one in ten is held out.
    assert len(train) + len(held_out) == 40
    assert held_out
    assert train[0].text == [{"role": "user", "content": ""}]
    assert train[0].columns["environment"] in ("talk", "game")
    with pytest.raises(ValueError, match="needs"):
        custom(tokenizer, data, write("rewards.py", SCORE) + ":score", environment=f"{games.__file__}:Guess")


def test_fewer_than_twenty_rows_are_trained_on_and_evaluated_on_alike(tokenizer, write):
    few = custom(tokenizer, write("few.jsonl", ROWS[:3]), write("rewards.py", SCORE) + ":score")
    assert [p.text for p in few.prompts("train")] == [p.text for p in few.prompts("held_out")]
    assert len(few.prompts("train")) == 3
    assert few.split_message.startswith("trains and is evaluated on the same 3 prompts")
    many = custom(tokenizer, write("many.jsonl", ROWS), write("rewards.py", SCORE) + ":score")
    train, held_out = (len(many.prompts(split)) for split in ("train", "held_out"))
    words = f"trains on {train} prompts and is evaluated on {held_out} others (task.eval_fraction=0.1)."
    assert many.split_message == words


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
    rows = [{"prompt": "Mia has 3 pens.", "id": 17, "answer": "3"}]
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


def test_a_prompt_that_ends_with_the_assistant_is_continued(tokenizer):
    tokenizer.chat_template = TEMPLATE
    begun = [*CHAT, {"role": "assistant", "content": "Mia has"}]
    # As in TRL: the message is not ended, and no other begins.
    assert tokenizer.decode(encode(begun, tokenizer)) == "<bos>Mia has 3 pens.\nMia has"


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


def test_async_functions_share_what_belongs_to_an_event_loop_between_calls():
    """As an HTTP client does, which is made at the first call and used by all."""
    loops = []

    async def reward(completions, **kwargs):
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return [0.5 if loops[0] is loops[-1] and not loops[0].is_closed() else None for _ in completions]

    assert [call(reward, ["a", "b"]) for _ in range(2)] == [[0.5, 0.5], [0.5, 0.5]]

    async def compute_score(data_source, solution_str, ground_truth):
        return float(solution_str == ground_truth)

    assert call(compute_score, ["3", "4"], data_source="toy", ground_truth="3") == [1.0, 0.0]


def test_async_calls_of_verl_functions_run_together_and_fail_alone():
    """Each waits until all three have begun; an exception among them, or among TRL's values, costs its own sample."""
    begun, all_begun = [], asyncio.Event()

    async def compute_score(data_source, solution_str, ground_truth):
        begun.append(solution_str)
        if len(begun) == 3:
            all_begun.set()
        await asyncio.wait_for(all_begun.wait(), 20)
        return 1.0 / float(solution_str)

    first, failed, last = call(compute_score, ["1", "0", "2"], data_source="toy", ground_truth="3")
    assert (first, last) == (1.0, 0.5)
    assert re.search(r"failed at .*test_custom_task.py:\d+: ZeroDivisionError", str(failed))

    async def reward(completions, **columns):
        return await asyncio.gather(*(compute_score("", text, "") for text in completions), return_exceptions=True)

    first, failed = call(reward, ["4", "0"])
    assert first == 0.25
    assert re.search(r"failed at .*test_custom_task.py:\d+: ZeroDivisionError", str(failed))


def test_verl_functions_are_called_sample_by_sample():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, extra_info) == ("toy", {"split": "train"})
        return {"score": float(solution_str == ground_truth)}

    row = {"data_source": "toy", "reward_model": {"ground_truth": "3"}, "extra_info": {"split": "train"}}
    assert call(compute_score, ["3", "4"], **row) == [1.0, 0.0]


def test_one_sample_that_raises_costs_only_itself_where_the_reward_is_per_sample(write):
    text = "def score(completions):\n    return [1 / len(text) for text in completions]\nscore.per_sample = True\n"
    values = call(load_reward_function(f"{write('rewards.py', text)}:score"), ["ab", "", "abcd"])
    assert (values[0], values[2]) == (0.5, 0.25)
    assert isinstance(values[1], RewardFailed)
    assert "score failed" in str(values[1])
    assert "rewards.py:2: ZeroDivisionError" in str(values[1])


def test_a_reward_that_compares_samples_is_never_called_again_with_fewer(write):
    """Alone, each sample would be the longest of its call and get 1."""
    calls = []

    def longest(completions):
        calls.append(len(completions))
        if "" in completions:
            raise ValueError("an empty one")
        return [float(len(text) == max(map(len, completions))) for text in completions]

    assert call(longest, ["a", "bcd", "bc"]) == [0.0, 1.0, 0.0]
    values = call(longest, ["a", "", "bc"])
    assert calls == [3, 3]
    assert all(isinstance(value, RewardFailed) for value in values)
    assert "ValueError: an empty one (all 3 samples of the call are lost" in str(values[0])
    assert "longest.per_sample = True" in str(values[0])


def test_nan_is_a_failure_not_a_reward():
    values = call(lambda completions: [float(text) for text in completions], ["1", "nan", "inf", "1e300"])
    assert values[0] == 1.0
    assert "returned nan" in str(values[1])
    assert "returned inf" in str(values[2])
    assert "returned 1e+300, which is no finite 32-bit number" in str(values[3])


def test_a_value_that_is_no_number_costs_its_sample_only():
    values = call(lambda completions: completions, ["0.5", "good", "x" * 1000])
    assert values[0] == 0.5
    assert str(values[1]) == "<lambda> returned 'good', which is no number"
    assert len(str(values[2])) < 200


def test_a_wrong_number_of_values_is_named_and_costs_the_whole_call():
    calls = []

    def one(completions):
        calls.append(len(completions))
        return [1.0]

    one.per_sample = True  # alone, each of the eight would get the 1
    values = call(one, list("abcdefgh"))
    assert calls == [8]
    assert len(values) == 8
    assert all("returned 1 values for 8 completions" in str(value) for value in values)
    assert "returned 3 values for 1 completions" in str(call(lambda completions: [1.0, 2.0, 3.0], ["a"])[0])


def test_what_is_no_list_of_values_is_named():
    for value, kind in ((None, "NoneType"), (1.0, "float"), ("1.0", "str"), ({"score": 1.0}, "dict")):
        found = str(call(lambda completions, value=value: value, ["a", "b"])[0])
        assert f"returned a {kind}: it must return a list, one number per completion" in found


def test_sys_exit_and_ctrl_c_inside_a_reward_are_failures_with_a_line():
    def leaves(completions):
        raise SystemExit("good bye")

    def stops(completions):
        raise KeyboardInterrupt

    assert re.search(r"leaves failed at .*test_custom_task.py:\d+: SystemExit: good bye", str(call(leaves, ["a"])[0]))
    assert "KeyboardInterrupt" in str(call(stops, ["a"])[0])


def test_an_endless_error_text_is_cut():
    def shouts(completions):
        raise ValueError("y" * 1_000_000)

    words = str(call(shouts, ["a"])[0])
    assert "yyy... (999500 more characters)" in words
    assert len(words) < 800


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
        ('{"question": "b", "answer": 3}\n', "It has question, answer: rename the column with the prompts."),
        ('{"prompt": [{"from": "human", "value": "b"}]}', r'Got \[{"from": "human", "value": "b"}\]\.'),
        ('{"prompt": [{"role": "user"}]}', "data.jsonl line 1 has no usable `prompt` column"),
        ('["a"]', "data.jsonl line 1 has no usable `prompt` column"),
        ("\n", "data.jsonl is empty"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}', "line 2: id '1' occurs twice"),
        ('{"prompt": "Mia has 3 pens. Mia has 3 pens."}', "has 11 tokens, beyond the 10"),
    ],
)
def test_bad_data_is_named_by_line(tokenizer, write, content, message):
    reward = write("rewards.py", SCORE.replace("answer,", "answer=(),")) + ":score"
    with pytest.raises(ValueError, match=message.replace("`", "[`]")):
        custom(tokenizer, write("data.jsonl", content), reward, max_prompt_tokens=10)


def test_a_row_of_no_known_environment_is_named_by_line(tokenizer, write):
    classes = {"a": f"{games.__file__}:Guess", "b": f"{games.__file__}:Echo"}
    data = write("data.jsonl", [{"environment": "a"}, {"environment": "c"}, {"prompt": "Mia"}])
    with pytest.raises(ValueError, match=r"line 2 has environment='c': it must be one of a, b\. And 1 more"):
        custom(tokenizer, data, environment={"classes": classes})


@pytest.mark.parametrize(
    ("parameters", "needed"),
    [
        ("completions, **columns", []),
        ("prompts, completions, completion_ids, trainer_state, log_extra, log_metric", []),
        ("completions, want, answer='x', *more, other=None, **columns", ["want"]),
        ("completions, *, want, answer=None", ["want"]),
        ("data_source, solution_str, ground_truth, extra_info=None", ["ground_truth"]),
        ("data_source, solution_str, ground_truth=None", []),
    ],
)
def test_the_columns_that_a_reward_needs_are_those_without_a_default(write, parameters, needed):
    text = f"def f({parameters}): ...\nasync def g({parameters}): ...\n@wraps\ndef h({parameters}): ...\n"
    file = write("rewards.py", text)
    assert check_reward_function(f"{file}:f") == check_reward_function(f"{file}:g") == needed
    assert check_reward_function(f"{file}:h") == [], "a decorator may give it other parameters"
    names: dict = {}
    exec(f"def f({parameters}): ...", names)
    assert check_reward_function(names["f"]) == needed


def test_a_column_that_a_reward_needs_and_the_data_lacks_is_named_with_those_that_are_there(tokenizer, write):
    rows, reward = [{"prompt": f"Mia has {i} pens.", "solution": str(i)} for i in range(3)], write("rewards.py", SCORE)
    message = r"line 1 has no `answer` column, which the reward score needs; it has prompt, solution\. And 2 more"
    with pytest.raises(ValueError, match=message):
        custom(tokenizer, write("data.jsonl", rows), f"{reward}:score")
    # One row that lacks it is a bad row like any other.
    data = write("data.jsonl", [*ROWS, rows[0]])
    assert len(custom(tokenizer, data, f"{reward}:score", eval_fraction=0.0, on_bad_row="skip").prompts("train")) == 59
    verl = write("verl.py", "def compute_score(data_source, solution_str, ground_truth): ...\n")
    good = [{"prompt": "Mia has 3 pens.", "reward_model": {"ground_truth": "3"}}]
    assert custom(tokenizer, write("verl.jsonl", good), f"{verl}:compute_score").prompts("train")
    with pytest.raises(ValueError, match=r"no `ground_truth` column, which the reward compute_score needs"):
        custom(tokenizer, data, f"{verl}:compute_score")


def test_a_missing_data_file_is_named(tokenizer, write, tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.jsonl does not exist"):
        custom(tokenizer, str(tmp_path / "nowhere.jsonl"), write("rewards.py", SCORE) + ":score")


@pytest.mark.parametrize("find", [check_reward_function, load_reward_function])
def test_bad_reward_specifications_are_named(write, find):
    file = write("rewards.py", SCORE)
    with pytest.raises(ValueError, match=r"file nowhere.py does not exist"):
        find("nowhere.py:score")
    with pytest.raises(ValueError, match=r"has no function 'scores'; it has score\."):
        find(f"{file}:scores")
    with pytest.raises(ValueError, match=r"write file.py:function"):
        find("rewards.py")
    with pytest.raises(ValueError, match=r"must be a .py file"):
        find(f"{write('rewards.txt', SCORE)}:score")


def test_names_that_a_file_defines_imports_or_assigns_are_accepted_without_importing_it(write):
    lines = """
        import os.path as paths, json
        from textwrap import graded as imported, other
        first, (second, *third) = make(), (1, 2)
        annotated: object = make()
        if torch := find("torch"):
            try:
                def conditional(completions): ...
            except ImportError:
                fallback = None
        for looped in (): pass
        with open("x") as opened: pass
        async def waits(completions): ...
        class Judge:
            inner = 1
        def outer():
            local = 1
        raise RuntimeError("imported")
    """
    file = write("rewards.py", lines)
    known = ["paths", "json", "imported", "other", "first", "second", "third", "annotated", "torch", "conditional"]
    for name in [*known, "fallback", "looped", "opened", "waits", "outer"]:
        check_reward_function(f"{file}:{name}")
    for name in ("inner", "local", "graded", "make"):
        with pytest.raises(ValueError, match=f"has no function '{name}'; it has"):
            check_reward_function(f"{file}:{name}")
    check_reward_function(f"{write('long.py', 'total = ' + ' + '.join(['1'] * 2000))}:total")
    check_reward_function(f"{write('star.py', 'from textwrap import *')}:anything")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def score(completions)\n    return []", r"rewards.py:1 is not valid Python: expected ':'"),
    ],
)
def test_a_file_that_is_no_python_is_refused_with_its_line(write, text, message):
    with pytest.raises(ValueError, match=message):
        check_reward_function(write("rewards.py", text) + ":score")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import sys\nif sys.argv:\n    sys.exit(4)\n",
            r"importing .*rewards.py:3 failed: SystemExit: 4: put what runs",
        ),
        ("\nimport nowhere_to_be_found\n", r"rewards.py:2 failed: ModuleNotFoundError: No module named 'nowhere_to"),
    ],
)
def test_what_goes_wrong_while_a_file_is_imported_is_told_with_its_line(write, text, message):
    with pytest.raises(ValueError, match=message):
        load_reward_function(write("rewards.py", text) + ":score")


def test_a_function_that_holds_what_cannot_be_sent_to_a_worker_is_named():
    import threading

    lock = threading.Lock()

    def locked(completions):
        with lock:
            return [1.0] * len(completions)

    with pytest.raises(ValueError, match=r"reward 'locked' cannot be sent to a worker process \(TypeError: .*lock"):
        check_reward_function(locked)


def test_making_the_task_does_not_import_the_rewards(tokenizer, write):
    file = write("rewards.py", "raise RuntimeError('imported')\ndef score(completions): ...")
    task = custom(tokenizer, write("data.jsonl", ROWS), f"{file}:score")
    assert task.reward_weights == {"score": 1.0}


def test_unknown_tasks_are_named(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"'arithmetik' is not known: it may be arithmetic, gsm8k, custom"):
        make_task(TaskConfig(name="arithmetik"), tokenizer, max_prompt_tokens=10)


def test_what_a_reward_worker_imports_is_light():
    """A worker is started anew after every call that hangs: torch or transformers would take seconds each time,
    and pydantic with the classes of the config three times as long as all the rest."""
    heavy = ("torch", "numpy", "pydantic", "asyncio")
    check = f"import sys, tba.tasks.rewards.worker; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
