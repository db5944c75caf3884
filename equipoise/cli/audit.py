"""The command `equipoise audit`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from equipoise.cli.console import Data, out_console, progress_bar
from equipoise.errors import EquipoiseError
from equipoise.settings import nearest

if TYPE_CHECKING:
    from equipoise.runs.audit_report import Attack, AuditReport

_INFINITE = "∞"


def audit(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    unit: Annotated[
        list[str] | None,
        typer.Option("--unit", metavar="UNIT", help="What is attacked: sample, client or canary; default: all three."),
    ] = None,
    shadows: Annotated[
        int, typer.Option("--shadows", metavar="N", help="Shadow runs for each of samples and clients; 0: none.")
    ] = 16,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", help="Training samples to attack, and as many test samples.")
    ] = 2000,
    canaries: Annotated[
        int | None, typer.Option("--canaries", metavar="N", help="Number of canaries; default: what takes seconds.")
    ] = None,
    confidence: Annotated[
        float, typer.Option("--confidence", metavar="P", help="Probability with which a bound of epsilon holds.")
    ] = 0.95,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the audit.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Picture (.png, .pdf, .svg); default: audit.png in the run folder."),
    ] = None,
    data: Data = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Attack a finished run: what do its models and messages tell about samples and clients?

    \b
        equipoise audit runs/ditto
        equipoise audit runs/private --unit canary            seconds: is the noise what epsilon says?
        equipoise audit runs/ditto --unit sample --shadows 64

    sample: was this sample in its client's training set? By its loss alone, and by likelihood ratios (LiRA), which
    compare with shadow runs of the same experiment, each trained with one half of the candidates. client: was this
    client in the federation? By the global models of shadow runs with half of the clients. canary: clients that send
    one known direction through clipping, noise and the server's sum, without training.

    AUC 0.5 is guessing. TPR at 0.1% FPR is what matters: how many members are recognised almost surely. ε ≥ is a lower
    bound of epsilon that any guarantee must exceed. If one is above the accounted epsilon of what it covers, the noise
    or the accounting is wrong: the command says so and ends with exit code 1. Personal models stay with their clients,
    and no guarantee covers them.

    The figures are written to audit.json in the run folder, and the ROC curves are drawn.
    """
    from equipoise.reporting.figure_files import check_picture
    from equipoise.reporting.roc_plot import draw_roc
    from equipoise.runs.audit import UNITS, AuditSettings
    from equipoise.runs.audit import audit as attack
    from equipoise.runs.launch import reopen

    for name in unit or ():
        if name not in UNITS:
            raise EquipoiseError(
                f"--unit {name} is not allowed; it must be sample, client or canary{nearest(name, UNITS)}"
            )
    units = tuple(each for each in UNITS if each in (unit or UNITS))
    settings = AuditSettings(units, shadows, samples, canaries, confidence, seed)
    picture = out or folder / "audit.png"
    check_picture(picture)
    with progress_bar("shadow runs") as progress:
        bar = progress.add_task(folder.resolve().name, total=None, score="")
        result = reopen(folder, data)[0]
        report = attack(
            result.simulation, settings, lambda done, total: progress.update(bar, completed=done, total=total)
        )
        progress.update(bar, total=report.runs, completed=report.runs)
    report.write(folder)
    draw_roc(report, f"{report.method} after round {report.rounds}", picture)
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        _show(report, confidence, picture)
    for wrong in report.contradictions:
        raise typer.Exit(_complain(wrong))


def _show(report: "AuditReport", confidence: float, picture: Path) -> None:
    from equipoise.reporting.fitted_table import FittedTable

    title = f"{report.method} after round {report.rounds}"
    head = ["attack", "unit", "of", "AUC", "TPR at 1%", "TPR at 0.1%", "advantage", f"ε ≥ ({confidence:.0%})"]
    accounted = report.guarantee is not None
    body = [[*_row(each), *([_accounted(each)] if accounted else [])] for each in report.attacks]
    if body:
        table = FittedTable([*head, *(["ε accounted"] if accounted else [])], body, words=["attack", "of"], title=title)
        out_console.print(table, "", sep="")
    if report.attacks:
        delta = report.attacks[0].bound.delta
        out_console.print(f"δ = {delta:g}. Picture: {escape(str(picture))}", highlight=False, soft_wrap=True)
    for note in report.notes:
        out_console.print(f"Not attacked: {escape(note)}.", highlight=False)


def _row(attack: "Attack") -> list[str]:
    scores = attack.scores
    rates = [f"{100 * scores.true_positives_at(rate):.1f}%" for rate in (0.01, 0.001)]
    return [
        attack.name,
        attack.unit,
        attack.target,
        f"{scores.auc:.3f}",
        *rates,
        f"{scores.advantage:.3f}",
        f"{attack.least_epsilon:.2f}",
    ]


def _accounted(attack: "Attack") -> str:
    if not attack.covered:
        return "not covered"
    return _INFINITE if attack.accounted is None else f"{attack.accounted:.2f}"


def _complain(wrong: "Attack") -> int:
    from equipoise.cli.console import err_console

    err_console.print(
        f"equipoise: {wrong.name} learned more than the guarantee allows: ε is at least {wrong.least_epsilon:.2f}, and "
        f"{wrong.accounted:.2f} is accounted for; the noise or the accounting is wrong",
        highlight=False,
        soft_wrap=True,
    )
    return 1
