"""A game of several turns: the policy guesses a number, and hears whether the secret is higher or lower.

tba train configs/guessing.yaml
"""

import random

LARGEST = 31
MOST_GUESSES = 7


class Guessing:
    """A step environment: each turn of the policy is one guess."""

    def reset(self, seed):
        """Think of a number -> the prompt and gymnasium's info. The K games of a prompt have one seed, so one secret."""
        self.secret, self.guesses, self.won = random.Random(seed).randint(1, LARGEST), 0, False
        return f"Guess my number from 1 to {LARGEST}.", {}

    def step(self, text):
        """What gymnasium returns: observation, reward, terminated, truncated, info."""
        self.guesses += 1
        guess = int(text) if text.strip().isdecimal() else None
        self.won = guess == self.secret
        reward = 1.0 - 0.1 * (self.guesses - 1) if self.won else 0.0
        return self.answer(guess), reward, self.won, self.guesses == MOST_GUESSES, {}

    def answer(self, guess):
        if guess is None:
            return "a number, please"
        return "higher" if guess < self.secret else "lower"


def won(completions, environments, **columns):
    """Share of games won, for evaluations: its weight in the config is 0."""
    return [float(own.won) for own in environments]
