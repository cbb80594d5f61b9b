"""How a process computes on the CPU."""

import pytest
import torch

from tba.models.cpu import gains_by_onednn, use_cpu

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


def test_threads_and_onednn_are_set_for_the_whole_process(tmp_path, monkeypatch):
    monkeypatch.setattr("tba.models.cpu.CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    (tmp_path / "cpuinfo").write_text(NEOVERSE_N1)
    before = torch.backends.mkldnn.enabled, torch.get_num_threads()
    try:
        torch.backends.mkldnn.set_flags(True)
        use_cpu(threads=1)
        assert (torch.backends.mkldnn.enabled, torch.get_num_threads()) == (False, 1)
    finally:
        torch.backends.mkldnn.set_flags(before[0])
        torch.set_num_threads(before[1])
