"""The one exception that is meant for the user."""


class UserError(Exception):
    "A mistake the user can correct; the message says how, in one line. `cram` exits with 2."
