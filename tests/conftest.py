"""One thread per test process: two cores are shared, and results must not depend on how many there are. And the order of
files: those with slow tests come first, or the last one would keep one core busy while the others have nothing to do."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the trainings that tests start, wherever they are started from


def pytest_configure(config):
    """Where tests run, which with `-n 3` is in other processes than this one: it need not wait for torch then."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        gc.disable()  # until the tests are collected: nothing of what is imported becomes garbage
        from tba.models.load import use_cpu

        use_cpu(threads=1)  # as every role does


def pytest_collection_finish():
    gc.freeze()  # or every collection would walk through all of torch and transformers again
    gc.enable()


def pytest_collection_modifyitems(items):
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
