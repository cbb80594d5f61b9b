"""Responses to prompts of a script, by the engine that searchers use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tba.config import Config
from tba.generate.sampling import training_sampling
from tba.launch.defaults import with_defaults
from tba.models.cpu import use_cpu
from tba.models.load import load_model
from tba.runtime.threads import threads_alone
from tba.search.make import make_search_engine
from tba.tasks.data.prompts import make_prompt
from tba.types import Request


def generate(
    config: Config, prompts: Sequence[str | list[dict[str, str]]], *, num_generations: int, greedy: bool
) -> list[list[str]]:
    """Texts for each prompt, in their order."""
    use_cpu(threads_alone(config))
    loaded = load_model(config.trainer_model)
    room = loaded.context - config.generate.max_new_tokens
    template = config.task.chat_template_kwargs
    made = [
        make_prompt(
            id=str(index), text=text, columns={}, tokenizer=loaded.tokenizer, max_tokens=room, template=template
        )
        for index, text in enumerate(prompts)
    ]
    longest = max((len(prompt.token_ids) for prompt in made), default=1)
    config = with_defaults(config, loaded, longest_prompt=lambda: longest, trains=False)
    sampling = replace(training_sampling(config), greedy=greedy)
    found: dict[tuple[int, int], str] = {}
    requests = (Request(prompt=prompt) for prompt in made)
    engine = make_search_engine(config, loaded)
    for completion in engine.generate(requests, samples_per_prompt=num_generations, sampling=sampling):
        text = loaded.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        found[int(completion.prompt_id), completion.sample_index] = text
    return [[found[index, sample] for sample in range(num_generations)] for index in range(len(made))]
