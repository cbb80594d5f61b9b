"""Make a searcher from a config."""

from __future__ import annotations

from tba.config import Config
from tba.generate.engine import Engine, make_engine, make_scorer, stop_ids_of
from tba.models.load import LoadedModel
from tba.runtime.channels import GroupSender
from tba.search.loop import Searcher, training_sampling
from tba.search.prompts import PromptStream
from tba.search.scoring import FailureCount, GroupScorer
from tba.tasks.base import Task


def make_search_engine(config: Config, loaded: LoadedModel) -> Engine:
    """The engine with the model's weights as version 0; sync mode drains, so that a response is of one version."""
    generate = config.generate
    if config.mode == "sync":
        generate = generate.model_copy(update={"update": "drain"})
    return make_engine(
        loaded.model,
        stop_ids=stop_ids_of(loaded.model, loaded.tokenizer),
        config=generate,
        seed=config.seed,
        max_length=loaded.context,
        dtype=loaded.model.dtype,
        device=loaded.model.device,
    )


def make_searcher(
    config: Config, loaded: LoadedModel, task: Task, engine: Engine, sender: GroupSender, *, index: int = 0, count: int = 1
) -> Searcher:
    """Searcher `index` of `count`; the loaded weights become its frozen reference."""
    reference = make_scorer(
        loaded.model, max_length=loaded.context, dtype=loaded.model.dtype, device=loaded.model.device
    )
    scorer = GroupScorer(
        task=task,
        tokenizer=loaded.tokenizer,
        reference=reference,
        temperature=config.generate.temperature,
        failures=FailureCount(config.search.max_reward_failures),
    )
    prompts = PromptStream(
        task.prompts("train"),
        samples_per_prompt=config.samples_generated_per_prompt,
        seed=config.seed,
        shuffle=config.search.shuffle,
        shard=index,
        num_shards=count,
    )
    return Searcher(
        engine=engine,
        prompts=prompts,
        scorer=scorer,
        sender=sender,
        sampling=training_sampling(config),
        samples_per_prompt=config.samples_generated_per_prompt,
        index=index,
    )
