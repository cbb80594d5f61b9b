"""Objectives with other constants than those of their papers, so that a formula is tested at numbers that show its parts."""

from typing import Any

from tba.objectives.objective import Objective


def with_constants(kind: type[Objective], settings: dict[str, Any]) -> Objective:
    """The objective with these settings, and with these values for the constants of its class among them."""
    constants = {name: value for name, value in settings.items() if name not in kind.model_fields}
    own = {name: value for name, value in settings.items() if name in kind.model_fields}
    return type(kind.__name__, (kind,), {"__module__": __name__, **constants})(**own)
