"""MATH: competition mathematics, and when an answer to it is right."""
