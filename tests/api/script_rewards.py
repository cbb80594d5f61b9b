"""Rewards of scripts. They have a file of their own because a worker imports the file that a function is from: beside the
tests, which need torch and transformers, each worker would take seconds to start."""


def sevens(completions, want, **columns):
    """Share of the words that are `want`."""
    return [text.split().count(word) / max(1, len(text.split())) for text, word in zip(completions, want)]


def late(completions, trainer_state, log_metric, **columns):
    """1 from the second step on."""
    log_metric("step", trainer_state.global_step)
    return [float(trainer_state.global_step >= 2)] * len(completions)
