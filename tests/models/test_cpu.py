"""How a process computes on the CPU."""

import pytest
import torch

from recipes.start_models import one_deterministic_thread
from tba.models.load import gains_by_onednn, use_cpu

NEOVERSE_N1 = (
    "Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
)
NEOVERSE_V1 = f"{NEOVERSE_N1} sve i8mm bf16 dgh rng"


@pytest.mark.parametrize(
    ("machine", "cpu_info", "gains"),
    [
        ("aarch64", NEOVERSE_N1, False),
        ("aarch64", NEOVERSE_V1, True),
        ("x86_64", "flags\t: fpu sse2", True),
        ("arm64", "", True),
    ],
)
def test_only_an_arm_core_without_bf16_does_without_onednn(machine, cpu_info, gains):
    assert gains_by_onednn(machine, cpu_info) == gains


@pytest.fixture
def on_an_arm_core_without_bf16(tmp_path, monkeypatch):
    """With oneDNN and two threads, as a process begins there; afterwards as it was."""
    monkeypatch.setattr("tba.models.load.CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    (tmp_path / "cpuinfo").write_text(NEOVERSE_N1)
    before = torch.backends.mkldnn.enabled, torch.get_num_threads()
    torch.backends.mkldnn.set_flags(True)
    torch.set_num_threads(2)
    yield
    torch.backends.mkldnn.set_flags(before[0])
    torch.set_num_threads(before[1])


@pytest.mark.usefixtures("on_an_arm_core_without_bf16")
@pytest.mark.parametrize(("threads", "then"), [(1, 1), (None, 2)])
def test_threads_and_onednn_are_set_for_the_whole_process(threads, then):
    use_cpu(threads)
    assert (torch.backends.mkldnn.enabled, torch.get_num_threads()) == (False, then)


@pytest.mark.usefixtures("on_an_arm_core_without_bf16")
def test_a_start_model_is_made_in_the_same_way_whoever_asks_for_it():
    with one_deterministic_thread():
        assert (torch.backends.mkldnn.enabled, torch.get_num_threads()) == (False, 1)
    assert (torch.backends.mkldnn.enabled, torch.get_num_threads()) == (True, 2)
