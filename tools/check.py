"""Runs every check, also after one that failed, and ends with one line: what failed, and how to run that alone.

python tools/check.py              agreement and pages beside the notebooks, then pytest
python tools/check.py slow | gpu   the notebooks with the cells that have this mark, and the tests that have it
"""

import os
import shlex
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded; two notebooks at a time have a core each

import pytest
from fastcore.parallel import parallel
from fastcore.xtras import working_directory
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import test_nb

BIN = os.path.relpath(Path(sys.executable).parent)
SCRIPTS = [f"{BIN}/python tools/book.py agree", f"{BIN}/python tools/pages.py _docs_preview"]
NBTEST, PYTEST = f"{BIN}/nbdev_test", f"{BIN}/python -m pytest"


def start_scripts() -> dict[str, subprocess.Popen]:
    """Start the scripts, by their commands. They run beside the notebooks, so that no core waits for their ends."""
    return {command: subprocess.Popen(shlex.split(command)) for command in SCRIPTS}


def check_scripts(scripts: dict[str, subprocess.Popen]) -> list[str]:
    """Wait for the scripts; the commands that failed."""
    return [command for command, process in scripts.items() if process.wait()]


def check_notebooks(mark: str) -> list[str]:
    """Execute every notebook as nbdev_test does, two at a time; a command for each that failed."""
    config = get_config()
    files = sorted(path.absolute() for path in nbglob(as_path=True))
    flags = dict(skip_flags=config.tst_flags.split(), force_flags=mark.split())
    try:
        with working_directory(config.nbs_path):
            results = parallel(test_nb, files, **flags, basepath=config.config_path, n_workers=2, pause=0.01)
    except BrokenProcessPool:
        return [f"{NBTEST} --n_workers 1 --do_print"]  # a process was killed; which notebook it had is not known
    names = [os.path.relpath(path) for path in files]
    seconds = {name: seconds for name, (_, seconds) in zip(names, results, strict=True)}
    for name in sorted(seconds, key=seconds.get, reverse=True):
        print(f"{name}: {seconds[name]:.0f} s", flush=True)
    failed = [name for name, (passed, _) in zip(names, results, strict=True) if not passed]
    marked = f" --flags {mark}" if mark else ""
    return [f"{NBTEST}{marked} --path {shlex.quote(name)}" for name in failed]


class Failed:
    """A plugin of pytest that keeps the names of tests that failed, and of files that cannot be read."""

    def __init__(self):
        self.names = {}  # a dictionary has each name once, and keeps their order

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport):
        if report.failed:
            self.names[report.nodeid] = True

    pytest_collectreport = pytest_runtest_logreport


def check_tests(mark: str) -> list[str]:
    """Run pytest, with a mark only the tests that have it; a command for those that failed."""
    failed = Failed()
    sys.path.insert(0, os.getcwd())  # as `python -m pytest` does
    chosen = ["-m", mark] if mark else ["-n", "2", "--dist", "loadscope", "--no-loadscope-reorder"]
    code = pytest.main(chosen, plugins=[failed])
    if code == pytest.ExitCode.OK or (mark and code == pytest.ExitCode.NO_TESTS_COLLECTED):
        return []
    marked = f" -m {mark}" if mark else ""
    return [" ".join([PYTEST + marked, *map(shlex.quote, failed.names)])]


def main(mark: str = ""):
    """Run the checks, and exit with 1 if one of them failed."""
    scripts = {} if mark else start_scripts()
    try:
        notebooks = check_notebooks(mark)
        failed = check_scripts(scripts) + notebooks + check_tests(mark)
    finally:
        for process in scripts.values():
            if process.poll() is None:
                process.terminate()
    print("; ".join(["failed", *failed]) if failed else "all checks passed", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
