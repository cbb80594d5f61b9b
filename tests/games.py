"""Environments for tests, of every kind that is known by its methods."""

import asyncio
import os
import random
import time


class Guess:
    """TRL's contract: public methods are tools, `get_reward` says how it went."""

    def reset(self, **columns):
        self.secret = columns.get("secret") or random.randint(1, 9)
        self.guesses = []
        return " Guess a number from 1 to 9."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        self.guesses.append(number)
        if number == self.secret:
            return "right"
        return "higher" if number < self.secret else "lower"

    def fail(self) -> str:
        """Raise an error."""
        raise KeyError("no such door")

    def hang(self) -> str:
        """Never answer."""
        time.sleep(3600)

    def die(self) -> str:
        """End the process."""
        os._exit(7)

    async def wait(self) -> dict:
        """Answer as a coroutine."""
        await asyncio.sleep(0)
        return {"waited": True}

    async def get_reward(self) -> float:
        return float(self.secret in self.guesses)


class Luck(Guess):
    """Tells at its reset what no seed repeats."""

    def reset(self, **columns):
        super().reset(**columns)
        return f" {os.urandom(8).hex()}"


def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


class Echo:
    """gymnasium's five values: says how many characters it was told, three times at most."""

    def reset(self, *, seed=None):
        self.turns, self.seed = 0, seed
        return f" Seed {seed % 100}.", {}

    def step(self, action):
        self.turns += 1
        return f"{len(action)} characters", 0.25, self.turns == 3, False, {}


class Waits(Echo):
    """Its reset waits for a sign, a file."""

    def reset(self, *, sign, seed=None):
        while not os.path.exists(sign):
            time.sleep(0.01)
        return super().reset(seed=seed)


class Arena:
    """TextArena's observations apart from steps, and rewards at the close."""

    def reset(self, num_players, seed=None):
        self.players, self.moves = num_players, 0

    def get_observation(self):
        return 0, f"move {self.moves}"

    def step(self, action):
        self.moves += 1
        return self.moves == 2, {}

    def close(self):
        return {0: 1.5}, {}


class Gym:
    """skyrl-gym's `init`, and a mapping from `step`."""

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        return {"observations": [{"role": "user", "content": "again"}], "reward": 0.5, "done": action == "stop"}


class Duel(Echo):
    """Two sides in turns: the policy learns the one that the seed draws, and plays both."""

    def reset(self, *, seed=None):
        self.side = seed % 2
        return super().reset(seed=seed)

    @property
    def trains(self):
        return self.turns % 2 == self.side
