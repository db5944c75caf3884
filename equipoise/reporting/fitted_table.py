"""Tables that fit the width of the terminal without cutting figures or words apart."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_LONGEST = 28
"""Width from which on a word may be folded."""
_GAP = 2
"""Spaces between two columns, if there is room."""


@dataclass(frozen=True)
class FittedTable:
    """A table of texts that adapts to the width in which it is printed.

    Words are wrapped, figures never are. If that is not enough, secondary columns are left out, with a note; then the
    column `below` goes below each row. With `split`, the columns are shown in several tables below each other instead.
    As the last resort each row becomes a block with one line per column.
    """

    head: Sequence[str]
    body: Sequence[Sequence[str]]
    words: Sequence[str] = ()
    "titles of the columns with words, which are wrapped; all others have figures"
    secondary: Sequence[str] = ()
    "titles of the columns that may be left out, the least important first"
    below: str = ""
    "title of the column of words that may be printed on lines of its own"
    title: str = ""
    note: str = ""
    split: bool = False
    "whether to show all columns in several tables, each with the first column"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what is printed in the given width."""
        if self.title:
            yield Text(self.title, style="bold")
        width, note = options.max_width, self.note
        shown = self
        if self.split:
            for part in self._chunks(width):
                yield part._rendered(width)
        elif (reduced := self._reduced(width)) is not None:
            shown = reduced
            yield shown._rendered(width)
        elif self.below in self.head and (reduced := self._without([self.below])._reduced(width)) is not None:
            shown = reduced
            at = self.head.index(self.below)
            yield from shown._with_lines([line[at] for line in self.body], width)
        else:
            yield self._blocks()
        if left_out := [title for title in self.head if title not in (*shown.head, self.below)]:
            note += f"{'; ' if note else ''}not shown in this width: {', '.join(left_out)}"
        if note:
            yield Text(note, style="dim italic")

    def _rendered(self, width: int) -> Table:
        gap = self._gap(width)
        return self._blocks() if gap is None else self._table(width, gap)

    def _with_lines(self, texts: Sequence[str], width: int) -> Iterator[Table | Padding]:
        """Yield the rows, each followed by a line of text."""
        gap = self._gap(width)
        if gap is None:
            yield self._blocks()
            return
        widths = [column.width for column in self._table(width, gap).columns]
        for number, (line, text) in enumerate(zip(self.body, texts, strict=True)):
            row = replace(self, body=[line])._table(width, gap)
            row.show_header = number == 0
            for column, wide in zip(row.columns, widths, strict=True):
                column.width = wide  # the same in all rows
            yield row
            if text:
                yield Padding(Text(text, style="dim"), (0, 0, 0, 2))

    def _reduced(self, width: int) -> "FittedTable | None":
        """Return the table without the columns that must be left out to fit, or None if that does not help."""
        for k in range(len(self.secondary) + 1):
            fewer = self._without(self.secondary[:k])
            if fewer._fits(width, _GAP):
                return fewer
        fewer = self._without(self.secondary)
        return fewer if fewer._fits(width, 1) else None

    def _chunks(self, width: int) -> Iterator["FittedTable"]:
        """Yield tables of as many columns as fit, each with the first column."""
        columns = list(range(1, len(self.head)))
        while columns:
            fitting = (k for k in range(len(columns), 0, -1) if self._with([0, *columns[:k]])._fits(width, _GAP))
            most = next(fitting, len(columns))  # if not even one fits, the rest becomes blocks
            yield self._with([0, *columns[:most]])
            columns = columns[most:]

    def _without(self, titles: Sequence[str]) -> "FittedTable":
        return self._with([i for i, title in enumerate(self.head) if title not in titles])

    def _with(self, columns: Sequence[int]) -> "FittedTable":
        body = [[line[i] for i in columns] for line in self.body]
        return replace(self, head=[self.head[i] for i in columns], body=body)

    def _fits(self, width: int, gap: int) -> bool:
        return sum(map(self._least, range(len(self.head)))) + gap * (len(self.head) - 1) <= width

    def _gap(self, width: int) -> int | None:
        """Return the gap with which the table fits, or None if it does not."""
        return next((gap for gap in (_GAP, 1) if self._fits(width, gap)), None)

    def _texts(self, column: int) -> list[str]:
        return [line[column] for line in self.body]

    def _natural(self, column: int) -> int:
        return max(cell_len(line) for text in (self.head[column], *self._texts(column)) for line in _lines(text))

    def _least(self, column: int) -> int:
        """Return the least width of a column in which its figures, and words that are not too long, stay whole."""
        title = self.head[column]
        tokens = [word for text in (title, *self._texts(column)) for word in text.split()] or [""]
        if title not in self.words:
            tokens = [*title.split(), *self._texts(column)]
            return max(map(cell_len, tokens), default=0)
        return min(_LONGEST, max(map(cell_len, tokens)))

    def _table(self, width: int, gap: int) -> Table:
        widths = [self._least(i) for i in range(len(self.head))]
        natural = [self._natural(i) for i in range(len(self.head))]
        for _ in range(width - sum(widths) - gap * (len(widths) - 1)):
            # Room goes where most has to be wrapped; titles of figures can wait.
            needs = [(self.head[i] in self.words, natural[i] / max(widths[i], 1)) for i in range(len(widths))]
            widest = max((i for i in range(len(widths)) if widths[i] < natural[i]), key=needs.__getitem__, default=None)
            if widest is None:
                break
            widths[widest] += 1
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
        for title, wide in zip(self.head, widths, strict=True):
            justify: Literal["left", "right"] = "left" if title in self.words else "right"
            table.add_column(Text(title), width=wide, justify=justify, overflow="fold")
        for line in self.body:
            table.add_row(*map(Text, line))
        return table

    def _blocks(self) -> Table:
        table = Table.grid(padding=(0, 0, 0, 0))
        for line in self.body:
            grid = Table.grid(padding=(0, 2, 0, 0))
            grid.add_column(no_wrap=True)
            grid.add_column(overflow="fold")
            for title, text in zip(self.head[1:], line[1:], strict=True):
                if text:
                    grid.add_row(Text(title, style="dim"), Text(text))
            table.add_row(Text(line[0], style="bold", overflow="fold"))
            table.add_row(Padding(grid, (0, 0, 0, 2)))
        return table


def _lines(text: str) -> list[str]:
    return text.splitlines() or [""]
