"""Reading, encoding and splitting of a task's data."""
