"""Worker processes end with the process that started them, even if it is killed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Workers that write the time to a file each, ten times a second, for ever.
START = """
import sys, time
from pathlib import Path

def beat(name):
    while True:
        Path(sys.argv[1], name).write_text(str(time.time()))
        time.sleep(0.1)

class Jobs:
    def __init__(self):
        from cramming_nb.engine.hardware import Hardware
        self.hardware = Hardware.detect()

    def run(self, job):
        beat(job)

def fine_tuning():
    from cramming_nb.app.finetuning import Workers, run_together
    list(run_together(Jobs(), ["one", "two"], Workers(devices=1, per_device=2, threads=1)))

def stages():
    from cramming_nb.engine.jobs import Local
    list(Local(2).map(beat, [("one",), ("two",)]))

if __name__ == "__main__":
    globals()[sys.argv[2]]()
"""


def beats(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.iterdir())]


def wait_for(what, seconds: float):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


@pytest.mark.parametrize("kind", ["fine_tuning", "stages"])
def test_workers_end_when_their_parent_is_killed(tmp_path, kind):
    script, folder = tmp_path / "start.py", tmp_path / "beats"
    script.write_text(START)
    folder.mkdir()
    parent = subprocess.Popen([sys.executable, script, folder, kind])
    try:
        wait_for(lambda: len(beats(folder)) == 2, 600)
        assert parent.poll() is None
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()

    def silent():
        before = beats(folder)
        time.sleep(2)
        return beats(folder) == before

    wait_for(silent, 120)
