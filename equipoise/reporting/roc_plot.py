"""A picture of attacks: ROC curves with logarithmic axes, where the few samples that leak surely can be seen."""

from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.reporting.figure_files import figure_file

if TYPE_CHECKING:
    from equipoise.runs.audit_report import AuditReport

_STYLES = {"sample": "-", "client": "--"}


def draw_roc(report: "AuditReport", title: str, path: Path) -> None:
    """Draw the ROC curve of each attack and write the picture.

    Args:
        report: the attacks.
        title: title of the picture.
        path: the file; its ending decides the format.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter

    with figure_file(path, size=(7, 6)) as figure:
        axes = figure.subplots()
        least = 1.0
        for attack in report.attacks:
            false, true = attack.roc()
            least = min([least, 1 / len(attack.scores.others), 1 / len(attack.scores.members)])
            label = f"{attack.name}, {attack.unit}, {attack.target} (AUC {attack.scores.auc:.3f})"
            axes.step(false, true, where="post", linestyle=_STYLES.get(attack.unit, "-"), label=label, linewidth=1.3)
        axes.plot([least, 1], [least, 1], color="grey", linestyle=":", label="guessing")
        axes.set(
            title=title,
            xscale="log",
            yscale="log",
            xlim=(least, 1),
            ylim=(least, 1),
            xlabel="false positive rate",
            ylabel="true positive rate",
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g}%"))
            axis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3, which="both", linewidth=0.5)
        axes.legend(fontsize=8, loc="lower right")
