"""Settings: pydantic models with their checks, YAML files, dotted overrides and TRL's names."""

from tba.config.reading import (
    ConfigError,
    dump_config,
    load_config,
)
from tba.config.root import Config
from tba.config.section import Schedule, Section
from tba.config.sections import (
    DEFAULT_STEPS,
    EvaluateConfig,
    ExploreConfig,
    GenerateConfig,
    LoraConfig,
    ModelConfig,
    ObjectiveConfig,
    ObserveConfig,
    ReferenceConfig,
    ReplayConfig,
    RuntimeConfig,
    SearchConfig,
    TrainConfig,
)
from tba.config.task import RedTeamConfig, RewardConfig, TaskConfig, TLDRConfig

__all__ = [
    "DEFAULT_STEPS",
    "Config",
    "ConfigError",
    "EvaluateConfig",
    "ExploreConfig",
    "GenerateConfig",
    "LoraConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "ObserveConfig",
    "RedTeamConfig",
    "ReferenceConfig",
    "ReplayConfig",
    "RewardConfig",
    "RuntimeConfig",
    "Schedule",
    "SearchConfig",
    "Section",
    "TLDRConfig",
    "TaskConfig",
    "TrainConfig",
    "dump_config",
    "load_config",
]
