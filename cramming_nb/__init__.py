"""Cramming, as a book that runs.

Importing the package loads neither `torch` nor `transformers`. To load an exported model with
`transformers`, import `cramming_nb.app.hf` (the export page).
"""

import os
import sys

__version__ = "0.1.0"

if sys.platform in ("win32", "cygwin"):
    # Files are locked, and memory is counted, as only Unix does it (modules fcntl and resource).
    message = ("cramming_nb runs on Linux and macOS; on Windows, install and use it inside WSL "
               "(`wsl --install` in a terminal)")
    command, _, _ = sys.argv[0].replace("\\", "/").rpartition("/")[2].partition(".")
    if command == "cram":
        print(f"cram: {message}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(message)

# Threads that wait for each other soon go to sleep (the page on hardware, "Beside other programs").
# torch's OpenMP library reads this when it is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
