"""Scripts written for TRL's GRPOTrainer, after its documentation, and TRL's own script run with their import changed and
nothing else. They need TRL and the `datasets` package that comes with it (`make test-trl`); sizes are for a CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch
from builders import tiny_llama, tiny_tokenizer
from commands import run_command
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

trl = pytest.importorskip("trl", reason="the extra `benchmark` is not installed")

TEXT = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("json", data_files="data/train.jsonl", split="train")

def reward_num_unique_chars(completions, **kwargs):
    return [len(set(c)) for c in completions]

def reward_target(completions, target, trainer_state, **kwargs):
    return [float(t in c.split()) + 0.0 * trainer_state.global_step for c, t in zip(completions, target)]

training_args = GRPOConfig(
    output_dir="out", per_device_train_batch_size=8, gradient_accumulation_steps=2, num_generations=4, max_steps=2,
    max_completion_length=8, learning_rate=1e-4, lr_scheduler_type="cosine", warmup_ratio=0.1, logging_steps=1, bf16=False,
    use_cpu=True, report_to="none", save_strategy="no", reward_weights=[0.1, 1.0], temperature=0.9, seed=1,
)
trainer = GRPOTrainer(
    model="model", reward_funcs=[reward_num_unique_chars, reward_target], args=training_args, train_dataset=dataset,
)
trainer.train()
print("logged", sum("loss" in record for record in trainer.state.log_history), trainer.state.global_step)
"""
CHAT = """
import re
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

rows = [{"prompt": [{"role": "user", "content": f"w{i} w5"}], "answer": "w7"} for i in range(3, 39)]
dataset = Dataset.from_list(rows).train_test_split(test_size=4, seed=0)

def format_reward_func(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.search(r"w7", content) else 0.0 for content in contents]

async def length_reward(completions, **kwargs):
    return [-len(completion[0]["content"]) / 100 for completion in completions]

class Steps(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("step", state.global_step)

tokenizer = AutoTokenizer.from_pretrained("model")
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained("model"),
    processing_class=tokenizer,
    reward_funcs=[format_reward_func, length_reward],
    args=GRPOConfig(
        output_dir="out", max_steps=2, per_device_train_batch_size=16, num_generations=4, max_completion_length=8,
        bf16=False, use_cpu=True, eval_strategy="steps", eval_steps=1, report_to=[], loss_type="dr_grpo", beta=0.0,
        epsilon=0.2, epsilon_high=0.28, mask_truncated_completions=False, log_completions=False, disable_tqdm=True,
    ),
    train_dataset=dataset["train"], eval_dataset=dataset["test"], callbacks=[Steps()],
)
trainer.train()
trainer.save_model("saved")
AutoModelForCausalLM.from_pretrained("saved")
print("evaluated", any("eval_reward" in record for record in trainer.state.log_history))
"""
JUDGED = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config(
    "--output_dir out --num_train_epochs 1 --per_device_train_batch_size 72 --num_generations 4 --max_completion_length 8 "
    "--bf16 False --use_cpu --report_to none --save_strategy no --logging_steps 1 --use_peft --lora_r 4".split()
)
dataset = Dataset.from_dict({"prompt": [f"w{i} w5" for i in range(3, 39)]})
trainer = GRPOTrainer(
    model="model",
    reward_funcs="judge",
    args=training_args,
    train_dataset=dataset,
    peft_config=get_peft_config(model_args),
)
trainer.model.print_trainable_parameters()
trainer.train()
print("rewards", all("rewards/judge/mean" in record for record in trainer.state.log_history if "loss" in record))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tiny_llama().save_pretrained(folder / "model")
    torch.manual_seed(0)
    judge = LlamaConfig.from_pretrained(folder / "model", num_labels=1)
    LlamaForSequenceClassification(judge).save_pretrained(folder / "judge")
    for name in ("model", "judge"):
        tokenizer.save_pretrained(folder / name)
    (folder / "data").mkdir()
    rows = [{"prompt": f"w{i} w5 w6", "target": "w7"} for i in range(3, 39)]
    for name, own in (("train", rows), ("test", rows[:4])):
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    return folder


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        pytest.param(TEXT, "logged 2 2", id="text"),
        pytest.param(CHAT, "evaluated True", id="chat"),
        pytest.param(JUDGED, "rewards True", id="reward_model_and_peft"),
    ],
)
def test_a_script_of_trl_runs_with_its_import_changed(folder, tmp_path, script, printed):
    assert printed in run_script(script, folder, tmp_path)


def run_script(script: str, folder: Path, tmp_path: Path, *options: str) -> str:
    """What a script prints, with its import changed."""
    for name in ("model", "judge", "data"):
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "script.py").write_text(script.replace("from trl import", "from tba import"))
    done = run_command([sys.executable, "script.py", *options], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_trls_own_script_runs_to_its_last_line_with_its_import_changed(folder, tmp_path):
    script = (Path(trl.__file__).parent / "scripts" / "grpo.py").read_text()
    (tmp_path / "my_rewards.py").write_text(
        "def longer(completions, **columns): return [len(set(c)) for c in completions]"
    )
    options = (
        "--model_name_or_path model --dataset_name data --reward_funcs my_rewards.longer get_soft_overlong_punishment "
        "--output_dir out --max_steps 2 --per_device_train_batch_size 8 --num_generations 4 --max_completion_length 8 "
        "--eval_strategy steps --eval_steps 2 --save_steps 1 --use_peft --lora_r 4 --use_cpu --bf16 false"
    )
    assert "Model saved to out." in run_script(script, folder, tmp_path, *options.split())
    for name in ("out", "out/checkpoint-1", "out/checkpoint-2"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name)
