"""The one base class of everything a user can get wrong."""


class BlockdraftError(ValueError):
    """A mistake that the user can mend; its message says what is wrong, why, and what to do.

    The command line prints the message without a traceback and exits with code 2.
    """
