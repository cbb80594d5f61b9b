"""A game for two that one policy plays against itself: who takes the last stone wins.

tba train configs/nim.yaml

The seed draws the side that learns. Turns of the other side are played by the same policy, and have no part in the loss:
for the learner they are moves of its environment.
"""

import random

MOST_STONES = 12
MOST_TAKEN = 3


class Nim:
    """A step environment: each turn of the policy takes stones, for one side and then for the other."""

    def reset(self, seed):
        """Lay the stones -> the prompt and gymnasium's info."""
        luck = random.Random(seed)
        self.stones, self.learner, self.side = luck.randint(2, MOST_STONES), luck.randint(0, 1), 0
        self.moves, self.best, self.illegal = 0, 0, False
        return f"{self.stones} stones. Take 1 to {MOST_TAKEN}.", {}

    @property
    def trains(self):
        """Whether the turn that follows is the learner's."""
        return self.side == self.learner

    def step(self, text):
        """What gymnasium returns: observation, reward, terminated, truncated, info."""
        taken = int(text) if text.strip().isdecimal() else 0
        legal = 1 <= taken <= min(MOST_TAKEN, self.stones)
        if self.trains:
            self.note(taken, legal)
        if not legal:  # the game goes to the other side
            self.illegal = True
            return "", float(not self.trains), True, False, {}
        self.stones -= taken
        if not self.stones:
            return "", float(self.trains), True, False, {}
        self.side = 1 - self.side
        return f"{self.stones} left.", 0.0, False, False, {}

    def note(self, taken, legal):
        """Count the learner's moves that leave a multiple of four, where one can."""
        if self.stones % (MOST_TAKEN + 1):
            self.moves += 1
            self.best += legal and (self.stones - taken) % (MOST_TAKEN + 1) == 0


def best_moves(completions, environments, **columns):
    """Share of the learner's moves that were the best ones; None where no move could win."""
    return [own.best / own.moves if own.moves else None for own in environments]


def legal(completions, environments, **columns):
    """Share of games without an illegal move."""
    return [float(not own.illegal) for own in environments]
