"""Rewards of scripts. They have a file of their own because a worker imports the file that a function is from: beside the
tests, which need torch and transformers, each worker would take seconds to start."""


def sevens(completions, want, **columns):
    """Share of the words that are `want`."""
    return [text.split().count(word) / max(1, len(text.split())) for text, word in zip(completions, want)]


def late(completions, trainer_state, log_metric, **columns):
    """1 from the second step on."""
    log_metric("step", trainer_state.global_step)
    return [float(trainer_state.global_step >= 2)] * len(completions)


def longer(completions, **columns):
    return [float(len(set(text.split()))) for text in completions]


def flat(completions, **columns):
    return [0.5] * len(completions)


def down_at_step_3(completions, trainer_state, **columns):
    """Below 0, and not to be had for the greedy responses of step 3."""
    if trainer_state.global_step == 3 and len(completions) == 1:
        raise ConnectionError("the judge is down")
    return [-1.0] * len(completions)


def half_at_step_2(completions, trainer_state, **columns):
    return [0.5 if trainer_state.global_step == 2 else 1.0] * len(completions)


def rows_of_want(completions, want, **columns):
    return [float(value) for value in want]
