"""The program `cram`, from the first moment of its process to the last (the page `app/cli`)."""

import os
import signal
import sys

def prepare_streams():
    """Make standard streams that any text can be written to and, for input, UTF-8.

    A closed one (`>&-`) leads nowhere, and what a terminal cannot show is written as `?`.
    """
    for name, mode in dict(stdin="r", stdout="w", stderr="w").items():
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode, encoding="utf-8")
            os.set_inheritable(nowhere.fileno(), True)  # else worker processes had none
            setattr(sys, name, nowhere)
    sys.stdin.reconfigure(encoding="utf-8-sig")
    sys.stdout.reconfigure(errors="replace")

def program() -> int:
    "Do what the arguments ask for, and return the exit code; Ctrl-C ends it without a traceback."
    try:
        prepare_streams()
        from .cli import main as command
        return command()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt

if __name__ == "__main__":
    sys.exit(program())
