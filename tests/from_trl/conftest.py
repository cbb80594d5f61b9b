from problem import _nothing_is_left_running, folder  # noqa: F401
