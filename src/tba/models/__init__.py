"""The policy as the trainer runs it: loading, packing, attention, log-probs, LoRA, FSDP2 and published weights."""
