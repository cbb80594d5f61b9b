"""What a script gives becomes files, and files of earlier runs are left alone."""

import gzip
import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from script_rewards import flat, rows_of_want, sevens
from trainers import ROWS
from transformers import AutoModel, AutoTokenizer

from tba import TBAConfig, TBATrainer
from tba.config import ConfigError, load_config
from tba.run.modes import load_inputs
from tba.trl.files import dataset_file, reward_configs


def test_the_rows_of_an_earlier_trainer_are_not_replaced(tmp_path):
    """The run of an earlier one may still go on with them, or is evaluated later."""
    path = tmp_path / "inputs" / "train.jsonl"
    first = dataset_file([{"prompt": "a"}], path, what="train_dataset")
    before = path.stat()
    assert dataset_file([{"prompt": "a"}], path, what="train_dataset") == first == str(path)
    other = dataset_file([{"prompt": "b"}], path, what="train_dataset")
    assert dataset_file([{"prompt": "b"}], path, what="train_dataset") == other
    assert json.loads(Path(other).read_text()) == {"prompt": "b"}
    assert Path(other).name == "train.jsonl"  # the ids of prompts begin with it
    assert (json.loads(path.read_text()), path.stat().st_mtime_ns) == ({"prompt": "a"}, before.st_mtime_ns)
    assert sorted(entry.name for entry in path.parent.iterdir()) == sorted([Path(other).parent.name, "train.jsonl"])
    with pytest.raises(ConfigError, match="row 1 of train_dataset cannot be written as JSON"):
        dataset_file([{"prompt": "a"}, {"prompt": object()}], path, what="train_dataset")
    assert json.loads(path.read_text()) == {"prompt": "a"}


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"dev": [], "test": []}, r"eval_dataset is a mapping of dev, test: choose one, as dataset\['train'\]"),
        ({"prompt": ["a"]}, r"eval_dataset is a mapping of prompt: choose one, .* or give rows"),
        (5, "eval_dataset is a int: give rows, which are mappings with a `prompt`"),
        ([{"prompt": "a", "image": b"x"}], r"row 0 of eval_dataset cannot be written as JSON"),
    ],
)
def test_what_is_no_dataset_is_refused_by_name(tmp_path, dataset, message):
    with pytest.raises(ConfigError, match=message):
        dataset_file(dataset, tmp_path / "eval.jsonl", what="eval_dataset")


def test_columns_may_be_of_numpy_and_pytorch(tmp_path):
    row = {"prompt": "a", "n": np.int64(3), "x": np.float32(0.5), "of": np.arange(2), "at": torch.tensor([1.5])}
    path = dataset_file([row], tmp_path / "train.jsonl", what="train_dataset")
    assert json.loads(Path(path).read_text()) == {"prompt": "a", "n": 3, "x": 0.5, "of": [0, 1], "at": [1.5]}


class Indexed:
    """A dataset as PyTorch's are: rows by number, and nothing else."""

    def __getitem__(self, index):
        return [{"prompt": "a"}, {"prompt": "b"}][index]


def test_a_dataset_of_pytorch_is_gone_through_by_number(tmp_path):
    path = dataset_file(Indexed(), tmp_path / "train.jsonl", what="train_dataset")
    assert [json.loads(line)["prompt"] for line in Path(path).read_text().splitlines()] == ["a", "b"]


def num_steps(tmp_path, data, eval_data=None, **given) -> int:
    """Steps of two epochs, with one prompt in a step."""
    args = TBAConfig(tmp_path / "run", num_train_epochs=2, per_device_train_batch_size=4, num_generations=4, **given)
    return TBATrainer("x", flat, args, data, eval_data).config.train.max_steps


def test_rows_of_a_compressed_file_are_counted(tmp_path):
    path = tmp_path / "data.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert num_steps(tmp_path, path) == 4
    path.write_bytes(path.read_bytes()[:-12])
    assert num_steps(tmp_path, path) == 2  # what is wrong with it is said when the run begins


def test_an_epoch_is_of_the_rows_that_are_trained_on(folder, tmp_path):
    rows = [{"prompt": f"w{i % 40} w{i // 40}"} for i in range(100)]
    trainer = TBATrainer(str(folder / "model"), flat, TBAConfig(tmp_path / "run", max_completion_length=8), rows)
    num_train = len(load_inputs(trainer.config).task.prompts("train"))
    assert num_train < 95  # a tenth is held out, by a hash
    assert num_steps(tmp_path, rows) == 2 * num_train
    assert num_steps(tmp_path, rows[:19]) == 2 * 19  # too few to split
    assert num_steps(tmp_path, rows, rows[:7]) == 2 * 93  # those of eval_dataset are not trained on
    bad = [*rows[:19], {"prompt": ""}]
    assert num_steps(tmp_path, bad, task={"on_bad_row": "skip"}) == 2 * 19


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"prompt": "w3", "want": "w7"}, {"question": "w4"}, {"prompt": ""}, {"prompt": 5}, {"question": "w5"}],
            r"^row 1 of train_dataset \(.*train\.jsonl line 2\) has no usable `prompt` column.* And 3 more: in all 4 bad "
            r"rows: 2 x missing column \(rows 1, 4\), 1 x empty prompt \(row 2\), 1 x wrong type \(row 3\)\..*"
            r"leave such rows out by TBAConfig\(task=\{\"on_bad_row\": \"skip\"\}\)\.$",
        ),
        ([{"prompt": "w3 " * 900, "want": "w7"}], r"^row 0 of train_dataset \(.*train\.jsonl line 1\)"),
        ([], r"^train_dataset is empty: it needs at least one row"),
    ],
)
def test_bad_rows_of_a_script_are_named_by_its_dataset(folder, tmp_path, rows, message):
    args = TBAConfig(output_dir=tmp_path / "a", mode="sync", max_completion_length=8)
    with pytest.raises(ValueError, match=message):
        TBATrainer(str(folder / "model"), flat, args, rows).train()


def test_bad_rows_of_a_script_are_left_out_as_the_message_says(folder, tmp_path, caplog):
    args = TBAConfig(output_dir=tmp_path / "a", mode="sync", max_completion_length=8, task={"on_bad_row": "skip"})
    trainer = TBATrainer(str(folder / "model"), flat, args, [{"prompt": "w3"}, {"question": "w4"}])
    load_inputs(trainer.config)
    assert (
        'TBAConfig(task={"on_bad_row": "skip"}) left out 1 bad row: 1 x missing column (row 1). The first: row 1 of'
        in (caplog.text)
    )


def test_rows_that_are_counted_are_not_warned_of(tmp_path, caplog):
    rows = [{"prompt": f"w{i}"} for i in range(9)]
    num_steps(tmp_path, [*rows, {"prompt": ""}], rows[:2])
    assert caplog.text == ""


def test_a_script_without_an_output_dir_has_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = TBATrainer("x", flat, TBAConfig(max_steps=1), [{"prompt": "a"}])
    assert trainer.args.output_dir == str(trainer.run_folder) == "runs/custom-tb-seed0"
    assert Path(trainer.config.task.data) == tmp_path / "runs" / "custom-tb-seed0.inputs" / "train.jsonl"


def test_rewards_of_one_name_are_told_apart(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("def score(completions, **columns): ...")
    given = [partial(sevens), partial(sevens), f"{tmp_path}/a.py:score", f"{tmp_path}/b.py:score", flat]
    found = reward_configs(given, None, None, tmp_path)
    assert [config.get("name") for config in found] == ["partial-0", "partial-1", "score-2", "score-3", None]


def test_arguments_of_another_library_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"args is a test_inputs\.SomeArguments: give a TBAConfig"):
        TBATrainer("x", flat, type("SomeArguments", (), {})(), [{"prompt": "a"}])


def test_a_weight_in_a_config_is_a_finite_number():
    reward = {"function": "r.py:f", "weight": float("nan")}
    with pytest.raises(ConfigError, match=r"task\.rewards\.0\.weight: .* finite number"):
        load_config(None, (), task={"name": "custom", "data": "d.jsonl", "rewards": [reward]})


def test_other_rows_are_evaluated_when_they_are_given(folder, tmp_path):
    args = TBAConfig(tmp_path / "run", max_completion_length=4, disable_tqdm=True)
    trainer = TBATrainer(
        str(folder / "model"), rows_of_want, args, [{"prompt": f"w{i}", "want": 0} for i in range(3, 9)]
    )
    assert trainer.evaluate()["eval_reward"] == 0.0
    others = [{"prompt": f"w{i} w5", "want": i} for i in (1, 2)]
    found = trainer.evaluate(others, metric_key_prefix="test")
    assert (found["test_reward"], found["test_num_prompts"]) == (1.5, 2.0)
    assert trainer.state.log_history[-1]["test_reward"] == 1.5
    assert trainer.evaluate()["eval_reward"] == 0.0
    with pytest.raises(ConfigError, match="prompts is a str: give a list"):
        trainer.generate("w5")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_generations": "eight"}, "num_generations='eight' is no number"),
        ({"train": "fast"}, r"train='fast' is no section: give its settings, train=\{"),
        ({"seed": True}, "seed: a number is needed, got true"),
        ({"bf16": "maybe"}, "bf16='maybe' is a text: give True or False"),
        ({"generation_kwargs": "top_p=0.9"}, "generation_kwargs='top_p=0.9' is no mapping: give a dict"),
        ({"model_init_kwargs": ["bf16"]}, r"model_init_kwargs=\['bf16'\] is no mapping"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 leaves no response to train on"),
        ({"learning_rate": 1e-5, "warmup_ratio": 2}, "warmup_ratio=2 is no share of the run"),
        ({"save_steps": -3}, "save_steps=-3 is no number of steps"),
        ({"logging_steps": 0}, "logging_steps=0 is no number of steps"),
        ({"logging_steps": 1.5}, "logging_steps=1.5 is no number of steps: write a whole one"),
        ({"eval_strategy": "sometimes"}, "eval_strategy='sometimes' is none of no, steps, epoch"),
        ({"eval_steps": "ten"}, "eval_steps='ten' is no number: write one"),
        ({"num_generations": 0, "seed": 3}, "^num_generations=0: a prompt needs 1 response at least"),
        ({"output_dir": 5, "seed": 3}, "^output_dir=5 cannot be used"),
        ({"train": {"samples_per_prompt": "x"}}, "num_generations: Input should be a valid integer"),
        (
            {"scale_rewards": "groups", "loss_type": "grpo"},
            'scale_rewards="groups" cannot be kept: use "group" or "none"',
        ),
        ({"train": {"ranks": "x"}}, r"ranks: Input should be a valid integer.* got 'x'"),
        ({"save_total_limit": [3]}, r"^save_total_limit=\[3\] cannot be used"),
        ({"report_to": 5, "max_steps": 2}, r"^report_to=5 cannot be used \(.* not iterable\): docs/from_trl"),
        ({"num_generations": [2], "report_to": 5}, r"^num_generations=\[2\] or report_to=5 cannot be used"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused_by_name(given, message):
    with pytest.raises(ConfigError, match=message):
        TBAConfig(**given)


def test_a_number_may_be_given_as_text_and_a_name_may_begin_as_a_mapping_does():
    args = TBAConfig(num_generations="4", run_name="{x", learning_rate="auto", save_total_limit="3")
    assert (args.config.train.samples_per_prompt, args.config.name) == (4, "{x")
    assert args.config.train.keep_checkpoints == 3


@pytest.mark.parametrize("epochs", [0.0, -2, float("nan"), float("inf")])
def test_epochs_that_are_no_number_above_0_are_refused(tmp_path, epochs):
    with pytest.raises(ConfigError, match=r"num_train_epochs=.* is no number above 0"):
        TBAConfig(output_dir=tmp_path, num_train_epochs=epochs).resolved(num_rows=8)


class Judge:
    """A reward that is an object."""

    def __call__(self, completions, **columns):
        return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reward_funcs": Judge}, r"reward_funcs has the class Judge: give an object of it, Judge\(\)"),
        ({"reward_funcs": "./nowhere"}, "reward_funcs='./nowhere': there is no such folder"),
        (
            {"reward_funcs": "sevens"},
            r"reward_funcs='sevens' is taken for .* a reward model \(a function is given itself, or as `file.py:name`\): ",
        ),
        ({"reward_funcs": 5}, "reward_funcs is a int: give functions, `file.py:name`, or reward models"),
        ({"reward_weights": 1.0}, "reward_weights=1.0 is no list of numbers: give one for each reward"),
        ({"reward_weights": ["a"]}, r"reward_weights=\['a'\] is no list of numbers"),
        ({"callbacks": [5]}, "callbacks is a int: give a list of transformers' TrainerCallbacks"),
        ({"processing_class": 5}, "processing_class is a int: give a tokenizer, or its folder or hub name"),
        ({"processing_class": "tba:nothing"}, "is not shipped with the package"),
        ({"processing_class": "./nowhere"}, "processing_class='./nowhere': there is no such folder"),
    ],
)
def test_what_is_no_reward_callback_or_tokenizer_is_refused_by_name(folder, tmp_path, given, message):
    usual = {"reward_funcs": sevens, "args": TBAConfig(output_dir=tmp_path / "out"), "train_dataset": ROWS}
    with pytest.raises(ValueError, match=message):
        TBATrainer(str(folder / "model"), **(usual | given))


def test_a_model_without_a_head_is_refused_before_it_is_trained(folder, tmp_path):
    trunk = AutoModel.from_pretrained(folder / "model")
    with pytest.raises(ConfigError, match="model is a LlamaModel, which has no head to generate with"):
        TBATrainer(trunk, sevens, TBAConfig(output_dir=tmp_path / "out"), ROWS)


def test_a_model_of_the_package_may_have_a_tokenizer_of_its_own(folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    args = TBAConfig(output_dir=tmp_path / "out")
    trainer = TBATrainer("tba:arithmetic", sevens, args, ROWS, processing_class=tokenizer)
    assert AutoTokenizer.from_pretrained(trainer.config.model.path).get_vocab() == tokenizer.get_vocab()


def test_what_cannot_be_generated_is_refused_by_name(folder, tmp_path):
    trainer = TBATrainer(str(folder / "model"), sevens, TBAConfig(output_dir=tmp_path / "out"), ROWS)
    with pytest.raises(ConfigError, match="prompts is a int: give a list"):
        trainer.generate(5)
    with pytest.raises(ConfigError, match=r"prompts\[1\] is 5: give text or a list of chat messages"):
        trainer.generate(["w5", 5])
    with pytest.raises(ConfigError, match="num_generations=0 must be a whole number, at least 1"):
        trainer.generate(["w5"], num_generations=0)


def test_a_start_model_that_the_run_would_move_aside_is_refused(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "out" / "checkpoints" / "step-2")
    (tmp_path / "out" / "config.yaml").write_text("seed: 1\n")
    trainer = TBATrainer(
        str(tmp_path / "out" / "checkpoints" / "step-2"), sevens, TBAConfig(output_dir=tmp_path / "out"), ROWS
    )
    with pytest.raises(ValueError, match=r"is part of the run in .* choose another output_dir, or copy it elsewhere"):
        trainer.train()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"tokenizer": None}, "no argument tokenizer: did you mean processing_class\\?"),  # its name in earlier TRL
        ({"train_data": []}, "no argument train_data: did you mean train_dataset\\?"),
        ({"seed": 1}, "no argument seed: it takes model, reward_funcs"),
    ],
)
def test_an_argument_that_the_trainer_lacks_is_answered_with_the_one_that_is_meant(argument, message):
    with pytest.raises(ConfigError, match=message):
        TBATrainer(
            model="tba:arithmetic", reward_funcs=flat, args=TBAConfig(max_steps=1), train_dataset=ROWS, **argument
        )
