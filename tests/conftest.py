"""One thread per test process: two cores are shared, and results must not depend on how many there are. And the order of
files: those that take longest come first, or the last one would keep one core busy while the others have nothing to do."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the trainings that tests start, wherever they are started from

LONGEST = (
    *("launch/test_node_loss.py", "launch/test_collapse.py", "compare/test_compare_runs.py"),
    *("launch/test_ranks.py", "launch/test_runs.py", "replay/test_replay_sampling.py"),
    *("launch/test_cluster_runs.py", "generate/test_engine_families.py", "launch/test_bad_inputs.py"),
    *("runtime/test_cluster.py", "models/test_flash_attention.py", "generate/test_engine_ahead.py"),
    *("launch/test_resume.py", "launch/test_staleness.py", "replay/test_replay_mixing.py"),
    *("api/test_api.py", "tasks/test_task_evaluators.py", "generate/test_engine_contract.py"),
    *("launch/test_failures.py", "generate/test_engine_native.py", "tasks/test_tldr_prepare.py"),
    *("launch/test_readme.py", "launch/test_example.py", "generate/test_engine_fuzz.py"),
    *("train/test_sharded.py", "tasks/test_arithmetic.py", "observe/test_guards.py"),
    *("launch/test_faults.py", "test_models_table.py", "tasks/test_red_team_task.py"),
    *("launch/test_supervision.py", "tasks/test_reward_workers.py", "launch/test_later_rows.py"),
    *("launch/test_cli.py", "tasks/test_grader_pairs.py"),
)
"""Files of more than ten seconds. Beside one that starts processes which all import torch are two that compute in one: where
three of the former came at once on two cores, their deadlines would come near."""


def pytest_configure(config):
    """Where tests run, which with `-n 3` is in other processes than this one: it need not wait for torch then."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        gc.disable()  # until the tests are collected: nothing of what is imported becomes garbage
        from tba.models.cpu import use_cpu

        use_cpu(threads=1)  # as every role does


def pytest_collection_finish():
    gc.freeze()  # or every collection would walk through all of torch and transformers again
    gc.enable()


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    folder = __file__.removesuffix("conftest.py")
    items.sort(key=lambda item: places.get(str(item.path).removeprefix(folder), len(places)))
