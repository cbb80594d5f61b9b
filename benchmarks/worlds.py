"""What the shipped start models and the reward model are worth before any RL, in the two small worlds:

python benchmarks/worlds.py          two or three minutes on one core
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.tasks.red_team.evaluator import effective_modes
from tba.tasks.red_team.task import start_model_path as attacker
from tba.tasks.red_team.world import mode_of, modes, sample_attacks
from tba.tasks.tldr.prepare import SAMPLING, gold_agreement, make_pairs, win_rate_of
from tba.tasks.tldr.task import reward_model_path
from tba.tasks.tldr.task import start_model_path as summariser
from tba.tasks.tldr.world import first_posts, gold_scores, perfect_summary, reference_summary, win_rate
from tba.types import Sampling

PAIRS_SEED = 987_654
"""Of pairs that neither the reward model nor its standardisation has seen."""


def preference() -> None:
    model = AutoModelForCausalLM.from_pretrained(summariser()).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(summariser())
    greedy = Sampling(max_new_tokens=SAMPLING.max_new_tokens, greedy=True)
    for split in ("validation", "held_out"):
        posts = first_posts(split, 2000)
        texts = [post.text for post in posts]
        references = gold_scores(texts, [reference_summary(post) for post in posts], [True] * len(posts))
        perfect = gold_scores(texts, [perfect_summary(post) for post in posts], [True] * len(posts))
        for name, rate in (
            ("start model, temperature 1", win_rate_of(model, tokenizer, posts, SAMPLING)),
            ("start model, greedy", win_rate_of(model, tokenizer, posts, greedy)),
            ("perfect summaries", win_rate(perfect, references)),
        ):
            error = (rate * (1 - rate) / len(posts)) ** 0.5
            print(f"{split}, {name}: wins {rate:.1%} ± {error:.1%}", flush=True)
    pairs = make_pairs(model, tokenizer, "validation", 4000, seed=PAIRS_SEED)
    found = gold_agreement(pairs, str(reward_model_path()))
    print(
        f"4,000 fresh validation pairs: labels agree with gold {found['labels']:.1%}, reward model "
        f"{found['reward_model']:.1%}, correlation {found['correlation']:.2f}",
        flush=True,
    )


def red_teaming() -> None:
    model = AutoModelForCausalLM.from_pretrained(attacker()).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(attacker())
    rarities = list(modes().values())
    print(f"48 modes, rarities {min(rarities):.2g} to {max(rarities):.2g}, {sum(rarities):.2%} in all")
    for number, seeds in ((1000, range(1, 19)), (32_768, range(1))):
        counts = []
        for seed in seeds:
            attacks = sample_attacks(model, tokenizer, number, seed=seed)
            counts.append(Counter(mode for mode in (mode_of(*attack) for attack in attacks) if mode is not None))
        hits = [sum(count.values()) / number for count in counts]
        found = [len(count) for count in counts]
        effective = np.mean([effective_modes(list(count.values())) for count in counts])
        print(
            f"{number:,} attacks of the start model, {len(counts)} seeds: {np.mean(hits):.2%} hit, modes "
            f"{np.mean(found):.1f} ({min(found)} to {max(found)}), effective {effective:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    preference()
    red_teaming()
