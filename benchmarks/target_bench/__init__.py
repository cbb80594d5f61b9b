"""Wall clock to a target accuracy, synchronous and asynchronous: scenarios, runs, tables and the picture."""
