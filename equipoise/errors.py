"""The errors that users may see: one sentence each, shown by the command line without a traceback."""


class EquipoiseError(Exception):
    """An error that the user can fix; the message says what is wrong and what would be right."""


class RunFailed(EquipoiseError):
    """A run failed after it had started: all updates contain NaN or infinite numbers."""


class Interrupted(Exception):
    """The user interrupted the run; everything up to the last complete round is saved."""


class ProcessLost(RunFailed):
    """Another process of the run has ended; the run can be resumed."""


def first_line(error: BaseException, most: int = 300) -> str:
    """Return the first line of an error's text, shortened, or the name of its class if it has no text.

    Args:
        error: the error.
        most: the largest number of characters.
    """
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= most else line[: most - 3] + "..."
