"""The command `equipoise adapt`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from equipoise.cli.console import out_console
from equipoise.errors import EquipoiseError
from equipoise.storage.model_kinds import COLUMNS
from equipoise.storage.run_folder import RunFolder, made_in_python, read_toml

if TYPE_CHECKING:
    from equipoise.runs.adaptation import AdaptedClients

_TITLES = {"personal": "adapted"}
"""What the kinds of models are called here, where they differ from their names in a run."""


def adapt(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    data: Annotated[
        Path, typer.Option("--data", metavar="PATH", help="New clients' data: a file, or a folder of one per client.")
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="FILE.py:NAME", help="Your own module, for a run made from Python."),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option("--algorithm", metavar="FILE.py:NAME", help="Your own algorithm, for a run made from Python."),
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option("--target", metavar="COLUMN", help="Column to predict, if the files are tables.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder to write the adapted models to.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Adapt a finished run to clients that come after training, and score them.

    \b
        equipoise adapt runs/ditto --data newcomers/ --out models/
        equipoise adapt runs/mine --data anna.npz --model net.py:Net

    A client is a .npz or .safetensors file with the arrays x and y, or train.x, train.y, test.x, test.y and optionally
    validation.x, validation.y, or a table (.csv, .parquet); it is named after its file. Undivided samples are split as
    those of the run. Each client starts from what the server would send it, and trains as the method does for unseen
    clients (adapt_epochs).
    """
    from equipoise.data.client_files import TableFormat, read_clients
    from equipoise.registry import load_object
    from equipoise.runs.arguments import own_module
    from equipoise.runs.load import load_result

    if model is None and made_in_python(read_toml(RunFolder.open(folder).config)):
        raise EquipoiseError(f"{folder} was trained with a module of your own; name it with --model FILE.py:NAME")
    clients = read_clients(data, TableFormat(tuple(target or ())))
    own = None if algorithm is None else load_object(algorithm, "--algorithm")
    result = load_result(folder, None if model is None else own_module(model), algorithm=own)
    adapted = result.adapt(clients)
    if out is not None:
        adapted.save(out)
    if as_json:
        rows: dict[str, dict[str, dict[str, float | None]]] = {name: {} for name in adapted.clients}
        for kind, table in adapted.scores().items():
            for i, name in enumerate(adapted.clients):
                values = (None if value != value else value for value in table[i].tolist())
                rows[name][_TITLES.get(kind, kind)] = dict(zip(COLUMNS, values, strict=False))
        print(json.dumps({"metric": result.summary["metric"], "clients": rows}))
        return
    out_console.print(_table(adapted, result.summary["metric"]))
    if out is not None:
        named = read_toml(RunFolder.open(folder).config).get("model", {}).get("name", "")
        own = "" if model is None and ":" not in named else ", module=..."
        text = f"Models: {out}; load one with equipoise.load_model({str(out / 'NAME.safetensors')!r}{own})"
        out_console.print(escape(text), highlight=False, soft_wrap=True)


def _table(adapted: "AdaptedClients", metric: str) -> Table:
    scores = adapted.scores()
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("client", overflow="fold")
    for column in ("training samples", *(f"{_TITLES.get(kind, kind)} {metric}" for kind in scores)):
        table.add_column(column, justify="right")
    at = COLUMNS.index("test_metric")
    for i, name in enumerate(adapted.clients):
        cells = ["–" if (v := scores[kind][i, at]) != v else f"{v:.4f}" for kind in scores]
        table.add_row(escape(name), str(adapted.federation.train.lengths[i]), *cells)
    if len(adapted.clients) > 1:
        means = [adapted.summary[kind].get(metric) for kind in scores]
        table.add_section()
        table.add_row("mean", "", *("–" if v is None else f"{v:.4f}" for v in means))
    return table
