"""tba: asynchronous RL post-training of language models with the Trajectory Balance objective."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "Judge", "TBAConfig", "TBATrainer", "__version__"]

OF_TRL = (
    *("DatasetMixtureConfig", "ModelConfig", "ScriptArguments", "TrlParser"),
    *("get_dataset", "get_kbit_device_map", "get_peft_config", "get_quantization_config"),
)
"""Names that scripts of TRL import beside its trainer: `from tba import ...` gives TRL's own."""


def __getattr__(name: str) -> Any:
    """Import the entry points when they are asked for: `import tba` alone stays quick."""
    if name == "Judge":  # for files of rewards, whose workers do without torch
        from tba.tasks.rewards.judge import Judge

        return Judge
    if name in __all__:
        from tba import trl as api

        return getattr(api, name.replace("GRPO", "TBA"))  # TRL's names, for scripts that change their import only
    if name in OF_TRL:
        try:
            import trl
        except ImportError:
            raise ImportError(
                f"{name} is TRL's own, which is not installed: pip install 'tba-rl[benchmark]'."
            ) from None
        return getattr(trl, name)
    raise AttributeError(f"module 'tba' has no attribute {name!r}")
