"""The errors that are the user's to mend: shown without a traceback, each with its exit code."""


class UserError(Exception):
    """Something outside the program is wrong; the message says what, where and the way out."""

    exit_code = 1


class OptionsError(UserError):
    """Wrong options, or a file that an option names does not fit them (exit code 2)."""

    exit_code = 2


class DataError(UserError):
    """A picture, a folder or a pairing is wrong; the message names the path (exit code 3)."""

    exit_code = 3
