"""What was renamed is answered by its new name."""

import pytest

from tba.cli import app
from tba.cli.usage import RENAMED as COMMANDS
from tba.cli.usage import exit_status
from tba.config import ConfigError, load_config
from tba.config.reading import RENAMED as SETTINGS
from tba.objectives.registry import make_objective
from tba.observe.metrics import RENAMED as METRICS
from tba.observe.metrics import metric


@pytest.mark.parametrize("old", SETTINGS)
def test_a_setting_by_its_former_name_is_answered_by_the_new_one(old):
    with pytest.raises(ConfigError, match=f"unknown key {old}: it is called {SETTINGS[old]} now"):
        make_objective(load_config(None, [f"{old}=1"]))


@pytest.mark.parametrize("old", METRICS)
def test_a_metric_by_its_former_name_is_answered_by_the_new_one(old):
    assert metric(METRICS[old]).name == METRICS[old]
    with pytest.raises(KeyError, match=f"metric {old} is called {METRICS[old]} now"):
        metric(old)


@pytest.mark.parametrize("old", COMMANDS)
def test_a_command_by_its_former_name_is_answered_by_the_new_one(old, capsys):
    assert exit_status(lambda: app([old, "runs/one"], standalone_mode=False, prog_name="tba")) == 2
    assert f"there is no command {old}: it is called tba {COMMANDS[old]} now." in capsys.readouterr().err
