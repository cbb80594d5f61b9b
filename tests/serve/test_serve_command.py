"""`tba serve`: what it refuses, whose code it runs, and the newer checkpoints of a run."""

import json
import socket

import pytest
import torch
from builders import tiny_llama, tiny_tokenizer
from typer.testing import CliRunner

from tba.cli import app
from tba.cli.serving import TOKEN_VARIABLE, is_loopback, served_config
from tba.config import ConfigError, ModelConfig
from tba.observe.run_folder import RunFolder
from tba.serve.checkpoints import CheckpointWatch

pytest.importorskip("uvicorn", reason="pip install -e '.[dev]' brings it")

RUNNER = CliRunner()


def save_checkpoint(run, step):
    path = run / "checkpoints" / f"step-{step}"
    model = tiny_llama(seed=step)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": {}}))
    return model


@pytest.fixture
def run(tmp_path):
    """A run folder with one checkpoint, whose config asks for code that comes with the model."""
    (tmp_path / "config.yaml").write_text("model: {path: tba:arithmetic, trust_remote_code: true}\n")
    save_checkpoint(tmp_path, 4)
    return tmp_path


def test_an_address_beyond_this_machine_needs_a_token(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    done = RUNNER.invoke(app, ["serve", "tba:arithmetic", "--host", "0.0.0.0"])
    assert isinstance(done.exception, ConfigError)
    assert f"set {TOKEN_VARIABLE}" in str(done.exception)


def test_a_port_that_is_taken_is_told_with_what_to_do():
    from tba.serve.server import open_socket  # of an extra

    taken, message = (
        socket.create_server(("127.0.0.1", 0)),
        r"in use.* Give another --port; 0 takes any that is free\.$",
    )
    with taken, pytest.raises(OSError, match=message):
        open_socket("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(OSError, match=r"--port 99999: .*0-65535\. Give another"):
        open_socket("127.0.0.1", 99999)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("node7", False)],
)
def test_addresses_that_only_this_machine_reaches(host, expected):
    assert is_loopback(host) is expected


def test_a_setting_that_means_nothing_here_is_refused():
    done = RUNNER.invoke(app, ["serve", "tba:arithmetic", "train.max_steps=3"])
    assert "train.max_steps=3 means nothing to a served model" in str(done.exception)


def test_the_code_of_a_model_runs_only_where_the_command_says_so(run):
    config, folder, checkpoint = served_config(str(run), [], trust_remote_code=False)
    assert not config.model.trust_remote_code
    assert (folder.path, checkpoint.name, config.model.path) == (run, "step-4", str(checkpoint))
    assert served_config(str(run), [], trust_remote_code=True)[0].model.trust_remote_code
    assert not served_config("tba:arithmetic", [], trust_remote_code=False)[0].model.trust_remote_code


def test_a_checkpoint_of_a_run_is_served_as_it_is_named(run):
    save_checkpoint(run, 8)
    named = run / "checkpoints" / "step-4"
    assert served_config(str(named), [], trust_remote_code=False)[2] == named
    assert served_config(str(run), [], trust_remote_code=False)[2].name == "step-8"


def test_each_newer_checkpoint_of_a_run_is_loaded_once(run):
    loaded = []
    folder, model = RunFolder(run), ModelConfig(path="tba:arithmetic", dtype="float32")
    watch = CheckpointWatch(folder, folder.newest_checkpoint(), model, loaded.append)
    assert not watch.look()
    expected = dict(save_checkpoint(run, 8).named_parameters())
    assert watch.look()
    assert not watch.look()
    (weights,) = loaded
    assert weights.version == 8
    assert weights.tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.tensors.items())
