"""Settings: pydantic models, YAML files, dotted overrides."""

from tba.config.base import Schedule, Section
from tba.config.files import (
    ConfigError,
    abbreviates,
    dump_config,
    is_given,
    load_config,
    merge,
    read_yaml,
    refuse_two_values,
    settings_by_name,
    unknown_key,
    yaml_words,
)
from tba.config.root import Config
from tba.config.runtime import RuntimeConfig
from tba.config.search import ExploreConfig, SearchConfig
from tba.config.sections import (
    DEFAULT_STEPS,
    EvaluateConfig,
    GenerateConfig,
    LoraConfig,
    ModelConfig,
    ObjectiveConfig,
    ObserveConfig,
    ReferenceConfig,
    ReplayConfig,
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
    "abbreviates",
    "dump_config",
    "is_given",
    "load_config",
    "merge",
    "read_yaml",
    "refuse_two_values",
    "settings_by_name",
    "unknown_key",
    "yaml_words",
]
