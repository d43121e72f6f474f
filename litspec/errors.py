"""The one error that a user can mend."""


class InputError(ValueError):
    """A setting, file or prompt that cannot be used.

    Its message is one sentence for the person who gave it: what was wrong, the value seen, and what would be right. The
    command prints it and exits with 2; in Python it is a `ValueError` like any other.
    """
