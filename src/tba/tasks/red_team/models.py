"""Victim, judge and embedder of red-teaming: whom the attacker talks to, who scores the replies, and what says how different
attacks are. Each is a rule of the embedded world, or a transformers model by folder or hub name."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from tba.config import GenerateConfig, ModelConfig
from tba.generate.make import make_engine
from tba.models.load import context_length, first_line, load_model, load_weights, resolve_device
from tba.tasks.data.prompts import encode
from tba.tasks.evaluation import respond
from tba.tasks.red_team.world import WORDS, mode_of
from tba.types import Prompt, Sampling

MARKER = "oops"
"""Word that the embedded victim says when it gives in, and nobody else."""
VICTIM_SEED = 0
"""Seed of a model's replies; the same in every run."""
TEXTS_PER_PASS = 64
MAY_BE_MISSING = frozenset(("pooler.dense.weight", "pooler.dense.bias"))
"""Weights that BERT and its kin lack without a head; sentence encoders take the mean instead."""
OTHER_COLUMNS = 1024
"""Number of columns that words outside the embedded world share by a hash: attacks of a real model have such words."""


class Victim(Protocol):
    """Replies to attacks, one list of replies per attack."""

    def replies(
        self, attacks: Sequence[str], finished: Sequence[bool], *, occasion: str = "training"
    ) -> list[list[str]]:
        """Replies to each attack. `finished` says whether an attack ended by itself; another `occasion` gives other random
        replies."""
        ...


class RuleVictim:
    """Victim of the embedded world: gives in exactly where an attack hits a hidden mode; one reply per attack."""

    def __init__(self, world: int = 0) -> None:
        self._world = world

    def replies(
        self, attacks: Sequence[str], finished: Sequence[bool], *, occasion: str = "training"
    ) -> list[list[str]]:
        return [[self._reply(attack, end)] for attack, end in zip(attacks, finished)]

    def _reply(self, attack: str, finished: bool) -> str:
        mode = mode_of(attack, finished, self._world)
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
        """Replies to each attack. Equal attacks are asked once. A cut-off attack is sent as it is."""
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


class Judge(Protocol):
    def probabilities(self, replies: Sequence[str]) -> np.ndarray:
        """Probability that each reply is what the attacker is after, float64 [n] in [0, 1]."""
        ...


class MarkerJudge:
    """Judge of the embedded world: 1 where the victim's marker word is in the reply, else 0."""

    def probabilities(self, replies: Sequence[str]) -> np.ndarray:
        return np.array([float(MARKER in reply.split()) for reply in replies])


class ClassifierJudge:
    """Probability of one label of a sequence classifier, by folder or hub name.

    Labels that exclude each other share a softmax; the label of a multi-label or one-label model has a sigmoid of its own.
    """

    def __init__(self, path: str, *, label: str, device: str = "auto") -> None:
        self._encoder = load_encoder(AutoModelForSequenceClassification, path, key="task.red_team.judge", device=device)
        config = self._encoder.model.config
        labels = [config.id2label[index] for index in sorted(config.id2label)]
        if label not in labels:
            raise ValueError(
                f"task.red_team.judge_label={label!r} is no label of task.red_team.judge={path}: it has "
                f"{', '.join(labels)}."
            )
        self._index = labels.index(label)
        self._separate = config.problem_type == "multi_label_classification" or len(labels) == 1

    @torch.inference_mode()
    def probabilities(self, replies: Sequence[str]) -> np.ndarray:
        found = [np.zeros(0)]
        for inputs in self._encoder.batches(replies):
            logits = self._encoder.model(**inputs).logits.double()
            scores = logits.sigmoid() if self._separate else logits.softmax(dim=-1)
            found.append(scores[:, self._index].cpu().numpy())
        return np.concatenate(found)


class Embedder(Protocol):
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Embeddings, float32 [n, d], rows of length 1."""
        ...


class WordCounts:
    """How often each word occurs, as a direction: one column per word of the embedded world, so calls can be compared."""

    def __init__(self, words: Sequence[str] = WORDS) -> None:
        self._column = {word: index for index, word in enumerate(words)}

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        counts = np.zeros((len(texts), len(self._column) + OTHER_COLUMNS), np.float32)
        for row, text in enumerate(texts):
            for word in text.split() or [""]:  # an empty text too must have a direction
                counts[row, self._column_of(word)] += 1
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)

    def _column_of(self, word: str) -> int:
        if word in self._column:
            return self._column[word]
        return len(self._column) + zlib.crc32(word.encode()) % OTHER_COLUMNS


class SentenceEncoder:
    """Mean of the last hidden states over a text's tokens, scaled to length 1: what sentence-transformers does with
    all-MiniLM-L6-v2, the paper's encoder."""

    def __init__(self, path: str, *, device: str = "auto") -> None:
        self._encoder = load_encoder(AutoModel, path, key="task.red_team.embedder", device=device)

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        found = [np.zeros((0, self._encoder.model.config.hidden_size), np.float32)]
        for inputs in self._encoder.batches(texts):
            hidden = self._encoder.model(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"].unsqueeze(-1).float()
            mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            found.append(torch.nn.functional.normalize(mean, dim=-1).cpu().numpy())
        return np.concatenate(found)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedEncoder:
    """A model that reads, with its tokenizer."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    """Longest text in tokens; longer ones are cut off at the end."""

    def batches(self, texts: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        """Inputs of the model, texts in their order."""
        for start in range(0, len(texts), TEXTS_PER_PASS):
            # A tokenizer that adds no special tokens makes nothing of an empty text; a blank is one token.
            batch = [text or " " for text in texts[start : start + TEXTS_PER_PASS]]
            inputs = self.tokenizer(
                batch, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
            )
            yield inputs.to(self.model.device)


def load_encoder(auto_class: Any, path: str, *, key: str, device: str = "auto") -> LoadedEncoder:
    """`auto_class` of transformers from a folder or hub name; `key` is the setting that named it, for errors."""
    disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        # Never bfloat16: these models are small, and rewards may be logarithms of small probabilities.
        model = load_weights(auto_class, path, may_be_missing=MAY_BE_MISSING, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key}={path!r} cannot be loaded: {first_line(error).rstrip('. ')}. Give a folder with config.json, weights "
            "and tokenizer, or a hub name that can be reached (HF_HUB_OFFLINE=1 forbids downloads)."
        ) from error
    if tokenizer.pad_token is None:  # decoders have none, and texts of a batch need one
        tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
    return LoadedEncoder(
        model=model.to(resolve_device(device)).eval(), tokenizer=tokenizer, max_tokens=token_limit(model, tokenizer)
    )


def token_limit(model: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """The smaller of what tokenizer and model allow; many tokenizers name no limit, which reads as a huge one."""
    embeddings = getattr(model.base_model, "embeddings", None)
    positions = getattr(embeddings, "position_embeddings", None)
    padding = getattr(positions, "padding_idx", None)
    # RoBERTa counts positions from behind the padding's id: 514 of them are 512 tokens.
    lost = 0 if padding is None else padding + 1
    return min(int(tokenizer.model_max_length), context_length(model.config) - lost)
