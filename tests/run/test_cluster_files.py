"""The files of examples/cluster are what the tools that read them take, as far as that can be seen without a cluster."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tba.config import load_config

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
SETTING = re.compile(r"\b((?:runtime|search)\.\w+)=([\w:.$\"{}]+)")


@pytest.mark.parametrize("name", ["by_hand.sh", "slurm.sh"])
def test_a_script_can_be_read_by_bash(name):
    subprocess.run(["bash", "-n", FOLDER / name], check=True)


def test_by_hand_says_how_it_is_used():
    done = subprocess.run(["bash", FOLDER / "by_hand.sh"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "usage: by_hand.sh head | join ADDRESS\n")


def test_the_kubernetes_file_asks_for_tokens_and_gives_every_pod_the_volume():
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert cluster["authOptions"] == {"mode": "token"}
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in (found["template"]["spec"] for found in pods):
        assert [volume["name"] for volume in pod["volumes"]] == ["runs"]
        assert all(container["volumeMounts"][0]["name"] == "runs" for container in pod["containers"])
    assert "runtime.kind=ray" in job["spec"]["entrypoint"]


@pytest.mark.parametrize("name", ["by_hand.sh", "slurm.sh", "kuberay.yaml"])
def test_the_settings_that_a_file_names_exist(name):
    found = dict(SETTING.findall((FOLDER / name).read_text()))
    assert found["runtime.kind"] == "ray"
    known = {key: "auto" if key == "runtime.address" else "ray" if key == "runtime.kind" else "2" for key in found}
    load_config(None, [f"{key}={value}" for key, value in known.items()])
