"""The errors that users may see: one sentence each, shown by the command line without a traceback."""

# What torch says, in errors of no class of their own, when a tensor does not fit into memory or into the address space.
_NO_MEMORY = (
    *("can't allocate memory", "not enough memory", "out of memory", "unable to mmap", "array is too big"),
    *("Storage size calculation overflowed", "integer multiplication overflow", "integer overflow"),
)
_TOO_LARGE = ("without overflow", "Overflow when unpacking", "too large to convert", "can't be cast")


_LONGEST = 1600  # characters of a message


class EquipoiseError(Exception):
    """An error that the user can fix; the message says what is wrong and what would be right, in one line."""

    def __init__(self, *texts: object):
        super().__init__(*(_in_one_line(text) if isinstance(text, str) else text for text in texts))


def _in_one_line(text: str) -> str:
    """Return a text without line breaks; of a very long one, such as a name of a damaged file, the middle is cut."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 4 :]}"
    return " ".join(filter(None, (line.strip() for line in text.splitlines()))) if len(text.splitlines()) > 1 else text


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


def sentence_of(error: BaseException) -> str | None:
    """Return a sentence about an error of Python or torch that large settings and files bring about.

    Args:
        error: the error.

    Returns:
        What is the likely reason, and what would be right; None if the error is of another kind.
    """
    text = first_line(error)
    if isinstance(error, RecursionError):
        return "something is nested too deeply, most likely a list or table in the configuration or in a data file"
    if isinstance(error, MemoryError) or (
        isinstance(error, (RuntimeError, ValueError)) and any(words in str(error) for words in _NO_MEMORY)
    ):
        return (
            f"there is not enough memory ({text}); use a smaller model ([model]), smaller batches (algorithm.batch) or "
            "less data ([data])"
        )
    if isinstance(error, OverflowError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _TOO_LARGE)
    ):
        return f"a number in the settings is too large ({text}); look for one, such as algorithm.lr or model.hidden"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "the system does not allow that many threads; set engine.workers to a smaller number"
    return None
