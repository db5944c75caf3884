"""The errors a user may meet: one sentence each, shown without a traceback by the command line."""


class EquipoiseError(Exception):
    """Something the user can put right; the message says what is wrong and what would be right."""


class RunFailed(EquipoiseError):
    """A run that began well and came to nothing: every update has NaN or infinite numbers."""


class Interrupted(Exception):
    """The user asked to stop; everything up to the last whole round is saved."""
