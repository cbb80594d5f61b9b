"""A served engine: OpenAI's routes over HTTP, for many clients at once, and for agents inside a run."""

from __future__ import annotations

import importlib.util

from tba.config import ConfigError


def check_web(what: str) -> None:
    """Refuse what needs the web server where its packages are missing."""
    if missing := [package for package in ("starlette", "uvicorn") if importlib.util.find_spec(package) is None]:
        raise ConfigError(f"{what} needs {' and '.join(missing)}: pip install 'tba-rl[web]'.")
