"""How rewards are computed: a user's functions, and the pool that calls them while the searcher goes on."""
