"""Every name of TRL's GRPOConfig and GRPOTrainer, and what becomes of it here.

    setting      it sets what stands beside it
    implied      what it asks for is always so here, or follows from another setting; nothing is said
    no meaning   it is accepted with one warning that says why it does nothing
    refused      a ConfigError names what to use instead

A value that asks for nothing (None, TRL's own "off") is accepted for every name. `docs/from_trl.md` is this table; a test
compares it with the installed TRL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["setting", "implied", "no meaning", "refused"]


@dataclass(frozen=True)
class Name:
    """What becomes of a name. Name("setting", "train.max_steps")"""

    kind: Kind
    words: str
    """The setting behind it and how it is translated; or why it is implied, has no meaning, or what to use instead."""
    off: tuple[Any, ...] = (None,)
    """Values that ask for nothing."""


def _names(kind: Kind, text: str, off: tuple[Any, ...] = (None,)) -> dict[str, Name]:
    """One line for each: `name  words`."""
    lines = [line.split(maxsplit=1) for line in text.strip().splitlines()]
    return {name: Name(kind, words, off) for name, words in lines}


OFF = (None, False, "", 0, 0.0, "no")

FIELDS: dict[str, Name] = {
    **_names(
        "setting",
        """
        output_dir                      output and name: the run folder itself, as in TRL
        run_name                        name, or observe.label where output_dir is given
        overwrite_output_dir            overwrite
        seed                            seed
        max_steps                       train.max_steps; -1 = by num_train_epochs
        num_train_epochs                train.max_steps, from the rows that are not held out and the prompts in a step
        per_device_train_batch_size     train.responses_per_step, x gradient_accumulation_steps x train.ranks
        gradient_accumulation_steps     train.responses_per_step, x per_device_train_batch_size (8 if unset)
        generation_batch_size           train.responses_per_step, where no batch size is given
        num_generations                 train.samples_per_prompt
        num_generations_eval            evaluate.samples_per_prompt
        num_iterations                  train.updates_per_batch
        learning_rate                   train.learning_rate; unset = auto
        lr_scheduler_type               train.learning_rate.kind: constant, linear, cosine, warmup_stable_decay ...
        lr_scheduler_kwargs             train.learning_rate.end from min_lr or min_lr_rate, decay_steps from num_decay_steps
        warmup_steps                    train.learning_rate.warmup_steps; below 1 = share of the run
        warmup_ratio                    train.learning_rate.warmup_steps, as a share of the run
        weight_decay                    train.weight_decay
        max_grad_norm                   train.max_grad_norm; 0 = no clipping
        adam_beta1                      train.adam_betas[0]
        adam_beta2                      train.adam_betas[1]
        adam_epsilon                    train.adam_epsilon
        bf16                            model.dtype: bfloat16, or float32 where it is False
        gradient_checkpointing          train.gradient_checkpointing
        torch_compile                   train.compile
        use_cpu                         model.device=cpu
        trust_remote_code               model.trust_remote_code
        model_init_kwargs               model.dtype and model.trust_remote_code; other keys by name
        save_strategy                   train.checkpoint_every: none but the last, every save_steps, or every epoch
        save_steps                      train.checkpoint_every; below 1 = share of the run
        save_total_limit                train.keep_checkpoints
        eval_strategy                   evaluate.every: both ends only, every eval_steps, or every epoch
        do_eval                         evaluate.every: both ends only where it is False
        eval_steps                      evaluate.every; below 1 = share of the run
        metric_for_best_model           evaluate.best_metric; eval_ before the name may stay
        greater_is_better               evaluate.lower_is_better
        load_best_model_at_end          trainer.model holds the best evaluation's weights after train()
        logging_steps                   observe.log_every; lines are means over the steps between
        logging_strategy                observe.log_every: no = at the end only, epoch = once an epoch
        log_completions                 observe.samples_every=logging_steps: samples.jsonl
        disable_tqdm                    observe.progress
        report_to                       observe.sinks: tensorboard, wandb
        resume_from_checkpoint          train() goes on from there
        push_to_hub                     the trained model is pushed when train() has ended
        hub_model_id                    name on the hub for push_to_hub
        hub_private_repo                whether push_to_hub makes a private repository
        hub_revision                    branch that push_to_hub writes to
        hub_token                       token for push_to_hub
        beta                            objective.beta; 0 is refused for tb, whose target it shapes
        temperature                     generate.temperature
        top_p                           generate.top_p
        top_k                           generate.top_k
        max_completion_length           generate.max_new_tokens
        max_prompt_length               task.max_prompt_tokens
        generation_kwargs               generate: temperature, top_p, top_k, max_new_tokens, min_new_tokens
        chat_template_kwargs            task.chat_template_kwargs
        use_vllm                        generate.engine=vllm
        vllm_mode                       colocate = vLLM in the searcher's process; server is refused
        vllm_tensor_parallel_size       1; more is refused: searchers are many, each on one GPU
        shuffle_dataset                 search.shuffle
        loss_type                       objective.name: grpo and its kin, dr_grpo, or one of ours; unset = tb
        epsilon                         objective.clip_low and clip_high, or objective.clip, where the objective has a ratio
        epsilon_high                    objective.clip_high, where the objective has one
        delta                           objective.max_ratio of grpo and dr_grpo
        importance_sampling_level       objective.ratio of grpo and dr_grpo: token or sequence
        sapo_temperature_neg            objective.sapo_temperature_neg, with loss_type="sapo"
        sapo_temperature_pos            objective.sapo_temperature_pos, with loss_type="sapo"
        vespo_k_pos                     objective.vespo_k_pos, with loss_type="vespo"
        vespo_lambda_pos                objective.vespo_lambda_pos, with loss_type="vespo"
        vespo_k_neg                     objective.vespo_k_neg, with loss_type="vespo"
        vespo_lambda_neg                objective.vespo_lambda_neg, with loss_type="vespo"
        off_policy_mask_threshold       objective.off_policy_mask of grpo and dr_grpo
        top_entropy_quantile            objective.top_entropy of grpo and dr_grpo
        scale_rewards                   objective.scale_rewards of grpo and dr_grpo: group or none; batch is refused
        reward_weights                  task.rewards[].weight
        mask_truncated_completions      train.truncated=drop
        sync_ref_model                  reference.reset_every=ref_model_sync_steps
        ref_model_sync_steps            reference.reset_every, with sync_ref_model
        """,
    ),
    **_names(
        "implied",
        """
        do_train                        train() trains
        optim                           AdamW over fp32 master weights; other optimizers are refused
        eval_on_start                   the start model is always evaluated
        remove_unused_columns           all columns go to the rewards, none to the model
        disable_dropout                 dropout is always off
        cast_lm_head_to_fp32            logits go to fp32 before the soft-max
        gradient_checkpointing_kwargs   layers are recomputed without reentrance
        pad_to_multiple_of              batches are packed, not padded
        steps_per_generation            searchers generate all the time, without batches
        cache_implementation            the engine has a cache of its own
        vllm_max_model_length           the longest prompt and max_completion_length decide
        vllm_gpu_memory_utilization     what the trainer needs beside it decides
        vllm_enable_sleep_mode          trainer and searcher work at the same time: nobody sleeps
        vllm_importance_sampling_correction   the ratio is against the engine's own log-probs
        vllm_importance_sampling_mode         the same
        vllm_importance_sampling_clip_max     the same
        vllm_importance_sampling_clip_min     the same
        vllm_importance_sampling_cap          the same
        multi_objective_aggregation     weighted sum, then the group's mean; normalize_then_sum is refused
        ref_model_mixup_alpha           the policy becomes the reference as it is; a mixture is refused
        use_transformers_continuous_batching  the native engine refills free slots
        transformers_continuous_batching_config   the same
        use_transformers_paged          the same
        num_completions_to_print        samples.jsonl has the best and the worst response of a group
        log_unique_prompts              samples.jsonl has a prompt once per entry
        per_device_eval_batch_size      evaluations run in the engine's slots
        auto_find_batch_size            micro-batches are cut by a budget of tokens
        save_only_model                 weights stand beside the state: model.safetensors alone loads with from_pretrained
        save_on_each_node               the run folder is written once
        average_tokens_across_devices   sums are over all ranks
        logging_nan_inf_filter          a loss that is not finite stops the run
        bf16_full_eval                  evaluations use the engine's dtype
        tf32                            PyTorch's own setting holds
        use_cache                       training needs none, the engine has one
        torch_empty_cache_steps         memory is planned at the start
        local_rank                      ranks are numbered by who starts them
        skip_memory_metrics             memory is not traced
        """,
    ),
    **_names(
        "no meaning",
        """
        ds3_gather_for_generation       there is no DeepSpeed here
        vllm_model_impl                 vLLM chooses the implementation
        vllm_server_base_url            vLLM runs in the searcher, not as a server
        vllm_server_host                vLLM runs in the searcher, not as a server
        vllm_server_port                vLLM runs in the searcher, not as a server
        vllm_server_timeout             vLLM runs in the searcher, not as a server
        vllm_group_port                 vLLM runs in the searcher, not as a server
        log_multimodal                  prompts are text
        logging_first_step              lines are means over logging_steps, the first one too
        log_completions_hub_repo        samples stay in samples.jsonl; upload the run folder if you want
        router_aux_loss_coef            the loss is the objective's alone
        use_bias_correction_kl          the KL term has no ratio: TRL's False
        data_seed                       seed decides the order of prompts
        full_determinism                mode=sync repeats a run bit by bit on a CPU, with the same threads
        batch_eval_metrics              metrics are means over all prompts
        dataloader_drop_last            there is no data loader
        dataloader_in_order             there is no data loader
        dataloader_multiprocessing_context   there is no data loader
        dataloader_num_workers          there is no data loader
        dataloader_persistent_workers   there is no data loader
        dataloader_pin_memory           there is no data loader
        dataloader_prefetch_factor      there is no data loader
        train_sampling_strategy         search.shuffle decides the order of prompts
        length_column_name              prompts are not grouped by length
        ddp_backend                     ranks talk by NCCL or gloo
        ddp_broadcast_buffers           train.ranks shards by FSDP2
        ddp_bucket_cap_mb               train.ranks shards by FSDP2
        ddp_find_unused_parameters      train.ranks shards by FSDP2
        ddp_static_graph                train.ranks shards by FSDP2
        ddp_timeout                     runtime.wait_seconds is the deadline
        accelerator_config              there is no accelerate here
        parallelism_config              there is no accelerate here
        debug                           TBA_TRACEBACK=1 shows tracebacks
        do_predict                      call trainer.generate()
        eval_accumulation_steps         evaluations run in the engine's slots
        eval_delay                      evaluations begin with the start model
        eval_do_concat_batches          metrics are means over all prompts
        eval_use_gather_object          metrics are means over all prompts
        fp16_full_eval                  evaluations use the engine's dtype
        enable_jit_checkpoint           Ctrl-C and SIGTERM save
        hub_always_push                 push_to_hub pushes once, at the end
        hub_strategy                    push_to_hub pushes once, at the end
        ignore_data_skip                a resumed run goes on with the visits it had
        include_for_metrics             rewards see all columns
        include_num_input_tokens_seen   metrics.jsonl counts responses
        label_names                     rewards see all columns
        label_smoothing_factor          there are no labels
        log_level                       use Python's logging: logging.getLogger("tba")
        log_level_replica               use Python's logging: logging.getLogger("tba")
        log_on_each_node                each role has a log of its own in RUN/logs
        prediction_loss_only            evaluations are of rewards
        project                         WANDB_PROJECT names it
        restore_callback_states_from_checkpoint   callbacks begin anew
        torch_compile_backend           PyTorch's default compiler is used
        torch_compile_mode              PyTorch's default compiler is used
        trackio_space_id                there is no trackio sink: use tensorboard or wandb
        trackio_bucket_id               there is no trackio sink: use tensorboard or wandb
        trackio_static_space_id         there is no trackio sink: use tensorboard or wandb
        use_liger_kernel                the fused log-probs on CUDA are our own
        liger_kernel_config             the fused log-probs on CUDA are our own
        """,
        off=OFF,
    ),
    **_names(
        "refused",
        """
        fp16                            use bf16=True: fp32 master weights stand behind it, and it needs no loss scaling
        min_p                           use top_p or top_k
        repetition_penalty              sampled responses must be the policy's own: leave it at 1, or penalise in a reward
        vllm_structured_outputs_regex   score the format in a reward
        entropy_coef                    the objectives have no entropy bonus: raise beta, or explore with search.explore
        use_adaptive_entropy            the objectives have no entropy bonus: raise beta, or explore with search.explore
        entropy_coef_min                the objectives have no entropy bonus: raise beta, or explore with search.explore
        entropy_coef_max                the objectives have no entropy bonus: raise beta, or explore with search.explore
        entropy_coef_delta              the objectives have no entropy bonus: raise beta, or explore with search.explore
        entropy_target                  the objectives have no entropy bonus: raise beta, or explore with search.explore
        max_tool_calling_iterations     responses are single turns
        deepspeed                       use train={"ranks": N}, which shards by FSDP2
        fsdp                            use train={"ranks": N}, which shards by FSDP2
        fsdp_config                     use train={"ranks": N}, which shards by FSDP2
        neftune_noise_alpha             there is no noise on embeddings here
        optim_args                      AdamW has adam_beta1, adam_beta2, adam_epsilon and weight_decay
        optim_target_modules            AdamW trains all weights, or those of peft_config
        """,
        off=(*OFF, 1.0),
    ),
}
TRAINER_ARGUMENTS: dict[str, Name] = {
    **_names(
        "setting",
        """
        model                           folder, hub name or model object
        reward_funcs                    functions, file.py:name, reward models by name or as objects
        args                            TBAConfig
        train_dataset                   rows, a file or a dataset, with `prompt`
        eval_dataset                    the same, but no dict; up to evaluate.num_prompts (500); unset = some train rows
        processing_class                tokenizer or its path
        reward_processing_classes       tokenizers of reward models
        callbacks                       transformers' TrainerCallback objects
        peft_config                     model.lora, from a LoraConfig
        """,
    ),
    **_names(
        "refused",
        """
        optimizers                      the optimizer is AdamW: see learning_rate, adam_beta1, adam_beta2 and weight_decay
        quantization_config             weights are fp32 or bf16: use peft_config to save memory
        tools                           responses are single turns
        rollout_func                    responses are single turns: the engine generates them
        environment_factory             responses are single turns
        """,
        off=(None, (None, None), [], {}),
    ),
}
