"""The one exception that is meant for the user."""

from collections.abc import Iterator
from contextlib import contextmanager

class UserError(Exception):
    "A mistake the user can correct; the message says how, in one line. `cram` exits with 2."

@contextmanager
def placed(where: object) -> Iterator[None]:
    "Put before the message of a `UserError` where its cause stands: a file, and an entry of it."
    try:
        yield
    except UserError as error:
        error.args = (f"{where}: {error}",)
        raise

@contextmanager
def advised(advice: str) -> Iterator[None]:
    "Put behind the message of a `UserError` what to do."
    try:
        yield
    except UserError as error:
        error.args = (f"{error}; {advice}",)
        raise
