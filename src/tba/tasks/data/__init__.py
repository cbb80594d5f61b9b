"""How a task's data is read, encoded and split."""
