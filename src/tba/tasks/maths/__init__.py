"""GSM8K and MATH: questions from rows, and graders of answers."""
