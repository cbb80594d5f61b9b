"""TBATrainer and the command give the same run; defaults scale with the model."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from commands import run_command, run_python
from huggingface_hub.errors import OfflineModeIsEnabled
from problem import SETTINGS, make_config
from safetensors.torch import load_file
from script_rewards import late, sevens
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    TrainerCallback,
)

from tba import TBAConfig, TBATrainer
from tba.config import dump_config, load_config
from tba.observe.run_folder import RunFolder, foreign
from tba.tasks.rewards.functions import RewardSet, named_rewards

pytestmark = pytest.mark.slow


class Classes(TrainerCallback):
    """The class of the model at the beginning, after a step, and at the end."""

    def __init__(self):
        self.classes = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.classes.append(type(model))

    def on_train_end(self, args, state, control, model=None, **kwargs):
        self.classes.append(type(model))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            self.classes.append(type(model))


def losses(path) -> list[float]:
    records = [json.loads(line) for line in RunFolder(path).metrics.read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def test_tba_trainer_and_the_command_give_the_same_run(folder):
    name = "by-command"
    options = [
        "--model",
        f"{folder}/model",
        "--data",
        f"{folder}/data.jsonl",
        "--reward",
        f"{folder}/rewards.py:sevens",
    ]
    settings = [*SETTINGS, "mode=sync", f"output={folder}/runs", f"name={name}"]
    run_command([sys.executable, "-m", "tba", "train", *options, *settings]).check_returncode()

    lines = (folder / "data.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {"id": f"data-{number}"} for number, line in enumerate(lines, start=1)]
    args = TBAConfig(
        output_dir=folder / "runs" / "by-python",
        mode="sync",
        max_steps=6,
        generation_batch_size=16,
        num_generations=4,
        learning_rate=1e-3,
        max_completion_length=8,
        observe={"progress": False},
        evaluate={"num_prompts": 4},
    )
    TBATrainer(model=str(folder / "model"), reward_funcs=sevens, args=args, train_dataset=rows).train()
    assert losses(folder / "runs" / "by-python") == losses(folder / "runs" / name)


def test_a_model_object_and_a_function_from_a_script_train_asynchronously(folder):
    """As a user writes it: no main guard, the function defined in the script itself."""
    script = folder / "script.py"
    script.write_text(f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
from tba import TBAConfig, TBATrainer

def shorter_is_better(completions, **columns):
    return [1.0 / (1 + len(text.split())) for text in completions]

trainer = TBATrainer(
    model=AutoModelForCausalLM.from_pretrained("{folder}/model"),
    processing_class=AutoTokenizer.from_pretrained("{folder}/model"),
    reward_funcs=[shorter_is_better],
    args=TBAConfig(output_dir="{folder}/runs/script", max_steps=3, generation_batch_size=8, num_generations=4,
                   max_completion_length=6, observe={{"progress": False}}, evaluate={{"num_prompts": 2}}),
    train_dataset=[{{"prompt": f"w{{i}} w5"}} for i in range(3, 13)],
)
print(trainer.train()["steps"])
""")
    done = run_python(str(script))
    assert done.stdout.strip() == "3", done.stderr


def test_flat_names_and_sections_are_merged_and_nothing_is_changed():
    section = {"responses_per_step": 16}
    config = TBAConfig(max_steps=5, train=section, learning_rate=1e-5).config
    assert (config.train.max_steps, config.train.responses_per_step, config.train.learning_rate.start) == (5, 16, 1e-5)
    assert section == {"responses_per_step": 16}


class Heard(TrainerCallback):
    """Writes down what it is told, asks for a checkpoint after step 1 and for the end after step 4."""

    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.events.append(("begin", args.max_steps, state.max_steps))

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 1
        control.should_training_stop = state.global_step == 4
        return control

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.events.append(("log", state.global_step))

    def on_save(self, args, state, control, **kwargs):
        self.events.append(("save", state.global_step))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.events.append(("evaluate", sorted(metrics)[0]))

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append(("end", state.global_step))


def test_what_a_script_asks_of_a_trainer_before_during_and_after_the_run(folder, tmp_path, monkeypatch):
    """Callbacks, the trained model in the object that was given, evaluation, samples, a folder
    with a card, and the request to the hub."""
    given, heard = AutoModelForCausalLM.from_pretrained(folder / "model"), Heard()
    before = given.lm_head.weight.detach().clone()
    trainer = TBATrainer(
        model=given,
        processing_class=str(folder / "model"),
        reward_funcs=[sevens, late],
        args=TBAConfig(
            output_dir=tmp_path / "run",
            max_steps=9,
            generation_batch_size=8,
            num_generations=4,
            max_completion_length=6,
            learning_rate=1e-2,
            logging_steps=2,
            reward_weights=[1.0, 0.0],
            disable_tqdm=True,
            evaluate={"num_prompts": 3},
            mode="sync",
        ),
        train_dataset=[{"prompt": f"w{i} w5", "want": "w7"} for i in range(3, 33)],
        callbacks=[heard],
    )
    assert "eval_reward" in trainer.evaluate()
    output = trainer.train()
    assert (output.global_step, output["steps"], trainer.state.global_step) == (4, 4, 4)
    logged = [event for event in heard.events if event[0] != "evaluate"]
    logs = [
        ("log", 1),
        ("save", 1),
        ("log", 2),
        ("log", 3),
        ("log", 4),
        ("save", 4),
    ]  # every step, whatever logging_steps
    assert logged == [("begin", 9, 9), *logs, ("end", 4)]
    lines = [json.loads(line) for line in RunFolder(tmp_path / "run").metrics.read_text().splitlines()]
    history = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert history == [line["loss"] for line in lines if "loss" in line]
    scores = {line["step"]: line["rewards/late/mean"] for line in lines if "loss" in line}
    assert scores == {1: 0.0, 2: 0.0, 3: 1.0, 4: 1.0}  # steps 1 and 2 are of weights 0 and 1
    assert trainer.model is given
    assert not torch.equal(given.lm_head.weight, before)
    (texts,) = trainer.generate(["w9 w5"], num_generations=3)
    assert len(texts) == 3
    trainer.save_model(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(saved.lm_head.weight, given.lm_head.weight)
    assert "objective\n`tb`, 4 optimizer steps" in (tmp_path / "saved" / "README.md").read_text()
    trainer.save_model()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").config.hidden_size == given.config.hidden_size
    assert foreign(tmp_path / "run") == []  # overwrite_output_dir may replace it
    again = TBATrainer(str(folder / "model"), [sevens, late], trainer.args, [{"prompt": "w5"}])
    assert torch.equal(again.model.lm_head.weight, before)  # not the weights of the run that had this folder before
    trainer.log({"own": 1.0})
    assert trainer.state.log_history[-1]["own"] == 1.0
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OfflineModeIsEnabled):
        trainer.push_to_hub(dataset_name="rows")
    trainer.accelerator.print("the last lines of TRL's scripts")
    assert trainer.hub_model_id is None
    trainer.end()


def test_a_reward_model_by_name_and_a_lora_config_train(folder, tmp_path):
    """As TRL's documentation does it: reward_funcs is a name, peft_config a LoraConfig."""
    peft = pytest.importorskip("peft")
    settings = LlamaConfig.from_pretrained(folder / "model", num_labels=1)
    torch.manual_seed(0)
    LlamaForSequenceClassification(settings).save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(tmp_path / "judge")
    seen = Classes()
    trainer = TBATrainer(
        model=str(folder / "model"),
        reward_funcs=str(tmp_path / "judge"),
        args=TBAConfig(
            output_dir=tmp_path / "run",
            max_steps=2,
            generation_batch_size=8,
            num_generations=4,
            max_completion_length=6,
            disable_tqdm=True,
            evaluate={"num_prompts": 2},
            mode="sync",
            num_train_epochs=3,
        ),
        train_dataset=[{"prompt": f"w{i} w5"} for i in range(3, 13)],
        peft_config=peft.LoraConfig(r=2, lora_alpha=4, task_type="CAUSAL_LM"),
        callbacks=[seen],
    )
    assert trainer.config.model.lora.rank == 2
    assert isinstance(trainer.model, peft.PeftModel)
    assert trainer.train()["steps"] == 2
    lines = [json.loads(line) for line in RunFolder(tmp_path / "run").metrics.read_text().splitlines()]
    assert all(np.isfinite(line["rewards/judge/mean"]) for line in lines if "loss" in line)
    assert seen.classes == [type(trainer.model)] * 3 == [peft.PeftModelForCausalLM] * 3
    trained = load_file(tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors")
    assert any(weight.any() for name, weight in trained.items() if "lora_B" in name)
    held = peft.get_peft_model_state_dict(trainer.model)
    assert all(torch.equal(held[name], weight) for name, weight in trained.items())


def test_rewards_keep_their_names_and_functions_in_the_config_and_can_be_pickled(folder):
    import cloudpickle

    named = f"{folder}/rewards.py:sevens"
    rows = [{"prompt": "w5"}]
    trainer = TBATrainer(
        model="x", reward_funcs=[named, lambda completions, **_: [0.25]], train_dataset=rows, args=make_config(folder)
    )
    assert trainer.config.task.rewards[0].function == named
    # A worker process gets the pickled config, and knows neither this file nor the rewards' file.
    code = (
        "import sys, pickle; from tba.tasks.rewards.functions import RewardSet\n"
        "print(RewardSet(pickle.load(sys.stdin.buffer)).score('w5', {'want': 'w7'}, ['w7 w1'], [[7, 1]]))"
    )
    payload = cloudpickle.dumps(named_rewards(trainer.config.task.rewards))
    done = subprocess.run([sys.executable, "-c", code], input=payload, capture_output=True, check=False)
    assert done.stdout.decode().strip() == "[{'sevens': 0.5, '<lambda>': 0.25}]", done.stderr.decode()


def test_config_yaml_keeps_the_name_of_a_python_function_and_asks_for_it_when_it_is_read_again(folder):
    trainer = TBATrainer(model="x", reward_funcs=sevens, train_dataset=[{"prompt": "w5"}], args=make_config(folder))
    (folder / "dumped.yaml").write_text(dump_config(trainer.config))
    again = load_config(folder / "dumped.yaml")
    assert again.task.rewards[0].function == "<python>:sevens"
    with pytest.raises(ValueError, match="reward 'sevens' was a Python function given to TBATrainer"):
        RewardSet(named_rewards(again.task.rewards))


def test_what_is_missing_is_said(folder):
    with pytest.raises(ValueError, match="train_dataset is missing"):
        TBATrainer(model="x", reward_funcs=sevens)
    with pytest.raises(ValueError, match="reward_weights has 2 entries for 1 reward_funcs"):
        TBATrainer(model="x", reward_funcs=sevens, train_dataset=[], reward_weights=[1, 2])
    with pytest.raises(ValueError, match="model is a object: give a folder"):
        TBATrainer(model=object(), reward_funcs=sevens, train_dataset=[{"prompt": "x"}], args=make_config(folder))
