"""Configs as a run has them, without a run."""

from tba.config import Config
from tba.run.memory import Machine, ModelShape
from tba.run.resolve import resolve


def resolved(config: Config, loaded=None, **options) -> Config:
    """What `resolve` makes of a config on this machine; `loaded` is the model, None = none is looked at."""
    if loaded is None:
        return resolve(config, None, Machine.seen())
    return resolve(config, ModelShape.of(loaded), Machine.found(config), **options)
