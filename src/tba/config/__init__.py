"""Settings: pydantic models, YAML files, dotted overrides."""

from tba.config.files import ConfigError, dump_config, load_config
from tba.config.schedule import Schedule
from tba.config.sections import (
    Config,
    EvaluateConfig,
    GenerateConfig,
    ModelConfig,
    ObjectiveConfig,
    ObserveConfig,
    ReplayConfig,
    RewardConfig,
    SearchConfig,
    TaskConfig,
    TrainConfig,
)

__all__ = [
    "Config",
    "ConfigError",
    "EvaluateConfig",
    "GenerateConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "ObserveConfig",
    "ReplayConfig",
    "RewardConfig",
    "Schedule",
    "SearchConfig",
    "TaskConfig",
    "TrainConfig",
    "dump_config",
    "load_config",
]
