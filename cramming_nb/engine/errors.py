"""The one exception that is meant for the user, and errors of the system in words for them."""

import errno
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

NO_ROOM = {  # errors of the system for a file that cannot be written
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS,
    errno.EIO,  # as which a full disk is reported for tensors
}

def explained(error: OSError) -> str:
    "An error of the operating system in one line, with advice where there is some."
    reason = ": ".join(str(part) for part in (error.filename2 or error.filename, error.strerror)
                       if part)
    if error.errno in NO_ROOM:
        reason += "; make room, or choose a folder you may write to"
    elif error.errno in (errno.EACCES, errno.EPERM):
        reason += "; change its permissions, or choose a place that you may read and write"
    elif error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP):
        reason += "; move the file or folder that is in its place, or name another"
    elif error.errno == errno.ENOENT:
        reason += "; check the name, and make the folder that it is in"
    elif error.errno == errno.ENAMETOOLONG:
        reason += "; choose a shorter name"
    return reason
