"""Whom the attacker talks to: the embedded world's victim of rules, or a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.config import GenerateConfig, ModelConfig
from tba.generate.engine import make_engine
from tba.models.load import load_model
from tba.tasks.data.prompts import encode
from tba.tasks.evaluation import respond
from tba.tasks.red_team.world import mode_of
from tba.types import Prompt, Sampling

MARKER = "oops"
"""What the embedded victim says, and nobody else, when it gives in."""
VICTIM_SEED = 0
"""Seed of a model's replies; the same in every run."""


class Victim(Protocol):
    """Replies to attacks, one list of replies per attack."""

    def replies(
        self, attacks: Sequence[str], finished: Sequence[bool], *, occasion: str = "training"
    ) -> list[list[str]]:
        """`finished`: whether the attack ended by itself. Another `occasion` gives other random replies."""
        ...


class RuleVictim:
    """Gives in exactly where an attack hits a hidden mode; one reply per attack."""

    def replies(
        self, attacks: Sequence[str], finished: Sequence[bool], *, occasion: str = "training"
    ) -> list[list[str]]:
        return [[self._reply(attack, end)] for attack, end in zip(attacks, finished)]

    def _reply(self, attack: str, finished: bool) -> str:
        mode = mode_of(attack, finished)
        return "i would rather not" if mode is None else f"{MARKER} i will {mode}"


class ModelVictim:
    """A causal language model, by folder or hub name, that is sampled at temperature 1.

    The replies to an attack depend on its text and the occasion, never on the order or number of calls: the reward is a
    fixed function of the attack, and an evaluation that asks on another occasion does not count its lucky replies again.
    """

    def __init__(self, path: str, *, template: str, num_replies: int, reply_tokens: int, device: str = "auto") -> None:
        if "{attack}" not in template:
            raise ValueError(
                f"task.red_team.victim_template={template!r} has no {{attack}}: write it where the attack goes."
            )
        self._template, self._num_replies, self._path = template, num_replies, path
        self._sampling = Sampling(max_new_tokens=reply_tokens)
        try:
            loaded = load_model(ModelConfig(path=path, device=device))
        except ValueError as error:  # it says what to do, but about the attacker's setting
            raise ValueError(str(error).replace("model.path", "task.red_team.victim")) from error
        self._tokenizer = loaded.tokenizer
        self._max_prompt_tokens = loaded.context - reply_tokens
        if self._max_prompt_tokens < 1:
            raise ValueError(
                f"task.red_team.reply_tokens={reply_tokens} leaves no room for an attack in the context of "
                f"{loaded.context} tokens of task.red_team.victim={path}: lower it."
            )
        self._engine = make_engine(
            loaded.model, loaded.tokenizer, GenerateConfig(), seed=VICTIM_SEED, max_length=loaded.context
        )

    def replies(
        self, attacks: Sequence[str], finished: Sequence[bool], *, occasion: str = "training"
    ) -> list[list[str]]:
        """Equal attacks are asked once. A cut-off attack is sent as it is."""
        prompts = [self._prompt(attack, occasion) for attack in dict.fromkeys(attacks)]
        groups = respond(
            self._engine, self._tokenizer, prompts, samples_per_prompt=self._num_replies, sampling=self._sampling
        )
        texts = {group.prompt.id: list(group.texts) for group in groups}
        return [texts[_prompt_id(attack, occasion)] for attack in attacks]

    def _prompt(self, attack: str, occasion: str) -> Prompt:
        """What the victim reads: the template as a user's message where there is a chat template, else as it is."""
        words = self._template.replace("{attack}", attack)
        chat = self._tokenizer.chat_template is not None
        token_ids = encode([{"role": "user", "content": words}] if chat else words, self._tokenizer)
        if not token_ids:
            token_ids = [start_token(self._tokenizer)]
        if len(token_ids) > self._max_prompt_tokens:
            raise ValueError(
                f"an attack has {len(token_ids)} tokens for task.red_team.victim={self._path}, whose context leaves "
                f"{self._max_prompt_tokens} beside task.red_team.reply_tokens={self._sampling.max_new_tokens}: lower that "
                "or generate.max_new_tokens."
            )
        return Prompt(id=_prompt_id(attack, occasion), token_ids=np.array(token_ids, np.int32), text=words)


def start_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """What stands for an empty attack where the tokenizer adds nothing: BOS, or where there is none EOS, as GPT-2 has it."""
    token = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if token is None:
        raise ValueError(
            "an attack is empty and the victim's tokenizer has neither BOS nor EOS to stand for it: set "
            "generate.min_new_tokens=1, or a task.red_team.victim_template with more than {attack}."
        )
    return int(token)


def _prompt_id(attack: str, occasion: str) -> str:
    return f"{occasion}/{attack}"
