"""The fields that a switch from TRL is measured by, written down before the first of them was translated: those that
GRPOConfig of TRL 1.16 adds to TrainingArguments, and those of TrainingArguments that GRPO scripts use."""

OF_GRPO = """
    model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 num_generations
    num_generations_eval max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of
    generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs
    repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode
    vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
    vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta num_iterations epsilon delta
    epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
    importance_sampling_level reward_weights multi_objective_aggregation scale_rewards loss_type mask_truncated_completions
    sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy
    entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
    vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal
    num_completions_to_print log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching
    transformers_continuous_batching_config use_transformers_paged vllm_importance_sampling_cap
""".split()  # noqa: SIM905
OF_SCRIPTS = """
    output_dir run_name seed max_steps num_train_epochs per_device_train_batch_size gradient_accumulation_steps learning_rate
    lr_scheduler_type warmup_ratio warmup_steps weight_decay max_grad_norm bf16 fp16 optim adam_beta1 adam_beta2 adam_epsilon
    gradient_checkpointing logging_steps save_strategy save_steps save_total_limit eval_strategy eval_steps eval_on_start
    load_best_model_at_end metric_for_best_model remove_unused_columns push_to_hub disable_tqdm report_to use_cpu
    resume_from_checkpoint
""".split()  # noqa: SIM905
FIELDS = OF_GRPO + OF_SCRIPTS
