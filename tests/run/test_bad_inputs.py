"""Bad inputs: each is told in at most ten lines without a traceback, ends with a non-zero exit status, and leaves nothing.

All run in this process through the command's own entry point, on the tiny problem of problem.py, in sync mode: what is wrong
is found on the same way in every mode.
"""

import gzip
import json
import os
import re
import socket
import subprocess
import sys

import pytest
from problem import SETTINGS, with_settings
from safetensors.torch import load_file, save
from transformers import AutoTokenizer, BertConfig, T5Config

from tba.cli import main
from tba.observe.run_folder import Claim

pytestmark = pytest.mark.slow

CHAT = '{"prompt": [{"role": "alien", "content": "w5"}], "want": "w7"}\n'
ROW = '{"prompt": "w5 w6", "want": "w7"}\n'
GOOD = "def f(completions, **columns):\n    return [1.0] * len(completions)\n"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
VIT = '{"model_type": "vit", "architectures": ["ViTModel"]}'
STUDY = "name: s\nmetric: {}\nrows: {{tb: {{objective.name: tb}}}}\ncolumns: {{sync: {{mode: sync}}}}\nseeds: [0]\n"
STATUS = (
    f'{{"host": "{socket.gethostname()}", "pid": 4194302, "pid_started": null, "step": 1, "time": %s, "roles": [%s]}}'
)
BASE = (*SETTINGS, "mode=sync", "task.eval_fraction=0")
PROBLEM = ["--model", "@/model", "--data", "@/data.jsonl", "--reward", "@/rewards.py:sevens"]
"""Arguments of a good run; @ is the folder of the tiny problem."""


def own(data: str = "@/data.jsonl", reward: str = "@/rewards.py:sevens", model: str = "@/model") -> list[str]:
    return ["--model", model, "--data", data, "--reward", reward]


def rewards(text: str) -> tuple[list[str], dict[str, str]]:
    """A run with a reward file of its own."""
    return own(reward="r.py:f"), {"r.py": text}


def data(text: str) -> tuple[list[str], dict[str, str]]:
    """A run with a data file of its own."""
    return own(data="d.jsonl"), {"d.jsonl": text}


def imported(text: str) -> tuple[list[str], dict[str, str]]:
    return [*PROBLEM, "replay.imports=[i.jsonl]"], {"i.jsonl": text}


CONFIGS = {
    "an output with a variable": (["output=$NOWHERE/runs"], "output: '$NOWHERE/runs' has a variable"),
    "an output that is an address": (["output=s3://bucket/runs"], "output: 's3:/bucket/runs' is an address"),
    "an output of nobody": (["output=~nobodyatall/x"], "output: '~nobodyatall/x': there is no such user"),
    "an output behind a broken link": (["output=away"], "away is a link to gone, which is not there"),
    "an address without a cluster": (["runtime.address=auto"], "runtime.address=auto is of a Ray cluster and needs"),
    "a decay longer than its schedule": (
        ["train.learning_rate={kind: wsd, start: 1e-3, steps: 5, decay_steps: 50}"],
        "train.learning_rate: decay_steps=50 and warmup_steps=0 exceed steps=5",
    ),
    "threads without number": (
        ["runtime.threads=1000000"],
        "runtime.threads: Input should be less than or equal to 1024, got 1000000",
    ),
    "an adapter wider than any model": (
        ["model.lora={rank: 100000000}"],
        "model.lora.rank: Input should be less than or equal to 16384",
    ),
    "a path with a zero byte": (['output="a\\0b"'], "output: 'a\\x00b' has a character that no file can hold"),
    "a name with half a character": (['name="\\ud83d"'], "name: '\\ud83d' has a character that no file can hold"),
    "a model from a variable that is not set": (["model.path=''"], "model.path: the path is empty"),
    "an unknown key": (["train.max_step=1"], "did you mean train.max_steps?"),
    "an unknown section": (["trian.max_steps=1"], "unknown key trian"),
    "a word for a number": (["train.max_steps=many"], "train.max_steps: Input should be a valid integer"),
    "a negative number": (["train.learning_rate=1e-3", "seed=-1"], "seed: Input should be greater than or equal to 0"),
    "a choice that is none": (["mode=asink"], "mode: Input should be 'async', 'sync' or 'fixed_lag'"),
    "an override without a value": (
        ["train.max_steps"],
        "an override has a value after `=`, write train.max_steps=VALUE",
    ),
    "an override without its section": (["max_steps"], "write train.max_steps=VALUE"),
    "an override with a colon": (["train.max_steps:5"], "write train.max_steps=5."),
    "a name with a separator": (["name=a/b"], "name: 'a/b' cannot name a run folder"),
    "a name that goes up": (["name=.."], "name: '..' cannot name a run folder"),
    "a name of nothing": (["name=''"], "name: '' cannot name a run folder"),
    "a name that no file system takes": (["name=" + "n" * 300], "has 300 bytes, and 200 are allowed"),
    "a rate that is a word": (
        ["train.learning_rate=fast"],
        "'fast' is not a number: write one, for example 1e-5, or auto",
    ),
    "a negative rate": (["train.learning_rate=-1"], "train.learning_rate=-1 is not between 0 and 1"),
    "an absurd rate": (["train.learning_rate=1000"], "train.learning_rate=1000 is not between 0 and 1"),
    "a rate that is no number": (["train.learning_rate=.nan"], "train.learning_rate.start: Input should be a finite"),
    "a schedule that ends below 0": (
        ["train.learning_rate={kind: linear, start: 1e-4, end: -1}"],
        "train.learning_rate=-1 is not between",
    ),
    "an absurd drift": (["train.target_drift=1e9"], "train.target_drift: Input should be less than or equal to 10"),
    "no drift at all": (["train.target_drift=0"], "train.target_drift: Input should be greater than 0, got 0"),
    "a unit of rewards that is none": (["objective.reward_unit=0"], "objective.reward_unit"),
    "a unit of rewards by an unknown rule": (["objective.reward_unit=mean"], "objective.reward_unit"),
    "an absurd weight decay": (
        ["train.weight_decay=1e9"],
        "train.weight_decay: Input should be less than or equal to 10",
    ),
    "averages that never move": (["train.adam_betas=[1, 2]"], "train.adam_betas.0: Input should be less than 1, got 1"),
    "a negative temperature": (
        ["generate.temperature=-1"],
        "generate.temperature: Input should be greater than 0, got -1",
    ),
    "an absurd temperature": (["generate.temperature=1e9"], "generate.temperature: Input should be less than or equal"),
    "an absurd number of samples": (
        ["search.samples_multiplier=1e9"],
        "search.samples_multiplier: Input should be less",
    ),
    "a beta that is a word": (["objective.beta=huge"], "objective.beta: 'huge' is not a number"),
    "a beta of nothing": (["objective.beta=0"], "objective.beta must stay above 0 for tb"),
    "a negative beta": (["objective.beta=-1"], "Use 0.01 or leave it unset"),
    "a beta that is too large": (["objective.beta=1e5"], "objective.beta=100000 is above 100"),
    "a device that is none": (["model.device=gpu"], "model.device: device 'gpu' is not known: write auto, cpu, cuda"),
    "held-out data of a task that are not there": (
        ["task.name=gsm8k", "task.data=openai/gsm8k", "task.eval_data=no.jsonl"],
        "task.eval_data: file no.jsonl does not exist",
    ),
    "a switch for a number": (["train.max_steps=yes"], "train.max_steps: a number is needed, got true"),
    "a switch for a number of nothing": (["seed=no"], "seed: a number is needed, got false"),
    "a number without end": (
        ["search.reward_timeout_seconds=.inf"],
        "search.reward_timeout_seconds: Input should be a finite number",
    ),
    "a seed beyond 64 bits": ([f"seed={10**20}"], "seed: Input should be less than or equal to 4611686018427387904"),
    "a name that YAML reads as a date": (["name=2026-11-16"], "text is needed, and YAML reads 2026-11-16 as a date"),
    "a section that is a number": (["train=5"], "train: a section is needed, got 5: write train.SETTING=VALUE"),
    "a section that is nothing": (["train="], "train: a section is needed, got None"),
    "a value that is nested too deeply": (["train.max_steps=" + "[" * 1500 + "]" * 1500], "it is nested too deeply"),
    "rewards that count nothing": (
        ["task.data=d.jsonl", "task.name=custom", "task.rewards=[{function: r.py:f, weight: 0}]"],
        "task.rewards: every weight is 0, so that nothing can be learned",
    ),
    "a config from a pipe": (["pipe"], "config file pipe is no regular file"),
    "a value that is no YAML": (["train.max_steps=[1"], "the value is not valid YAML"),
    "sizes that do not divide": (["train.responses_per_step=10", "train.samples_per_prompt=4"], "use 8 or 12"),
    "a mode without its setting": (["mode=sync", "search.num_searchers=2"], "needs mode=async"),
    "an impossible length": (
        ["generate.min_new_tokens=99", "generate.max_new_tokens=9"],
        "generate.min_new_tokens=99 is above generate.max_new_tokens=9",
    ),
    "a schedule without an end": (["objective.beta={start: 0.1, end: 0.2}"], "a constant schedule has end=0.2"),
    "a config that is not there": (["nowhere.yaml"], "config file nowhere.yaml does not exist"),
    "two configs": (["a.yaml", "b.yaml"], "one config file at a time"),
    "an unknown objective": (["objective.name=tbb"], "objective.name"),
    "an unknown task": (["task.name=arithmetik"], "task.name='arithmetik' is not known"),
    "a custom task without data": (["task.name=custom"], "task.data is needed for task.name=custom"),
    "a custom task without rewards": (["task.name=custom", "task.data=d.jsonl"], "task.rewards is empty"),
    "a reward limit of nothing": (
        ["search.reward_timeout_seconds=0"],
        "search.reward_timeout_seconds: Input should be greater",
    ),
    "a generator by the package's other name": (
        ["task.name=reasoning-gym:gcd"],
        "task.name=reasoning-gym:gcd is spelled reasoning_gym:gcd.",
    ),
    "a setting as Hydra adds one": (["+train.max_steps=3"], "nothing before its key: write train.max_steps=3."),
    "data in two files": (
        ["task.data=[a.jsonl, b.jsonl]"],
        "task.data: one text is needed, got ['a.jsonl', 'b.jsonl']",
    ),
    "a config as an option": (["--config", "c.yaml"], "the file has no option, write `tba train CONFIG.yaml`"),
    "an option in the plural": (["--rewards", "r.py:f"], "there is no option --rewards: did you mean --reward?"),
    "an option that is none": (["--learning-rate", "1"], "did you mean train.learning_rate=...?"),
    "a logger that is not installed": (["observe.sinks=[wandb]"], "pip install wandb"),
    "an output that is a file": (["output=file.txt"], "file.txt is a file, not a folder"),
    "a read-only output": (["output=/proc/sys"], "cannot be written"),
    "a run of that name": (["name=there"], "exists already: choose another name"),
    "a folder that is no run": (["name=there", "overwrite=true"], "is not a run folder"),
    "a run with somebody's file in it": (["name=mixed", "overwrite=true"], "holds what no run wrote (notes.txt)"),
    "a run with a file in a checkpoint": (
        ["name=kept", "overwrite=true"],
        "holds what no run wrote (checkpoints/step-1/mine.txt)",
    ),
    "a folder in use": (["name=used", "overwrite=true"], f"on this host ({socket.gethostname()})"),
}
FILES = {
    "a reward for a task with its own": (
        [*PROBLEM, "task.name=arithmetic"],
        {},
        "--reward is for task.name=custom, and task.name=arithmetic has its own",
    ),
    "a run that would replace its start model": (
        [*own(model="runs/own/checkpoints/step-1"), "name=own", "overwrite=true"],
        {"runs/own/config.yaml": "seed: 1\n", "runs/own/checkpoints/step-1/manifest.json": '{"files": {}}'},
        "is part of the run in runs/own, which a new run there replaces",
    ),
    "imports that are a run": (
        [*PROBLEM, "replay.imports=[old]"],
        {"old/replay.sqlite": ""},
        "old is of a run, and JSONL is needed: `tba replay ",
    ),
    "imports that are a folder": ([*PROBLEM, "replay.imports=[runs]"], {}, "runs is a folder. Give a JSONL file"),
    "imports with other rewards": (
        *imported('{"prompt": "@", "completion": "w5", "rewards": {"other": 1}}\n'),
        "line 1 has rewards ['other'], and the task's are ['sevens']",
    ),
    "a model without layers": (own(model="./flat"), {}, "its config.json has num_hidden_layers=0, and at least 1"),
    "a tokenizer with a gap": (own(model="./gap"), {}, "'w7' (id 5000). Use the tokenizer that the model was trained"),
    "weights that are integers": (
        own(model="@/whole"),
        {},
        "and 8 more of model.safetensors are I8 and none of F64, F32, F16, BF16, and config.json has no quantization_config",
    ),
    "a YAML file that is none": (["broken.yaml"], {"broken.yaml": "train: [1\n"}, "is not valid YAML"),
    "a YAML file of a list": (["list.yaml"], {"list.yaml": "- 1\n"}, "holds a list; expected sections"),
    "a TOML file": (["c.toml"], {"c.toml": "max_steps = 3\n"}, "A config is YAML, and .toml is another format."),
    "a prompt with an image": (
        *data('{"prompt": [{"role": "user", "content": [{"type": "image", "url": "x.png"}]}]}\n'),
        "Each content is one text, without images or parts. Got",
    ),
    "a YAML key that is a list": (["k.yaml"], {"k.yaml": "? [1, 2]\n: 3\n"}, "found unhashable key"),
    "a section that is a text": (
        ["s.yaml"],
        {"s.yaml": "train: fast\n"},
        "train: a section is needed, got 'fast': write train.SETTING=VALUE, or train: {SETTING: VALUE} in a file",
    ),
    "a key of another version": (
        ["s.yaml"],
        {"s.yaml": "train: {frobnicate: 1}\n"},
        "It stands in s.yaml: correct it there, or use the version of tba that wrote it.",
    ),
    "more ranks than cores": (
        [*PROBLEM, "mode=async", "model.device=cpu", "train.ranks=1000"],
        {},
        "train.ranks=1000 are as many processes of the trainer on",
    ),
    "data in a zip": (*data("PK\3\4 and more\n"), "d.jsonl is packed by zip: unpack it first"),
    "data packed by bzip2": (*data("BZh91AY&SY\n"), "d.jsonl is packed by bzip2: unpack it first"),
    "data in UTF-16 without its mark": (*data('{\0"\0p\0'), "d.jsonl is no text in UTF-8, which has no zero bytes"),
    "data of verl without a ground truth": (
        own(data="d.jsonl", reward="r.py:f"),
        {
            "d.jsonl": '{"prompt": "w5", "reward_model": {"style": "rule"}}\n',
            "r.py": "def f(data_source, solution_str, ground_truth): return 1.0\n",
        },
        "d.jsonl line 1 has no `ground_truth` column",
    ),
    "stop tokens as words": (own(model="./worded_end"), {}, "the model's eos_token_id has '</s>': write the number of"),
    "a model of images": (own(model="./vit"), {"vit/config.json": VIT}, "is no language model (ViTModel)"),
    "an adapter without its weights": (
        own(model="./adapter"),
        {},
        "the adapter has no weights (adapter_model.safetensors",
    ),
    "weights that are complex": (own(model="@/complex"), {}, "are C64 and none of F64, F32, F16, BF16"),
    "a run in the place of a model": (
        own(model="./run"),
        {"run/checkpoints/step-2/config.json": "{}"},
        "run/checkpoints/step-2 has one. Give a folder with config.json",
    ),
    "a reward file with an endless sum": (
        *rewards(f"x = {' + '.join(['1'] * 5000)}\n{GOOD}"),
        "r.py cannot be read: RecursionError",
    ),
    "a task that takes no inputs": (
        ["task.name=t.py:T"],
        {"t.py": "class T:\n    pass\n"},
        "t.py does not fit its call: TypeError: T() takes no arguments",
    ),
    "data from a pipe": (own(data="pipe"), {}, "pipe is a pipe or device, and it is read more than once"),
    "data that were packed": (
        own(data="packed.jsonl"),
        {},
        "packed.jsonl is packed by gzip: name it .jsonl.gz",
    ),
    "data that were not packed": (
        own(data="d.jsonl.gz"),
        {"d.jsonl.gz": ROW},
        "leave .gz out of its name if it is not",
    ),
    "data in UTF-16": (own(data="utf16.jsonl"), {}, "utf16.jsonl is in UTF-16, and UTF-8 is needed: iconv -f UTF-16"),
    "data with the line ends of old Macs": (
        *data(ROW.replace("\n", "\r") * 2),
        "d.jsonl ends its lines with \\r alone, and \\n is needed: tr",
    ),
    "a reward that is a class": (*rewards("class f:\n    pass\n"), "r.py:f': f is a class: name a function"),
    "a row with a key twice": (
        *data(ROW + '{"prompt": "w5", "prompt": "w6", "want": "w7"}\n'),
        "d.jsonl line 2 has the key 'prompt' twice: which value counts?",
    ),
    "a role that the chat template refuses": (
        own(data="d.jsonl", model="./strict"),
        {"d.jsonl": CHAT},
        "d.jsonl line 1: prompt 'd-1' with the roles alien is refused by the tokenizer's chat template: TemplateError: no",
    ),
    "a chat template that is none": (own(data="d.jsonl", model="./open"), {"d.jsonl": CHAT}, "TemplateSyntaxError"),
    "a chat template that fails": (own(data="d.jsonl", model="./divides"), {"d.jsonl": CHAT}, "ZeroDivisionError"),
    "a tokenizer that knows no word": (own(model="./wordless"), {}, "is refused by the tokenizer: WordLevel error"),
    "a reward file that is not text": (*rewards(GOOD + "\0"), "r.py is not valid Python"),
    "a reward file that is a folder": (
        own(reward="here.py:f"),
        {"here.py/x": ""},
        "here.py is a folder. Give a Python file",
    ),
    "heads that are zero": (own(model="./headless_attention"), {}, "cannot be loaded: ZeroDivisionError"),
    "heads that do not divide": (own(model="./three_heads"), {}, "is not a multiple of the number of attention heads"),
    "a vocabulary that is a text": (own(model="./worded"), {}, "Field 'vocab_size' expected int, got str"),
    "weights that are a broken pickle": (
        own(model="./pickled"),
        {},
        "cannot be loaded with its weights: UnpicklingError",
    ),
    "generation settings that are no JSON": (
        own(model="./ungenerated"),
        {},
        "and it may name the tokens that end a response. Copy it again, or delete it",
    ),
    "data that are not there": (own(data="no.jsonl"), {}, "task.data: file no.jsonl does not exist"),
    "held-out data that are not there": (
        [*PROBLEM, "task.eval_data=no.jsonl"],
        {},
        "task.eval_data: file no.jsonl does not exist. Give a JSONL file",
    ),
    "data that are a folder": (own(data="here"), {"here/d.jsonl": ROW}, "is a folder: give a JSONL file"),
    "a JSON array": (*data(f"[{ROW.strip()},\n{ROW.strip()}]\n"), "is one JSON array, and JSON Lines are needed"),
    "a JSON array over many lines": (*data(f"[\n{ROW.strip()}\n]\n"), "is one JSON array, and JSON Lines are needed"),
    "a JSON object over many lines": (*data('{\n"prompt": "w5"\n}\n'), "is one JSON object, and JSON Lines are needed"),
    "a table": (own(data="d.csv"), {"d.csv": "prompt,want\nw5,w7\n"}, 'pandas.read_csv("'),
    "a table with tabs": (own(data="d.tsv"), {"d.tsv": "prompt\twant\nw5\tw7\n"}, 'pandas.read_table("'),
    "a Parquet file": (*data("PAR1 and more"), "d.jsonl is a table, and JSON Lines are needed"),
    "a dataset of the hub": (own(data="openai/gsm8k"), {}, 'load_dataset("openai/gsm8k", split="train")'),
    "data without the reward's column": (
        *data('{"prompt": "w5", "answer": "w7"}\n'),
        "d.jsonl line 1 has no `want` column, which the reward sevens needs; it has prompt, answer.",
    ),
    "data without TRL's column": (
        *rewards("def f(completions, solution): return [1.0]\n"),
        "which the reward f needs; it has prompt, want. And",  # `solution` is no slip of `completions`
    ),
    "data that git-lfs has not fetched": (*data(LFS), "d.jsonl is a pointer of git-lfs to the data: `git lfs pull`"),
    "a reward of the singular": (
        *rewards("def f(completion): return [1.0]\n"),
        "Did the reward mean `completions`, which",
    ),
    "a reward of one prompt": (
        *rewards("def f(prompt, completions): return [1.0]\n"),
        "r.py:f' has the parameter `prompt`, which no reward gets: write `prompts`",
    ),
    "weights that git-lfs has not fetched": (own(model="./pointer"), {}, "model.safetensors is a pointer of git-lfs"),
    "a device that is not there": ([*PROBLEM, "model.device=cuda:77"], {}, "model.device=cuda:77 is not there"),
    "empty data": (*data(""), "d.jsonl is empty"),
    "data that are no JSON": (*data(ROW + '{"prompt"\n'), "d.jsonl line 2 is not valid JSON"),
    "a row without a prompt": (*data(ROW + '{"question": "w5"}\n'), "d.jsonl line 2 has no usable `prompt` column"),
    "an id twice": (*data(ROW.replace("}", ', "id": 1}') * 2), "id '1' occurs twice"),
    "a prompt that is too long": (*data(json.dumps({"prompt": "w5 " * 500}) + "\n"), "d.jsonl line 1"),
    "a reward file that is not there": (own(reward="no.py:f"), {}, "file no.py does not exist"),
    "a reward without a name": (own(reward="@/rewards.py"), {}, "write file.py:function"),
    "a reward that is not in its file": (
        own(reward="@/rewards.py:seven"),
        {},
        "has no function 'seven'; it has sevens",
    ),
    "a reward file that is no Python": (*rewards("def f(:\n"), "r.py:1 is not valid Python"),
    "a reward that imports nothing": (
        *rewards("import nowhere_at_all\n" + GOOD),
        "r.py:1 imports 'nowhere_at_all', which is not installed here",
    ),
    "two rewards of one name": ([*PROBLEM, "--reward", "@/rewards.py:sevens"], {}, "same name: sevens, sevens"),
    "a model that is not there": (own(model="./nowhere"), {}, "there is no such folder"),
    "a name that is no model": (
        own(model="runs/nowhere"),
        {},
        "model.path='runs/nowhere': there is no such folder",
    ),
    "a name that cannot be one": (own(model="a model"), {}, "and it is no hub name (owner/name)"),
    "an encoder": (own(model="@/bert"), {}, "is an encoder, which fills in gaps (BertForMaskedLM)"),
    "an encoder-decoder": (own(model="@/t5"), {}, "is an encoder-decoder (T5ForConditionalGeneration)"),
    "a classifier": (own(model="./classifier"), {}, "is a classifier (LlamaForSequenceClassification)"),
    "a model without a tokenizer": (own(model="./no_tokenizer"), {}, "the folder has no tokenizer (tokenizer.json"),
    "a model with a broken tokenizer": (own(model="./bad_tokenizer"), {}, "cannot be loaded with its tokenizer"),
    "a model that cannot end": (own(model="./endless"), {}, "the model has no EOS"),
    "weights that are noise": (own(model="./noise"), {}, "is damaged or cut off"),
    "weights that lack a tensor": (
        own(model="@/lacking"),
        {},
        "its files have no model.layers.0.input_layernorm.weight, which LlamaForCausalLM needs",
    ),
    "weights that lack a head": (own(model="@/headless"), {}, "its files have no lm_head.weight, which Llama"),
    "weights that are no numbers": (
        own(model="@/broken"),
        {},
        "1 of its 11 tensors hold NaN or infinite numbers (model.norm.weight)",
    ),
    "another vocabulary than the config's": (
        own(model="@/vocabulary"),
        {},
        "model.embed_tokens.weight has the shape [40, 32] in its files, and [47, 32] by config.json (vocab_size=47)",
    ),
    "a tokenizer beyond the embedding": (
        own(model="@/longer"),
        {},
        "tokens that its embedding of 40 rows has none for: 'new0' (id 40), 'new1' (id 41), 'new2' (id 42) and 2 more",
    ),
    "a model that is a file": (own(model="./m.gguf"), {"m.gguf": "GGUF"}, "m.gguf': that is a file, not a folder"),
    "a model that is not shipped": (own(model="tba:nothing"), {}, "is not shipped with the package"),
    "a model without a config": (
        own(model="./m"),
        {"m/readme.txt": "x"},
        "m' cannot be loaded: the folder has no config.json. Give",
    ),
    "a folder of the hub's cache": (
        own(model="./models--a--b"),
        {"models--a--b/snapshots/0a1b/config.json": "{}"},
        "models--a--b/snapshots/0a1b has one. Give a folder with config.json",
    ),
    "a file of a checkpoint to go on from": (
        ["runs/kept/checkpoints/step-1/manifest.json", "--resume"],
        {},
        "step-1/manifest.json is a file: `tba train runs/kept/checkpoints/step-1 --resume` goes on from its folder",
    ),
    "a model with a broken config": (own(model="./m"), {"m/config.json": "{"}, "cannot be loaded"),
    "weights that are cut off": (own(model="./cut"), {}, "cannot be loaded"),
    "imports that are not there": (
        [*PROBLEM, "replay.imports=[no.jsonl]"],
        {},
        "replay.imports: file no.jsonl does not",
    ),
    "imports that are no JSON": (*imported("x\n"), "has 1 bad lines, so nothing was imported"),
    "imports of another task": (*imported('{"prompt": "what", "completion": "w5"}\n'), "none of the task's"),
    "a task file that is not there": (["task.name=t.py:T"], {}, "t.py does not exist"),
    "a task file that is no Python": (["task.name=t.py:T"], {"t.py": "class T(:\n"}, "t.py:1 failed: SyntaxError"),
    "a task file that exits": (["task.name=t.py:T"], {"t.py": "import sys\nsys.exit()\n"}, "t.py:2 failed: SystemExit"),
}
RUNS = {
    "a reward whose error has half a character": (
        *rewards("def f(completions): raise ValueError('\\ud83d')\n"),
        "r.py:1: ValueError: \\ud83d",
    ),
    "a reward that returns nothing": (
        *rewards("def f(completions): pass\n"),
        "returned a NoneType: it must return a list, one number per completion",
    ),
    "a reward of one value": (*rewards("def f(completions): return [1.0]\n"), "tba: f failed ("),
    "a reward that is always None": (
        *rewards("def f(completions): return [None] * len(completions)\n"),
        "every reward was None (not applicable) for 100 samples in a row",
    ),
    "a reward that always raises": (*rewards("def f(completions): raise KeyError('a')\n"), "r.py:1: KeyError: 'a'"),
    "a reward that always raises, in small steps": (
        [*own(reward="r.py:f"), "train.responses_per_step=4"],
        {"r.py": "def f(completions): raise KeyError('a')\n"},
        "20 searches in a row brought no response with a reward; the last: f failed at",
    ),
    "a reward that raises a book": (
        *rewards("def f(completions): raise ValueError('y\\n' * 10**6)\n"),
        "more characters",
    ),
    "a reward that exits": (*rewards("def f(completions): raise SystemExit(3)\n"), "r.py:1: SystemExit: 3"),
    "a reward that is no function": (*rewards("f = 3\n"), "has no function 'f'; it has none"),
    "a reward that imports nothing later": (
        *rewards("print()\nimport nowhere_at_all\n" + GOOD),
        "r.py:2 failed: ModuleNotFoundError",
    ),
    "a reward that is cancelled": (
        *rewards("import asyncio\nasync def f(**_): raise asyncio.CancelledError\n"),
        "r.py:2: CancelledError",
    ),
    "a reward without an order": (
        *rewards("def f(completions): return set(map(float, range(len(completions))))\n"),
        "returned a set: it must return a list",
    ),
    "a pattern of layers that is none": (
        [*PROBLEM, "model.lora={targets: '(('}"],
        {},
        "model.lora.targets='((' does not fit LlamaForCausalLM: missing ), unterminated",
    ),
    "a reward whose values have no end": (
        *rewards("from itertools import repeat\ndef f(**_): return repeat(1.0)\n"),
        "returned 5 values for 4 completions",
    ),
    "a reward of verl without a score": (
        *rewards("def f(data_source, solution_str, ground_truth=None): return {'acc': 1}\n"),
        "returned a dict with acc: it must have `score`",
    ),
    "an environment that is made of something": (
        ["model.path=@/model", "--environment", "g.py:G", "name=g-g-tb-seed0"],
        {"g.py": "class G:\n    def __init__(self, level): 0\n    def reset(self): 0\n    def step(self, text): 0\n"},
        "environment G asks for level to be made, and it gets no arguments: give defaults",
    ),
    "a tool for a model without a chat template": (
        [*PROBLEM, "--tools", "t.py:t"],
        {"t.py": 'def t():\n    """Do it."""\n'},
        "has no chat template, which tools need: use a chat model",
    ),
    "a reward that kills its process": (*rewards("import os\ndef f(**_): os._exit(7)\n"), "died (exit status 7)"),
}
COMMANDS = {
    "a run without a checkpoint": (
        ["evaluate", "r"],
        {"r/config.yaml": "seed: 1\n"},
        "run folder r has no checkpoint yet",
    ),
    "a checkpoint that is half written": (
        ["evaluate", "r"],
        {
            "r/config.yaml": "seed: 1\n",
            "r/checkpoints/step-3/tokenizer.json": "{}",
            "r/checkpoints/.step-9.partial/x": "",
        },
        "run folder r has no checkpoint yet",
    ),
    "a checkpoint whose weights are gone": (
        ["evaluate", "r"],
        {
            "r/config.yaml": "seed: 1\n",
            "r/checkpoints/step-3/tokenizer.json": "{}",
            "r/checkpoints/step-3/manifest.json": "{}",
        },
        "r/checkpoints/step-3' cannot be loaded",
    ),
    "a run with a broken config": (
        ["evaluate", "r"],
        {"r/config.yaml": "train: {max_steps: x}\n", "r/checkpoints/step-3/manifest.json": ""},
        "train.max_steps",
    ),
    "a run whose config is empty": (
        ["evaluate", "r"],
        {"r/config.yaml": "", "r/checkpoints/step-3/manifest.json": ""},
        "r/config.yaml is empty: copy it again",
    ),
    "a model to evaluate that is not there": (["evaluate", "./nowhere"], {}, "there is no such folder"),
    "a run to evaluate that is not there": (
        ["evaluate", "runs/their"],
        {},
        "'runs/their' is no run folder: there is no such folder (the nearest is runs/there)",
    ),
    "a file to evaluate": (["evaluate", "file.txt"], {}, "file.txt is a file: give the folder of a run or a model"),
    "a model to evaluate that is cut off": (["evaluate", "./cut", "--task", "arithmetic"], {}, "cannot be loaded"),
    "a model to evaluate on nothing": (["evaluate", "./cut"], {}, "what ./cut is to be evaluated on"),
    "an adapter that is not there": (["merge", "nowhere", "out"], {}, "there is no folder nowhere: give a LoRA"),
    "an adapter that is none": (["merge", "@/model", "out"], {}, "holds no LoRA adapter"),
    "something that cannot be prepared": (["prepare", "nothing"], {}, "has nothing to prepare"),
    "a merged model that is a file": (
        ["merge", "adapter", "file.txt"],
        {},
        "file.txt is a file, not a folder: give a new",
    ),
    "an adapter whose config is no JSON": (
        ["merge", "a", "out"],
        {"a/adapter_config.json": "{"},
        "cannot be read as the config of an adapter",
    ),
    "a prepared folder that is a file": (
        ["prepare", "reward_model", "--model", "m", "--pairs", "p.jsonl", "--output", "file.txt"],
        {},
        "file.txt is a file, not a",
    ),
    "a study whose output is a file": (
        ["compare", "s.yaml", "--output", "file.txt"],
        {"s.yaml": STUDY.format("accuracy")},
        "file.txt is a file, not a folder",
    ),
    "a status that is a list": (["status", "r"], {"r/status.json": "[]"}, "r/status.json is damaged (TypeError"),
    "a status that was never": (["status", "r"], {"r/status.json": STATUS % ("1e999", "")}, "r/status.json is damaged"),
    "a status of texts": (
        ["status", "r"],
        {"r/status.json": STATUS % ("5.0", '"trainer"')},
        "r/status.json is damaged",
    ),
    "a status that began at a word": (
        ["status", "r"],
        {"r/status.json": STATUS.replace("{", '{"started": "then", ', 1) % ("5.0", "")},
        "r/status.json is damaged (a value is of another type)",
    ),
    "a run to stop that never was": (
        ["stop", "r"],
        {"r/status.json": STATUS % ("5.0", "")},
        "r does not run: it ended",
    ),
    "a model without layers, examined": (["doctor", "./flat"], {}, "its config.json has num_hidden_layers=0"),
    "a model to examine as an option": (["doctor", "--model", "m"], {}, "no option --model: write `tba doctor MODEL`"),
    "a study that waits for less than nothing": (
        ["compare", "s.yaml", "--wait-seconds", "-1"],
        {"s.yaml": STUDY.format("accuracy")},
        "--wait-seconds: -1 is below 0",
    ),
    "a status that is cut off": (
        ["status", "r"],
        {"r/status.json": '{"pid": 1'},
        "r/status.json is damaged (JSONDecode",
    ),
    "a status that lacks a key": (
        ["stop", "r"],
        {"r/status.json": "{}"},
        "r/status.json is damaged (KeyError: 'host')",
    ),
    "a model without a config, examined": (["doctor", "runs"], {}, "cannot be read: the folder has no config.json. "),
    "a model with heads of zero, examined": (
        ["doctor", "./headless_attention"],
        {},
        "cannot be read: ZeroDivisionError",
    ),
    "two runs to compare": (["compare", "a", "b"], {}, "argument(s) (b): write `tba compare STUDY.yaml`."),
    "a study that is not there": (["compare", "nowhere.yaml"], {}, "nowhere.yaml"),
}
CASES = [
    *(pytest.param(arguments, {}, message, False, id=name) for name, (arguments, message) in CONFIGS.items()),
    *(pytest.param(*case, False, id=name) for name, case in FILES.items()),
    *(pytest.param(*case, True, id=name) for name, case in RUNS.items()),
    *(pytest.param(*case, False, id=name) for name, case in COMMANDS.items()),
]


def damaged(folder, model, changes) -> None:
    """A copy of the tiny model with some of its files changed; None = the file is missing."""
    model.mkdir()
    for path in (folder / "model").iterdir():
        change = changes.get(path.name, bytes)
        if change is not None:
            (model / path.name).write_bytes(change(path.read_bytes()))


def changed(**values):
    return lambda content: json.dumps({**json.loads(content), **values}).encode()


@pytest.fixture(scope="module", autouse=True)
def other_models(folder):
    """Models that are no decoder-only language models: their config is looked at before their weights."""
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(folder / "bert")
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(folder / "t5")


@pytest.fixture(scope="module", autouse=True)
def damaged_models(folder):
    weights = load_file(folder / "model" / "model.safetensors")
    lacking = {name: tensor for name, tensor in weights.items() if "input_layernorm" not in name}
    broken = {**weights, "model.norm.weight": weights["model.norm.weight"] / 0}
    whole = {name: tensor.char() for name, tensor in weights.items()}
    imaginary = {name: tensor + 0j for name, tensor in weights.items()}
    for name, tensors in (("lacking", lacking), ("broken", broken), ("whole", whole), ("complex", imaginary)):
        damaged(folder, folder / name, {"model.safetensors": lambda _, own=tensors: save(own, {"format": "pt"})})
    damaged(folder, folder / "vocabulary", {"config.json": changed(vocab_size=47)})
    damaged(folder, folder / "headless", {"config.json": changed(tie_word_embeddings=False)})
    damaged(folder, folder / "longer", {})
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_tokens([f"new{number}" for number in range(5)])
    tokenizer.save_pretrained(folder / "longer")


def prepare(folder, here) -> None:
    """What some of the cases find: a file, a folder of somebody's, one in use, and a model whose weights are cut off."""
    (here / "file.txt").write_text("mine")
    (here / "away").symlink_to("gone")
    os.mkfifo(here / "pipe")
    (here / "packed.jsonl").write_bytes(gzip.compress(ROW.encode()))
    (here / "utf16.jsonl").write_bytes(ROW.encode("utf-16"))
    (here / "adapter").mkdir()
    (here / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": f"{folder}/model"}))
    (here / "runs" / "there").mkdir(parents=True)
    (here / "runs" / "there" / "notes.txt").write_text("mine")
    (here / "runs" / "used").mkdir()
    Claim.take(here / "runs" / "used")
    for name in ("mixed", "kept"):
        (here / "runs" / name / "checkpoints" / "step-1").mkdir(parents=True)
        (here / "runs" / name / "config.yaml").write_text("seed: 1\n")
        (here / "runs" / name / "checkpoints" / "step-1" / "manifest.json").write_text('{"files": {}}')
    (here / "runs" / "mixed" / "notes.txt").write_text("mine")
    (here / "runs" / "kept" / "checkpoints" / "step-1" / "mine.txt").write_text("mine")
    damaged(folder, here / "cut", {"model.safetensors": lambda content: content[:1000]})
    damaged(folder, here / "pointer", {"model.safetensors": lambda content: LFS.encode()})
    damaged(folder, here / "noise", {"model.safetensors": lambda content: b"\xff" * 5000})
    damaged(folder, here / "bad_tokenizer", {"tokenizer.json": lambda content: b"{"})
    damaged(folder, here / "no_tokenizer", {"tokenizer.json": None, "tokenizer_config.json": None})
    heads = {"config.json": changed(architectures=["LlamaForSequenceClassification"])}
    damaged(folder, here / "classifier", heads)
    for name, template in (
        ("strict", "{{ raise_exception('no') }}"),
        ("open", "{% for m in messages %}{{ m.content }"),
        ("divides", "{{ 1 // 0 }}"),
    ):
        damaged(folder, here / name, {"tokenizer_config.json": changed(chat_template=template)})
    wordless = {"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"}
    gap = json.loads((folder / "model" / "tokenizer.json").read_text())["model"]
    gap["vocab"]["w7"] = 5000
    damaged(folder, here / "gap", {"tokenizer.json": changed(model=gap)})
    damaged(folder, here / "flat", {"config.json": changed(num_hidden_layers=0)})
    damaged(folder, here / "wordless", {"tokenizer.json": changed(model=wordless)})
    damaged(folder, here / "headless_attention", {"config.json": changed(num_attention_heads=0)})
    damaged(folder, here / "three_heads", {"config.json": changed(num_attention_heads=3)})
    damaged(folder, here / "worded", {"config.json": changed(vocab_size="40")})
    damaged(folder, here / "worded_end", {"generation_config.json": changed(eos_token_id="</s>")})
    damaged(folder, here / "ungenerated", {"generation_config.json": lambda content: b"{"})
    damaged(folder, here / "pickled", {"model.safetensors": None})
    (here / "pickled" / "pytorch_model.bin").write_bytes(b"garbage")
    ends = {"config.json": changed(eos_token_id=None), "generation_config.json": changed(eos_token_id=None)}
    damaged(folder, here / "endless", {**ends, "tokenizer_config.json": changed(eos_token=None)})


def contents(here) -> dict[str, bytes]:
    """All files and folders by their path, with what the files hold."""
    paths = [path for path in here.rglob("*") if "__pycache__" not in path.parts]
    return {str(path.relative_to(here)): path.read_bytes() if path.is_file() else b"" for path in paths}


@pytest.mark.parametrize(("arguments", "files", "message", "begins"), CASES)
def test_a_bad_input_is_told_in_words_and_leaves_nothing(
    folder, tmp_path, monkeypatch, capfd, arguments, files, message, begins
):
    prepare(folder, tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        prompt = json.loads((folder / "data.jsonl").read_text().splitlines()[0])["prompt"]
        (tmp_path / name).write_text(text.replace("@", prompt) if name == "i.jsonl" else text)
    before = contents(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = [argument.replace("@", str(folder)) for argument in arguments]
    command = (
        arguments
        if arguments[0] in ("evaluate", "merge", "prepare", "compare", "status", "stop", "doctor")
        else ["train", *with_settings(*arguments, base=BASE)]
    )
    monkeypatch.setattr(sys, "argv", ["tba", *command])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capfd.readouterr()
    assert ended.value.code not in (0, None)
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert len(printed.err.splitlines()) <= 6  # an error, and the warnings at 1, 10 and 100 lost samples
    assert printed.out == ""
    now = contents(tmp_path)
    assert {name: now.get(name) for name in before} == before  # nothing is lost
    left = now.keys() - before.keys()
    # A reward is called when the run has begun: then its folder stays, with the logs.
    assert not {path for path in left if not begins or not re.match(r"runs/[a-z]+-[a-z]+-tb-seed0", path)}


def test_the_table_has_sixty_cases_or_more():
    assert len(CASES) >= 60


def test_what_is_wrong_with_the_config_the_output_or_the_reward_is_told_before_torch_is_imported(folder, tmp_path):
    """One process for all: torch takes longer to import than all of these together."""
    (tmp_path / "runs" / "there").mkdir(parents=True)
    (tmp_path / "runs" / "there" / "notes.txt").write_text("mine")
    (folder / "rewards.csv").write_text("prompt,want\nw5,w7\n")
    code = (
        "import json, sys; from tba.cli import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['tba', 'train', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as ended: print(ended.code, 'torch' in sys.modules)\n"
    )
    cases = [
        ["train.max_step=1"],
        ["nowhere.yaml"],
        ["name=there"],
        ["output=/proc/sys"],
        ["observe.sinks=[wandb]"],
        ["--data", f"{folder}/data.jsonl", "--reward", "no.py:f"],
        ["--data", "no.jsonl", "--reward", f"{folder}/rewards.py:sevens"],
        ["replay.imports=[no.jsonl]"],
        ["--data", f"{folder}/rewards.csv", "--reward", f"{folder}/rewards.py:sevens"],
    ]
    command = [sys.executable, "-c", code, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines() == ["2 False"] * len(cases), done.stderr
