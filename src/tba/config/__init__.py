"""Settings: pydantic models with their checks, YAML files, dotted overrides and TRL's names."""

# ruff: noqa: F401
from tba.config.reading import ConfigError, dump_config, load_config
from tba.config.root import Config
from tba.config.sections import (
    DEFAULT_STEPS,
    ExploreConfig,
    GenerateConfig,
    LoraConfig,
    ModelConfig,
    ReplayConfig,
    RuntimeConfig,
    Schedule,
    Section,
    TrainConfig,
)
from tba.config.task import RedTeamConfig, RewardConfig, TaskConfig, TLDRConfig
