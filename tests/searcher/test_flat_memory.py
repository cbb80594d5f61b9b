"""What a searcher keeps of the groups that it has sent: nothing, or a long run would not fit into memory."""

import gc

from builders import tiny_llama

from recipes.arithmetic import make_tokenizer
from tba.config import GenerateConfig, TaskConfig
from tba.engine.make_engine import make_engine, make_scorer
from tba.runtime.channels import LocalGroups
from tba.runtime.prompt_queue import PromptQueue, RolloutSource
from tba.searcher.loop import Searcher
from tba.searcher.rollouts import PromptStream
from tba.tasks.arithmetic.problems import ArithmeticTask
from tba.tasks.rewards.pool import DirectRewards
from tba.tasks.task import TaskInputs
from tba.types import Sampling

GROUPS = 20


def test_a_searcher_keeps_nothing_of_the_groups_that_it_has_sent():
    tokenizer = make_tokenizer()
    task = ArithmeticTask(
        TaskInputs(config=TaskConfig(num_train_prompts=500), tokenizer=tokenizer, max_prompt_tokens=60)
    )
    prompt_queue, groups = PromptQueue(500, seed=0), LocalGroups()
    model = tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=128)
    searcher = Searcher(
        engine=make_engine(model, [2], GenerateConfig(slots=8), seed=0, max_length=128),
        prompts=PromptStream(task.prompts("train"), RolloutSource.of(prompt_queue), samples_per_prompt=4),
        rewards=DirectRewards(task),
        reference=make_scorer(model, max_length=128),
        sender=groups,
        tokenizer=tokenizer,
        sampling=Sampling(max_new_tokens=6),
        samples_per_prompt=4,
    )

    def objects_after_more() -> int:
        searcher.step(GROUPS)
        for group in groups.drain():
            prompt_queue.complete(group.rollout)
        gc.collect()
        return len(gc.get_objects())

    objects = [objects_after_more() for _ in range(5)]
    assert max(objects) - min(objects) < GROUPS
