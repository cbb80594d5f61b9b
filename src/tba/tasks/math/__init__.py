"""MATH: competition mathematics, with the rules by which an answer is right."""
