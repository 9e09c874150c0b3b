"""The program `cram`, from the first moment of its process to the last (the page `app/cli`)."""

import io
import os
import shutil
import signal
import sys
import warnings

class Notices(io.TextIOWrapper):
    "Standard error. What finds no room there is lost, as no work should end for want of a notice."
    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self):
        try:
            super().flush()
        except OSError:  # said by the exit code alone
            return

def prepare_streams():
    """Make standard streams that any text can be written to and, for input, UTF-8.

    A closed one (`>&-`) leads nowhere, and what a terminal cannot show is written as `?`.
    """
    for name, mode in dict(stdin="r", stdout="w", stderr="w").items():
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode, encoding="utf-8")
            os.set_inheritable(nowhere.fileno(), True)  # else worker processes had none
            setattr(sys, name, nowhere)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of other packages, to programmers
        warnings.filterwarnings("default", message=r"(?s).*\b(CUDA|NVIDIA)\b")  # and to users
    os.environ["MPLBACKEND"] = "agg"  # pictures go to files; another value may be unknown here
    if shutil.get_terminal_size().columns < 40:
        os.environ["COLUMNS"] = "40"  # the help of `cram` takes for ever to fit into one column
    sys.stdin.reconfigure(encoding="utf-8-sig")
    sys.stdout.reconfigure(errors="replace")
    wrapped = sys.stderr
    sys.stderr = Notices(wrapped.buffer, wrapped.encoding, wrapped.errors,
                         line_buffering=True, write_through=True)
    sys.stderr.wrapped = wrapped  # whose end would close the stream

def program() -> int:
    "Do what the arguments ask for, and return the exit code; Ctrl-C ends it without a traceback."
    try:
        prepare_streams()
        from .cli import main as command, send_again
        sys.unraisablehook = send_again
        return command()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt

if __name__ == "__main__":
    sys.exit(program())
