"""tba: asynchronous RL post-training of language models with the Trajectory Balance objective."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "TBAConfig", "TBATrainer", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the entry points when they are asked for: `import tba` alone stays quick."""
    if name in __all__:
        from tba import api

        return getattr(api, name.replace("GRPO", "TBA"))  # TRL's names, for scripts that change their import only
    raise AttributeError(f"module 'tba' has no attribute {name!r}")
