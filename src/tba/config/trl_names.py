"""TRL's names, and what becomes of them here.

    SETTINGS    they set what stands beside them
    REFUSED     a ConfigError says what to use instead, unless the value is TRL's default or asks for nothing
    others      every other field of TRL's GRPOConfig is accepted; one warning lists those that were given

`docs/from_trl.md` has both tables. The fields of TRL's GRPOConfig are those of the installed transformers.TrainingArguments
and GRPO_DEFAULTS; a test compares them with the installed TRL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def _table(text: str) -> dict[str, str]:
    """One line for each name: `name  words`."""
    return dict(line.split(maxsplit=1) for line in text.strip().splitlines())


SETTINGS = _table("""
    output_dir                      output and name: the run folder itself, as in TRL
    run_name                        name, or observe.label where output_dir is given
    overwrite_output_dir            = overwrite; False = an earlier run is moved to OUTPUT_DIR/earlier-N
    seed                            = seed
    max_steps                       train.max_steps; -1 = by num_train_epochs
    num_train_epochs                train.max_steps, from the rows that are not held out and the prompts in a step
    per_device_train_batch_size     train.responses_per_step, x gradient_accumulation_steps x train.ranks
    gradient_accumulation_steps     train.responses_per_step, x per_device_train_batch_size (8 if unset)
    generation_batch_size           train.responses_per_step, where no batch size is given
    num_generations                 = train.samples_per_prompt
    num_generations_eval            = evaluate.samples_per_prompt
    num_iterations                  = train.updates_per_batch
    learning_rate                   train.learning_rate; unset = auto
    lr_scheduler_type               train.learning_rate.kind: constant, linear, cosine, warmup_stable_decay ...
    lr_scheduler_kwargs             train.learning_rate.end from min_lr or min_lr_rate, decay_steps from num_decay_steps
    warmup_steps                    train.learning_rate.warmup_steps; below 1 = share of the run
    warmup_ratio                    train.learning_rate.warmup_steps, as a share of the run
    optim                           AdamW over fp32 master weights; other optimizers are refused
    weight_decay                    = train.weight_decay
    max_grad_norm                   train.max_grad_norm; 0 = no clipping
    adam_beta1                      train.adam_betas[0]
    adam_beta2                      train.adam_betas[1]
    adam_epsilon                    = train.adam_epsilon
    bf16                            model.dtype: bfloat16, or float32 where it is False
    gradient_checkpointing          = train.gradient_checkpointing
    activation_checkpointing        = train.gradient_checkpointing
    torch_compile                   = train.compile
    use_cpu                         model.device=cpu
    trust_remote_code               = model.trust_remote_code
    model_init_kwargs               model.dtype and model.trust_remote_code; other keys by name
    save_steps                      train.checkpoint_every; below 1 = share of the run
    save_strategy                   train.checkpoint_every: none but the last, every save_steps, or every epoch
    save_total_limit                train.keep_checkpoints; unset = all
    eval_steps                      evaluate.every; below 1 = share of the run
    eval_strategy                   evaluate.every: both ends only, every eval_steps, or every epoch
    metric_for_best_model           evaluate.best_metric; eval_ before the name may stay
    greater_is_better               evaluate.best_metric: where it is False, with a minus before it
    load_best_model_at_end          trainer.model holds the best evaluation's weights after train()
    logging_steps                   how often eval_strategy="steps" evaluates without eval_steps; every step is logged
    logging_strategy                metrics.jsonl has every step; from step 10,000 on every tenth, whatever it says
    disable_tqdm                    the reverse of observe.progress
    report_to                       observe.sinks; tensorboard, wandb, or all that are installed
    resume_from_checkpoint          train() goes on from there
    push_to_hub                     the trained model is pushed when train() has ended
    hub_model_id                    name on the hub for push_to_hub
    hub_private_repo                whether push_to_hub makes a private repository
    hub_revision                    branch that push_to_hub writes to
    hub_token                       token for push_to_hub
    beta                            = objective.beta; 0 is refused for tb, whose target it shapes
    temperature                     = generate.temperature
    top_p                           = generate.top_p
    top_k                           = generate.top_k
    max_completion_length           = generate.max_new_tokens
    max_prompt_length               = task.max_prompt_tokens
    generation_kwargs               generate: temperature, top_p, top_k, max_new_tokens, min_new_tokens
    chat_template_kwargs            = task.chat_template_kwargs
    use_vllm                        generate.engine=vllm
    shuffle_dataset                 = search.shuffle
    loss_type                       objective.name; grpo and its kin, dr_grpo, or one of ours; unset = tb
    epsilon                         objective.clip, and objective.clip_high where the objective has one
    epsilon_high                    objective.clip_high, where the objective has one
    delta                           objective.max_ratio of grpo and dr_grpo
    importance_sampling_level       objective.ratio of grpo and dr_grpo: token or sequence
    off_policy_mask_threshold       objective.off_policy_mask of grpo and dr_grpo
    top_entropy_quantile            objective.top_entropy of grpo and dr_grpo
    scale_rewards                   objective.scale_rewards of grpo and dr_grpo: group or none; batch is refused
    reward_weights                  task.rewards[].weight
    max_tool_calling_iterations     = task.environment.max_turns
    mask_truncated_completions      train.truncated=drop
    sync_ref_model                  reference.reset_every=ref_model_sync_steps
    ref_model_sync_steps            reference.reset_every, with sync_ref_model
    ref_model_mixup_alpha           with sync_ref_model 1: the policy becomes the reference as it is
""")
"""Names that set something. With `=` the value is the setting's as it stands; the others are translated in trl/config.py."""
DIRECT = {name: meaning[2:].partition(";")[0] for name, meaning in SETTINGS.items() if meaning.startswith("= ")}
"""Settings of ours by the names whose value they take as it stands."""
REFUSED = _table("""
    fp16                            use bf16=True: fp32 master weights stand behind it, and it needs no loss scaling
    min_p                           use top_p or top_k
    repetition_penalty              sampled responses must be the policy's own: leave it at 1, or penalise in a reward
    vllm_mode                       vLLM runs in the searchers: leave it out, or place them with search={"devices": [...]}
    vllm_tensor_parallel_size       each searcher has one GPU: use search={"num_searchers": N} for more of them
    vllm_structured_outputs_regex   score the format in a reward
    sapo_temperature_neg            loss_type="sapo" has the 1.05 of its paper
    sapo_temperature_pos            loss_type="sapo" has the 1.0 of its paper
    vespo_k_pos                     loss_type="vespo" has the constants of its paper: 2.0 here
    vespo_lambda_pos                loss_type="vespo" has the constants of its paper: 3.0 here
    vespo_k_neg                     loss_type="vespo" has the constants of its paper: 3.0 here
    vespo_lambda_neg                loss_type="vespo" has the constants of its paper: 2.0 here
    multi_objective_aggregation     rewards are added up with reward_weights first
    entropy_coef                    the objectives have no entropy bonus: raise beta, or explore with search={"explore": ...}
    use_adaptive_entropy            the objectives have no entropy bonus: raise beta, or explore with search={"explore": ...}
    deepspeed                       use train={"ranks": N}, which shards by FSDP2
    fsdp                            use train={"ranks": N}, which shards by FSDP2
    fsdp_config                     use train={"ranks": N}, which shards by FSDP2
    neftune_noise_alpha             there is no noise on embeddings here
    optim_args                      AdamW has adam_beta1, adam_beta2, adam_epsilon and weight_decay
    optim_target_modules            AdamW trains all weights, or those of peft_config
""")
ARGUMENTS = _table("""
    model                           folder, hub name or model object
    reward_funcs                    functions, file.py:name, reward models by name or as objects
    args                            TBAConfig
    train_dataset                   rows, a file or a dataset, with `prompt`
    eval_dataset                    the same, but no dict; up to evaluate.num_prompts (500); unset = some train rows
    processing_class                tokenizer or its path
    reward_processing_classes       tokenizers of reward models
    callbacks                       transformers' TrainerCallback objects
    peft_config                     model.lora, from a LoraConfig
    tools                           task.environment.tools: functions that the policy may call, or file.py:name
    environment_factory             task.environment.classes: a class, or a dict of them by the column `environment`
    agent                           ours alone, task.environment.agent: a function that plays episodes by calls to the policy
""")
"""Arguments of GRPOTrainer."""
REFUSED_ARGUMENTS = _table("""
    optimizers                      the optimizer is AdamW: see learning_rate, adam_beta1, adam_beta2 and weight_decay
    quantization_config             weights are fp32 or bf16: use peft_config to save memory
    rollout_func                    the engine generates: give an environment_factory, or an environment with `step`
""")
_DEFAULTS = """
    learning_rate=1e-6 logging_steps=10 gradient_checkpointing=true bf16=null remove_unused_columns=false
    num_generations=8 max_completion_length=512 num_iterations=1 temperature=1.0 top_p=1.0 top_k=0 repetition_penalty=1.0
    beta=0.0 epsilon=0.2 loss_type="dapo" scale_rewards="group" top_entropy_quantile=1.0 importance_sampling_level="token"
    multi_objective_aggregation="sum_then_normalize" mask_truncated_completions=false shuffle_dataset=true
    sapo_temperature_neg=1.05 sapo_temperature_pos=1.0 vespo_k_pos=2.0 vespo_lambda_pos=3.0 vespo_k_neg=3.0
    vespo_lambda_neg=2.0 sync_ref_model=false ref_model_mixup_alpha=0.6 ref_model_sync_steps=512 entropy_coef=0.0
    use_adaptive_entropy=false entropy_coef_min=0.0 entropy_coef_max=1.0 entropy_coef_delta=0.005 entropy_target=0.2
    use_vllm=false vllm_mode="colocate" vllm_model_impl="vllm" vllm_server_host="0.0.0.0" vllm_server_port=8000
    vllm_server_timeout=240.0 vllm_group_port=51216 vllm_tensor_parallel_size=1 vllm_gpu_memory_utilization=0.3
    vllm_enable_sleep_mode=false vllm_importance_sampling_correction=true vllm_importance_sampling_mode="sequence_mask"
    vllm_importance_sampling_clip_max=3.0 ds3_gather_for_generation=true pad_to_multiple_of="auto" trust_remote_code=false
    disable_dropout=false cast_lm_head_to_fp32=false use_bias_correction_kl=true log_completions=false log_multimodal=true
    log_unique_prompts=false use_transformers_continuous_batching=false use_transformers_paged=false
    overwrite_output_dir=false
"""
_UNSET: list[tuple[Any, str]] = [
    (dict | str, "model_init_kwargs generation_kwargs chat_template_kwargs transformers_continuous_batching_config"),
    (int, "num_generations_eval generation_batch_size steps_per_generation vllm_max_model_length max_prompt_length"),
    (int, "max_tool_calling_iterations num_completions_to_print"),
    (float, "min_p delta epsilon_high router_aux_loss_coef off_policy_mask_threshold warmup_ratio"),
    (float, "vllm_importance_sampling_clip_min vllm_importance_sampling_cap"),
    (str, "cache_implementation vllm_server_base_url vllm_structured_outputs_regex log_completions_hub_repo"),
    (list[float], "reward_weights"),
    (bool, "activation_checkpointing"),
]
GRPO_DEFAULTS: dict[str, Any] = {name: json.loads(value) for name, value in re.findall(r"(\w+)=(\S+)", _DEFAULTS)}
"""Defaults of TRL's GRPOConfig that are not those of TrainingArguments."""
GRPO_UNSET: dict[str, Any] = {name: kind | None for kind, names in _UNSET for name in names.split()}
"""Types of those that are None there. overwrite_output_dir, max_prompt_length and warmup_ratio are of older versions."""

PLACES = {
    found[1]: name
    # Reversed: of several names of one setting the first in the table wins.
    for name, meaning in reversed(SETTINGS.items())
    if (found := re.match(r"(?:= )?([a-z_]+\.[a-z_.]+)(?:[;,]|$)", meaning))
}
PLACES |= {"model.path": "model", "model.lora": "peft_config", "task.rewards": "reward_funcs"}
PLACES |= {"task.data": "train_dataset", "task.eval_data": "eval_dataset"}
"""A script's names of our settings."""
COMMAND_LINE = {
    r"\boverwrite=true\b": "overwrite_output_dir=True",
    r"another name \(output_dir=\.\.\.\)|another name \(name=\.\.\.\)": "another output_dir",
    r"\boutput=\.\.\.": "output_dir=...",
    r"--resume\b": "resume_from_checkpoint=True",
    r"(?<![\w-])(checkpoints/)?step-(\d+)\b": r"checkpoint-\2",
}


def python_message(text: str) -> str:
    """A message with the names that a script uses: `train.samples_per_prompt=1` is `num_generations=1`."""
    # Phrases of the command line first, then every dotted setting that a script calls otherwise.
    for pattern, meaning in COMMAND_LINE.items():
        text = re.sub(pattern, meaning, text)
    return re.sub(r"\b[a-z_]+(?:\.[a-z_]+)+\b", lambda found: PLACES.get(found[0], found[0]), text)


@contextmanager
def with_python_messages() -> Iterator[None]:
    """Errors of the package use the names of a script."""
    try:
        yield
    except Exception as error:
        # In place: type, traceback and attributes of the error stay.
        if error.args and isinstance(error.args[0], str):
            error.args = (python_message(error.args[0]), *error.args[1:])
        raise
