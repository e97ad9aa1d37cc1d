"""How many devices and cores a host has for its ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshbook.errors import DeviceError, UsageError
from meshbook.system import devices


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with three CUDA devices, none hidden. The count is all that is made up: no machine here has one."""
    monkeypatch.setattr(devices, "_count_by_nvml", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("NVIDIA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("three_gpus")
def test_ranks_see_the_devices_of_all() -> None:
    assert devices.plan_devices(2, None, "here") == ["0", "1"]


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize("requested", [None, "cuda"])
def test_too_few_devices_are_an_error_that_counts_them(requested: str | None) -> None:
    with pytest.raises(DeviceError, match="4 ranks were asked for on node7, which has 3 CUDA devices") as caught:
        devices.plan_devices(4, requested, "node7")
    assert (caught.value.wanted, caught.value.found) == (4, 3)


@pytest.mark.usefixtures("three_gpus")
def test_cpu_is_used_where_it_was_asked_for() -> None:
    assert devices.plan_devices(4, "cpu", "here") == []


def test_without_devices_ranks_run_on_the_cpu_unless_cuda_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_count_by_nvml", lambda: 0)
    assert devices.plan_devices(2, None, "here") == []
    with pytest.raises(DeviceError, match="has 0 CUDA"):
        devices.plan_devices(2, "cuda", "here")


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(UsageError, match='device "tpu" is not known; ask for cpu or cuda'):
        devices.plan_devices(2, "tpu", "here")


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("listed", "usable"),
    [
        ("", []),
        ("2,0", ["2", "0"]),
        (" 1 , 2", ["1", "2"]),
        ("0,-1,1", ["0"]),
        ("0,3,1", ["0"]),
        ("1,1", ["1"]),
        ("GPU-5ebe9f43,GPU-12ab", ["GPU-5ebe9f43", "GPU-12ab"]),
        ("MIG-GPU-5ebe/1/0", ["MIG-GPU-5ebe/1/0"]),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(listed: str, usable: list[str]) -> None:
    assert devices.visible_cuda_devices({"CUDA_VISIBLE_DEVICES": listed}) == usable


@pytest.mark.usefixtures("three_gpus")
def test_a_container_without_devices_has_none() -> None:
    assert devices.visible_cuda_devices({"NVIDIA_VISIBLE_DEVICES": "void"}) == []
    assert devices.visible_cuda_devices({}) == ["0", "1", "2"]


def test_the_driver_is_asked_where_its_library_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "_count_by_nvml", lambda: None)
    monkeypatch.setattr(devices, "_PROC_GPUS", tmp_path / "gpus")
    assert devices.visible_cuda_devices({}) == []
    for address in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / address).mkdir(parents=True)
    assert devices.visible_cuda_devices({}) == ["0", "1"]


def test_cores_are_those_of_the_affinity_mask() -> None:
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); from meshbook.system import devices; "
    code += "print(devices.count_cores())"
    path = os.pathsep.join(sys.path)
    answer = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert answer.stdout.strip() == b"1", answer.stderr.decode()


@pytest.mark.parametrize(
    ("files", "membership", "cores"),
    [
        ({"cpu.max": "150000 100000"}, "0::/", 1.5),
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b", 4.0),
        ({"a/cpu.max": "200000 100000", "a/b/cpu.max": "300000 100000"}, "0::/a/b", 2.0),
        ({"cpu/d/cpu.cfs_quota_us": "50000", "cpu/d/cpu.cfs_period_us": "100000"}, "3:cpu,cpuacct:/d\n0::/", 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu:/", None),
        ({}, "0::/gone", None),
    ],
)
def test_the_quota_of_the_control_group_is_the_tightest_around_us(
    tmp_path: Path, files: dict[str, str], membership: str, cores: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text + "\n")
    (tmp_path / "membership").write_text(membership + "\n")
    assert devices._cpu_quota(tmp_path / "cgroup", tmp_path / "membership") == cores
