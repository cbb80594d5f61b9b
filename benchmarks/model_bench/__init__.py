"""Every family of models, tiny and random, against transformers."""
