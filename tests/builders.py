"""Small real things for tests: a random Llama, a ragged batch."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tba.types import Batch, Completion, Totals

VOCABULARY = 40


def tiny_llama(seed: int = 0, **overrides) -> LlamaForCausalLM:
    """A random Llama of a few thousand parameters with grouped-query attention."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | overrides))).eval()


def ragged_batch(P: int = 3, K: int = 4, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """Random prompts of 2 to 6 tokens and responses of 1 to 9, with random rewards and reference log-probs."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    lengths = integers(1, 10, P * K)
    N = int(lengths.sum())
    reward_PK = integers(0, 2, P, K).to(dtype)
    return Batch(
        prompt_ids=tuple(f"p{p}" for p in range(P)),
        prompt_tokens=tuple(integers(3, VOCABULARY, int(integers(2, 7, 1))) for _ in range(P)),
        token_ids_N=integers(3, VOCABULARY, N),
        offsets=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
        loss_mask_N=torch.ones(N, dtype=torch.bool),
        log_ref_N=-torch.rand(N, generator=generator, dtype=dtype) * 3,
        behaviour_N=-torch.rand(N, generator=generator, dtype=dtype) * 3,
        policy_N=-torch.rand(N, generator=generator, dtype=dtype) * 3,
        rewards={"score": reward_PK.clone()},
        reward_PK=reward_PK,
        weight_PK=torch.ones(P, K, dtype=dtype),
        version_PK=torch.zeros(P, K, dtype=torch.long),
        truncated_PK=torch.zeros(P, K, dtype=torch.bool),
        rows_PK=torch.arange(P * K).view(P, K),
        totals=Totals(prompts=P, responses=P * K, tokens=N),
    )


def tiny_tokenizer():
    """Words w0 ... w39 for ids 0 ... 39."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def completion(prompt, index):
    """A response of one token."""
    zeros = np.zeros(1, np.float32)
    return Completion(
        prompt_id=prompt.id,
        sample_index=index,
        token_ids=np.array([3], np.int32),
        behaviour_log_probs=zeros,
        policy_log_probs=zeros,
        finish="stop",
        version_spans=((0, 1),),
    )
