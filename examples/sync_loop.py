"""The whole method in one file: synchronous trajectory balance on problems with a checkable answer.

    python examples/sync_loop.py MODEL_FOLDER train.jsonl --steps 20

`python -m recipes arithmetic` writes such a folder and such a file (rows with `id`, `prompt`, `answer`). The library in
`mode=sync` samples the identical tokens and has the same losses; it adds speed, replay and asynchrony, not maths.

Per step: take P prompts, sample K responses each, score them, and pull log Z(x) = log_ref + r / beta - log_pi together
within each prompt. Axes: P prompts, K responses per prompt, T tokens, V vocabulary.
"""

import argparse
import copy
import hashlib
import json
import re
from functools import partial

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

MASK64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed, prompt_id, sample, position):
    """One number in (0, 1) per (seed, prompt, sample, position): no generator state, so nothing depends on batching."""
    digest = hashlib.blake2b(f"{seed}/{prompt_id}/{sample}".encode(), digest_size=8).digest()
    x = (int.from_bytes(digest, "little") + (position + 1) * GOLDEN) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64  # splitmix64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    x = x ^ (x >> 31)
    return ((x >> 40) + 0.5) * 2.0**-24


@torch.no_grad()
def generate(model, prompt_ids, uniform_at, samples, *, temperature, max_new_tokens, eos_id):
    """K responses of one prompt, each up to and including EOS; `uniform_at(sample, position)` drives the choice."""
    K, cache = len(samples), DynamicCache(config=model.config)
    responses, finished = [[] for _ in range(K)], [False] * K
    inputs_KT = prompt_ids.expand(K, -1)
    for position in range(max_new_tokens):
        logits_KV = model(inputs_KT, past_key_values=cache, use_cache=True).logits[:, -1].float()
        cdf_KV = torch.softmax(logits_KV / temperature, -1).cumsum(-1)
        u_K = torch.tensor([uniform_at(sample, position) for sample in samples], dtype=torch.float32)
        token_K = (cdf_KV <= (u_K * cdf_KV[:, -1])[:, None]).sum(-1).clamp(max=cdf_KV.shape[1] - 1)
        for k in range(K):
            if not finished[k]:
                responses[k].append(int(token_K[k]))
                finished[k] = int(token_K[k]) == eos_id
        if all(finished):
            break
        inputs_KT = token_K[:, None]
    return [torch.tensor(response) for response in responses]


def log_prob(model, prompt_ids, response, temperature):
    """log pi(y|x): the sum over the response's tokens, under logits / temperature."""
    logits_TV = model(torch.cat([prompt_ids, response])[None]).logits[0, len(prompt_ids) - 1 : -1].float()
    return torch.log_softmax(logits_TV / temperature, -1).gather(1, response[:, None]).sum()


def trajectory_balance_loss(log_pi_PK, log_ref_PK, reward_PK, beta):
    """Spread of the log-partition estimates around their prompt's mean (VarGrad)."""
    log_z_PK = log_ref_PK + reward_PK / beta - log_pi_PK
    return (log_z_PK - log_z_PK.detach().mean(dim=1, keepdim=True)).square().mean()


def exact_match(text, row):
    """1 if the number after the last #### is the answer."""
    found = re.findall(r"####\s*(-?[\d,]+)", text)
    return float(bool(found) and found[-1].replace(",", "") == str(row["answer"]).replace(",", ""))


def prompt_order(num_prompts, seed):
    """Row numbers for ever: each epoch all of them once, in an order drawn from (seed, epoch)."""
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        for row in torch.randperm(num_prompts, generator=generator).tolist():
            yield epoch, row
        epoch += 1


def train(model, tokenizer, rows, *, reward=exact_match, steps=20, P=4, K=4, beta=0.05, learning_rate=2e-4,
          temperature=1.0, max_new_tokens=64, max_grad_norm=1.0, seed=0):  # fmt: skip
    """Yields (loss, mean reward, token lists) of each step."""
    model = model.eval()
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.999), weight_decay=0.0)
    order = prompt_order(len(rows), seed)
    for _ in range(steps):
        log_pi, log_ref, rewards, tokens = [], [], [], []
        for _ in range(P):
            epoch, index = next(order)
            row = rows[index]
            prompt_ids = tokenizer(row["prompt"], return_tensors="pt").input_ids[0]
            samples = range(epoch * K, epoch * K + K)  # a later rollout never reuses randomness
            responses = generate(
                model, prompt_ids, partial(uniform, seed, row["id"]), samples,
                temperature=temperature, max_new_tokens=max_new_tokens, eos_id=tokenizer.eos_token_id,
            )  # fmt: skip
            for response in responses:
                ended = int(response[-1]) == tokenizer.eos_token_id
                text = tokenizer.decode(response, skip_special_tokens=True)
                rewards.append(reward(text, row) if ended else 0.0)
                log_pi.append(log_prob(model, prompt_ids, response, temperature))
                with torch.no_grad():
                    log_ref.append(log_prob(reference, prompt_ids, response, temperature))
                tokens.append(response.tolist())
        log_pi_PK, log_ref_PK = torch.stack(log_pi).view(P, K), torch.stack(log_ref).view(P, K)
        loss = trajectory_balance_loss(log_pi_PK, log_ref_PK, torch.tensor(rewards).view(P, K), beta)
        (beta / 2 * loss).backward()  # in reward units, so that one clipping threshold fits every beta
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), sum(rewards) / len(rewards), tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in open(arguments.data, encoding="utf-8")]
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    for step, (loss, reward, _) in enumerate(
        train(model, tokenizer, rows, steps=arguments.steps, seed=arguments.seed), start=1
    ):
        print(f"step {step}  loss {loss:.4f}  reward {reward:.3f}", flush=True)


if __name__ == "__main__":
    main()
