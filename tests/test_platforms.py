"""Platforms other than the one the tests run on, made up."""

import os
import subprocess
import sys

import pytest
import torch

from cramming_nb.engine.hardware import CUDA, Device, Hardware
from cramming_nb.engine.jobs import Local


@pytest.mark.parametrize("platform", ["win32", "cygwin"])
@pytest.mark.parametrize("script", [r"C:\Python\Scripts\cram.exe", "C:/Python/Scripts/cram", "notebook.py"])
def test_windows_is_refused_in_one_line(platform, script):
    code = f"import sys; sys.platform, sys.argv = {platform!r}, [{script!r}]; import cramming_nb"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert "runs on Linux and macOS; on Windows, install and use it inside WSL" in last
    if "cram" in script:
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and last.startswith("cram: ")
    else:
        assert done.returncode == 1 and last.startswith("ImportError: ")


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_unix_is_not_refused(platform):
    code = f"import sys; sys.platform = {platform!r}; import cramming_nb; print(cramming_nb.__version__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).returncode == 0


@pytest.mark.parametrize(
    "own, spins",
    [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_that_wait_soon_sleep_unless_the_user_says_how_they_wait(own, spins):
    """Set by the import of the package, which comes before torch."""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environ = {name: value for name, value in os.environ.items() if name not in names} | own
    code = "import os, sys, cramming_nb; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.stdout == f"False {spins}\n"


@pytest.mark.parametrize(
    "card, capability, dtype",
    [
        ("GTX 1080 Ti", (6, 1), torch.float32),
        ("P100", (6, 0), torch.float32),
        ("V100", (7, 0), torch.float16),
        ("T4", (7, 5), torch.float16),
        ("RTX A6000", (8, 6), torch.bfloat16),
        ("H100", (9, 0), torch.bfloat16),
    ],
)
def test_number_format_of_a_gpu(monkeypatch, card, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card)
    assert Hardware.detect(device=CUDA()).dtype == dtype


@pytest.fixture
def apple(monkeypatch):
    """An Apple silicon machine, as far as Python shows it: no affinity, no /proc, bytes where Linux counts KiB."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr("platform.processor", lambda: "arm")
    monkeypatch.setattr("cramming_nb.engine.hardware.Path.exists", lambda path: False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)


def test_apple_silicon_computes_on_the_cpu_in_float32(apple, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    found = Hardware.detect()
    assert (found.kind, found.dtype, found.name) == ("cpu", torch.float32, "arm")


def test_apple_silicon_counts_memory_in_bytes(apple, monkeypatch):
    of_this_machine = Device().peak_memory()
    monkeypatch.setattr(sys, "platform", "linux")
    assert Device().peak_memory() >= 1024 * of_this_machine


def test_apple_silicon_has_workers(apple, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert Local().count == 10


def test_a_worker_count_respects_the_cores_of_the_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert Local().count == 3
