"""Figures and the files they are written to: PNG for screens, PDF and SVG for papers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from equipoise.errors import EquipoiseError
from equipoise.storage import atomic_files

FORMATS = {".png": "png", ".pdf": "pdf", ".svg": "svg"}
"""Formats of pictures by the endings of their files."""

NAMES = "FILE.png, FILE.pdf or FILE.svg"

_STYLE: Any = {
    "text.parse_math": False,  # a dollar sign in a name or text is not mathematics
    "pdf.fonttype": 42,  # TrueType: text that can be searched, and that publishers accept
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "equipoise",  # ids of elements would be random otherwise
}
_NO_DATES: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}


def check_picture(path: Path) -> None:
    """Raise an error unless the name of a file ends like that of a picture."""
    if path.suffix.lower() not in FORMATS:
        raise EquipoiseError(f"--out {path} is not allowed; the ending decides the format, so name it {NAMES}")


@contextmanager
def figure_file(path: Path, size: tuple[float, float] = (8, 5), dpi: int = 130) -> Iterator[Any]:
    """Yield an empty matplotlib figure that is written to a file if the block succeeds.

    The same figure gives the same bytes: nothing in the file depends on the time or on chance.

    Args:
        path: the file; its ending decides the format.
        size: width and height in inches.
        dpi: pixels per inch of a PNG.
    """
    import matplotlib
    from matplotlib.figure import Figure

    check_picture(path)
    form = FORMATS[path.suffix.lower()]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        with atomic_files.atomic_write(path) as temporary:
            figure.savefig(temporary, dpi=dpi, format=form, metadata=_NO_DATES[form])
