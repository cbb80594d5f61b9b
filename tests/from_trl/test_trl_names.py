"""TRL's names mean here what they say, or are answered by name."""

import copy
import dataclasses
import inspect
import json
import logging
import pickle
from pathlib import Path

import pytest
from resolved import resolved
from transformers import HfArgumentParser, TrainingArguments
from trl_fields import FIELDS as COMMITTED

from tba import GRPOConfig, TBAConfig
from tba import trl as api
from tba.config import ConfigError, TrainConfig
from tba.config.trl_names import ARGUMENTS, DIRECT, REFUSED, REFUSED_ARGUMENTS, SETTINGS, python_message
from tba.trl.config import DEFAULTS

DOCUMENT = Path(__file__).parents[2] / "docs" / "from_trl.md"


def at(config, place: str):
    for part in place.split("."):
        config = config[int(part)] if part.isdigit() else getattr(config, part)
    return config


@pytest.mark.parametrize(
    ("given", "place", "value"),
    [
        ({"output_dir": "out/run1"}, "run_folder.name", "run1"),
        ({"output_dir": "~/out/run1"}, "output", Path.home() / "out"),
        ({"output_dir": "out/run1", "run_name": "label"}, "observe.label", "label"),
        ({"run_name": "label"}, "name", "label"),
        ({"max_steps": 7}, "train.max_steps", 7),
        ({"max_steps": -1}, "train.max_steps", 200),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}, "train.responses_per_step", 32),
        ({"gradient_accumulation_steps": 2}, "train.responses_per_step", 16),
        ({"per_device_train_batch_size": 8, "train": {"ranks": 2}}, "train.responses_per_step", 16),
        ({"generation_batch_size": 64}, "train.responses_per_step", 64),
        ({"num_generations": 6}, "train.responses_per_step", 126),
        ({"num_generations": 4}, "train.samples_per_prompt", 4),
        ({"num_iterations": 2}, "train.updates_per_batch", 2),
        ({"learning_rate": 1e-5}, "train.learning_rate.kind", "constant"),
        ({"learning_rate": 1e-5, "lr_scheduler_type": "linear"}, "train.learning_rate.end", 0.0),
        ({"learning_rate": 1e-5, "warmup_steps": 5}, "train.learning_rate.warmup_steps", 5),
        ({"learning_rate": 1e-5, "warmup_ratio": 0.1, "max_steps": 50}, "train.learning_rate.warmup_steps", 5),
        (
            {
                "learning_rate": 1e-5,
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            },
            "train.learning_rate.end",
            pytest.approx(1e-6),
        ),
        (
            {
                "learning_rate": 1e-5,
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 50},
            },
            "train.learning_rate.decay_steps",
            50,
        ),
        ({"adam_beta2": 0.95}, "train.adam_betas", (0.9, 0.95)),
        ({"eval_strategy": "steps", "logging_steps": 0.1, "max_steps": 100}, "evaluate.every", 10),
        ({"max_grad_norm": 0}, "train.max_grad_norm", None),
        ({"bf16": True}, "model.dtype", "bfloat16"),
        ({"bf16": False}, "model.dtype", "float32"),
        ({"use_cpu": True}, "model.device", "cpu"),
        ({"model_init_kwargs": {"torch_dtype": "bfloat16"}}, "model.dtype", "bfloat16"),
        ({"save_strategy": "no"}, "train.checkpoint_every", None),
        ({"save_steps": 25}, "train.checkpoint_every", 25),
        ({"save_strategy": "steps", "save_steps": 0.5, "max_steps": 40}, "train.checkpoint_every", 20),
        ({"save_total_limit": 3}, "train.keep_checkpoints", 3),
        ({"max_steps": 40}, "train.keep_checkpoints", 40),  # all
        ({"eval_strategy": "no"}, "evaluate.every", 0),
        ({"eval_strategy": "steps", "eval_steps": 10}, "evaluate.every", 10),
        ({"eval_strategy": "steps", "logging_steps": 5}, "evaluate.every", 5),
        ({"metric_for_best_model": "eval_reward"}, "evaluate.best_metric", "reward"),
        ({"metric_for_best_model": "kl", "greater_is_better": False}, "evaluate.best_metric", "-kl"),
        ({"disable_tqdm": True}, "observe.progress", False),
        ({"report_to": "none"}, "observe.sinks", ()),
        ({"report_to": ["tensorboard"]}, "observe.sinks", ("tensorboard",)),
        ({"use_vllm": True, "vllm_mode": "colocate"}, "generate.engine", "vllm"),
        ({"generation_kwargs": {"top_k": 5}}, "generate.top_k", 5),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "task.chat_template_kwargs", {"enable_thinking": False}),
        ({"shuffle_dataset": False}, "search.shuffle", False),
        ({"loss_type": "grpo"}, "objective.name", "grpo"),
        ({"loss_type": "dr_grpo", "beta": 0.0}, "objective.name", "dr_grpo"),
        ({"loss_type": "grpo", "epsilon": 0.1}, "objective.settings", {"clip": 0.1, "clip_high": 0.1}),
        ({"loss_type": "grpo", "epsilon_high": 0.3}, "objective.settings", {"clip_high": 0.3}),
        ({"loss_type": "ppo", "epsilon": 0.1}, "objective.settings", {"clip": 0.1}),
        ({"loss_type": "dapo", "delta": 4.0}, "objective.settings", {"aggregate": "tokens", "max_ratio": 4.0}),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            "objective.settings",
            {"aggregate": "tokens", "surrogate": "cispo", "clip_high": 5.0},
        ),
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.05}, "objective.settings", {"surrogate": "sapo"}),
        ({"loss_type": "luspo"}, "objective.name", "dr_grpo"),
        ({"loss_type": "dr_grpo", "scale_rewards": "group"}, "objective.settings", {"scale_rewards": True}),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, "objective.settings", {"ratio": "sequence"}),
        ({"mask_truncated_completions": True}, "train.truncated", "drop"),
        ({"sync_ref_model": True, "ref_model_sync_steps": 64}, "reference.reset_every", 64),
        ({}, "objective.name", "tb"),
    ],
)
def test_a_name_of_trl_sets_what_it_means(given, place, value):
    assert at(TBAConfig(**given).config, place) == value


def test_sections_of_ours_win_and_both_are_attributes():
    args = GRPOConfig("out/run", max_steps=5, learning_rate=1e-5, train={"max_steps": 9}, seed=3)
    assert (args.train.max_steps, args.seed, args.learning_rate, args.output_dir) == (9, 3, 1e-5, "out/run")
    assert (args.warmup_steps, args.eval_strategy) == (0, "no")  # TRL's defaults
    assert args.max_completion_length == args.generate.max_new_tokens  # what the run has, where it is one setting
    with pytest.raises(AttributeError, match="no attribute 'warmup'"):
        _ = args.warmup


def test_what_a_script_assigns_counts_as_given():
    args = GRPOConfig("out/run")
    args.model_init_kwargs = {"revision": "main", "attn_implementation": None, "dtype": "bfloat16"}  # TRL's grpo.py
    args.replay, args.num_generations = {"max_lag": 3}, 4
    assert (args.config.model.dtype, args.replay.max_lag, args.train.samples_per_prompt) == ("bfloat16", 3, 4)


def test_a_copy_of_the_arguments_has_all_of_them():
    args = GRPOConfig("out/run", reward_weights=[1.0, 0.5], num_train_epochs=2)
    for found in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert isinstance(found, GRPOConfig)
        assert (found.given, found.config) == (args.given, args.config)


def test_arguments_as_plain_data_are_those_given_and_those_we_set():
    args = TBAConfig("out/x", learning_rate=1e-5, reward_weights=[1, 0.5], replay={"max_lag": 3})
    plain = args.to_dict()
    assert (plain["learning_rate"], plain["num_generations"], plain["max_steps"]) == (1e-5, 8, -1)
    assert json.loads(args.to_json_string()) == plain
    assert args.to_sanitized_dict()["reward_weights"] == "[1, 0.5]"
    assert isinstance(args, TrainingArguments)


def parsed(*words: str, types=(GRPOConfig,), parser=HfArgumentParser):
    return parser(types).parse_args_into_dataclasses(list(words))[0]


def test_a_parser_makes_the_arguments_and_only_what_was_written_counts():
    args = parsed("--output_dir", "o", "--learning_rate", "1e-6", "--no_shuffle_dataset", "--reward_weights", "1", "2")
    assert args.given == {"output_dir": "o", "learning_rate": 1e-6, "shuffle_dataset": False, "reward_weights": [1, 2]}
    assert args.config.train.learning_rate.start == 1e-6  # written, though it is TRL's default
    assert parsed().config == TBAConfig().config
    assert parsed("--gradient_checkpointing").config.train.gradient_checkpointing
    assert parsed("--save_steps", "25").config.train.checkpoint_every == 25
    assert parsed("--generation_kwargs", '{"top_k": 5}').config.generate.top_k == 5
    assert "(default: dapo)" in " ".join(HfArgumentParser(GRPOConfig).format_help().split())


def test_a_copy_with_one_field_replaced_is_the_same_but_for_it(caplog):
    args = GRPOConfig("out/run", num_generations=4, learning_rate=1e-5)
    found = dataclasses.replace(args, seed=7)
    assert found.config == args.config.model_copy(update={"seed": 7})
    assert "those with TRL's default count as left out" in caplog.text


def test_a_section_may_be_given_as_an_object_and_says_only_what_was_set():
    args = TBAConfig(max_steps=5, train=TrainConfig(samples_per_prompt=4, responses_per_step=8))
    assert args.config == TBAConfig(max_steps=5, train={"samples_per_prompt": 4, "responses_per_step": 8}).config
    assert args.train.max_steps == 5


def test_epochs_become_steps_when_the_rows_are_known():
    args = TBAConfig(num_train_epochs=3, per_device_train_batch_size=16, num_generations=4, save_strategy="epoch")
    train = args.resolved(num_rows=10).train
    assert (train.max_steps, train.checkpoint_every) == (9, 3)
    assert args.resolved(num_rows=8).train.max_steps == 6
    assert TBAConfig(num_train_epochs=3, max_steps=5).resolved(num_rows=1000).train.max_steps == 5
    twice = TBAConfig(num_train_epochs=3, per_device_train_batch_size=16, num_generations=4, num_iterations=2)
    assert twice.resolved(num_rows=10).train.max_steps == 18  # each batch has two steps, and every row is drawn


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fp16": True}, "fp16=True cannot be kept: use bf16=True"),
        ({"sapo_temperature_neg": 2.0}, 'sapo_temperature_neg=2.0 cannot be kept: loss_type="sapo" has the 1.05'),
        (
            {"loss_type": "vespo", "vespo_k_pos": 0.0},
            'vespo_k_pos=0.0 cannot be kept: loss_type="vespo" has the constants',
        ),
        ({"min_p": 0.1}, "min_p=0.1 cannot be kept: use top_p"),
        ({"beta": 0.0}, "beta=0 cannot be kept for tb"),
        # Which beta that is depends on the objective and the length of responses.
        ({"beta": 0.0, "loss_type": "tb_learned_z", "max_completion_length": 256}, "Leave beta out, or use"),
        ({"optim": "adafactor"}, "optim='adafactor' cannot be kept: the optimizer is AdamW"),
        ({"deepspeed": "ds.json"}, "deepspeed='ds.json' cannot be kept: use train="),
        ({"vllm_mode": "server"}, "vllm_mode='server' cannot be kept"),
        ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2 cannot be kept"),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 1e-5}, "lr_scheduler_type='polynomial' cannot be kept"),
        (
            {"lr_scheduler_type": "cosine", "learning_rate": 1e-5, "lr_scheduler_kwargs": {"num_cycles": 2}},
            "lr_scheduler_kwargs of cosine: num_cycles=2 cannot be kept: it takes min_lr, min_lr_rate.",
        ),
        (
            {"learning_rate": 1e-5, "lr_scheduler_kwargs": {"min_lr": 1e-6}},
            "lr_scheduler_kwargs of constant: min_lr=1e-06 cannot be kept: it takes none.",
        ),
        ({"per_device_train_batch_size": 6, "num_generations": 4}, "6 responses of a step do not hold whole groups of"),
        ({"scale_rewards": "batch", "loss_type": "grpo"}, 'scale_rewards="batch" cannot be kept'),
        ({"sync_ref_model": True, "ref_model_mixup_alpha": 0.6}, "ref_model_mixup_alpha=0.6 cannot be kept"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "cannot be kept: rewards are added up"),
        ({"generation_kwargs": {"num_beams": 4}}, "generation_kwargs: num_beams=4 cannot be kept"),
        ({"model_init_kwargs": {"quantization_config": 1}}, "load the model yourself"),
        ({"lerning_rate": 1e-5}, "no argument lerning_rate: did you mean learning_rate?"),
        ({"warm_up": 1}, "docs/from_trl.md has TRL's names"),
        ({"loss_type": "orpo"}, "loss_type=orpo is unknown"),
        ({"num_generations": 1}, "num_generations must be at least 2 for tb, got 1"),
        ({"num_generations": 0}, "num_generations=0: a prompt needs 1 response at least"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_what_to_use_instead(given, words):
    with pytest.raises(ConfigError) as error:
        TBAConfig(**given)
    assert words in str(error.value)
    assert len(str(error.value).splitlines()) <= 3


@pytest.mark.parametrize(
    "given",
    [
        {"dataloader_num_workers": 4},
        {"vllm_server_port": 8001},
        {"epsilon": 0.2},
        {"scale_rewards": False},
        {"report_to": "trackio"},
        {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}},
        {"warmup_steps": 10},
        {"lr_scheduler_kwargs": {"min_lr": 1e-6}},
        {"lr_scheduler_type": "cosine", "learning_rate": "auto"},
        {"warmup_ratio": 0.1, "learning_rate": "auto"},
    ],
)
def test_what_has_no_meaning_is_told_once(given, caplog):
    with caplog.at_level(logging.WARNING):
        TBAConfig(**given).resolved(num_rows=10)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"ignored: {next(iter(given))}")
    assert "They concern TRL's own loop, or mean nothing for the objective tb" in caplog.text


def test_one_warning_lists_the_names_that_are_ignored(caplog):
    TBAConfig(dataloader_num_workers=4, per_device_eval_batch_size=2, log_multimodal=False, dataloader_pin_memory=True)
    (record,) = caplog.records
    names = "dataloader_num_workers, per_device_eval_batch_size, log_multimodal"
    assert record.getMessage().startswith(f"ignored: {names}. They concern")


def test_values_that_ask_for_nothing_are_accepted_for_every_name(caplog):
    for name in DEFAULTS.keys() - SETTINGS.keys():
        TBAConfig(**{name: None})
        TBAConfig(**{name: DEFAULTS[name]})
    TBAConfig(importance_sampling_level="token", top_entropy_quantile=1.0)
    assert not caplog.records


def test_all_committed_fields_are_known():
    assert set(COMMITTED) <= DEFAULTS.keys()
    assert SETTINGS.keys() | REFUSED.keys() <= DEFAULTS.keys()


def test_every_name_that_is_said_to_set_something_is_looked_at():
    folder = Path(api.__file__).parent
    code = "".join((folder / file).read_text() for file in ("config.py", "trainer.py"))
    looked_at = [name for name in SETTINGS if f'"{name}"' in code or f"args.{name}" in code]
    assert SETTINGS.keys() - DIRECT.keys() - set(looked_at) == set()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("train.samples_per_prompt=1 is too few", "num_generations=1 is too few"),
        ("set train.checkpoint_every for more.", "set save_steps for more."),
        (
            "choose another name (name=...), or replace it with overwrite=true.",
            "choose another output_dir, or replace it with overwrite_output_dir=True.",
        ),
        (
            "start without --resume, or from checkpoints/step-4",
            "start without resume_from_checkpoint=True, or from checkpoint-4",
        ),
        (
            "out/train.jsonl, best-step-4, observe.sinks has 'wandb'",
            "out/train.jsonl, best-step-4, report_to has 'wandb'",
        ),
    ],
)
def test_messages_have_the_names_of_a_script(words, wanted):
    assert python_message(words) == wanted


@pytest.mark.parametrize(("tokens", "beta"), [(64, 0.01), (256, 0.0025)])
def test_the_document_says_which_beta_there_is_without_one(tokens, beta):
    words = " ".join(DOCUMENT.read_text().split())
    assert "without `beta` it is 0.01, or 0.64 / `max_completion_length` beyond 64 tokens" in words
    found = resolved(TBAConfig(max_completion_length=tokens).config).objective
    assert found.beta.start == pytest.approx(beta)
    assert f"beta x KL is kept below {found.max_kl_penalty:g}." in words
    assert resolved(TBAConfig(beta=0.01).config).objective.max_kl_penalty is None


def test_the_document_has_every_name_with_what_becomes_of_it():
    refused = {name: f"refused: {words}" for name, words in REFUSED_ARGUMENTS.items()}
    names = [*SETTINGS.items(), *REFUSED.items(), *ARGUMENTS.items(), *refused.items()]
    rows = [f"| `{name}` | {words.removeprefix('= ')} |" for name, words in names]
    found = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    assert found == rows


def test_the_table_knows_every_name_of_the_installed_trl():
    trl = pytest.importorskip("trl", reason="the extra `benchmark` is not installed")
    plain = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    plain = {name: default for name, default in plain.items() if default is not dataclasses.MISSING}
    assert {name: DEFAULTS.get(name, "unknown") for name in plain} == plain, (
        "TRL has other fields: see tba/config/trl_names.py"
    )
    arguments = inspect.signature(trl.GRPOTrainer.__init__).parameters.keys() - {"self"}
    assert arguments <= ARGUMENTS.keys() | REFUSED_ARGUMENTS.keys()


def test_trls_own_parser_makes_the_arguments_beside_its_other_dataclasses(tmp_path):
    pytest.importorskip("trl", reason="the extra `benchmark` is not installed")
    from tba import ModelConfig, ScriptArguments, TrlParser

    (tmp_path / "recipe.yaml").write_text("learning_rate: 1.0e-6\nmax_steps: 5\nmodel_init_kwargs: {dtype: bfloat16}\n")
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    words = [
        "--config",
        str(tmp_path / "recipe.yaml"),
        "--dataset_name",
        "d",
        "--model_name_or_path",
        "m",
        "--max_steps",
        "7",
    ]
    script, args, model = parser.parse_args_and_config(words)
    assert (script.dataset_name, model.model_name_or_path) == ("d", "m")
    assert args.given == {"learning_rate": 1e-6, "max_steps": 7, "model_init_kwargs": {"dtype": "bfloat16"}}
