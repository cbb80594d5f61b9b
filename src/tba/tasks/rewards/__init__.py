"""Rewards: a user's functions, and the pool of workers that calls them while the searcher generates."""
