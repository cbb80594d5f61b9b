"""Word problems with a seeded generator: the embedded maths task."""
