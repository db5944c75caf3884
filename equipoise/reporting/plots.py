"""Pictures that compare runs."""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.errors import EquipoiseError
from equipoise.reporting.attack_table import CONTROL, attack_of, defence_of, setting_labels
from equipoise.reporting.comparison import compare, diagnostics_in
from equipoise.reporting.figure_files import figure_file
from equipoise.storage.diagnostics import DIAGNOSTICS, TITLES
from equipoise.storage.model_kinds import HYBRIDS, SCORED
from equipoise.storage.run_folder import SHOWN
from equipoise.storage.run_index import FinishedRun, grouped

if TYPE_CHECKING:
    from equipoise.evaluation.cka import Similarity

STYLES: dict[str, Any] = {
    "personal": "-",
    "consensus": (0, (3, 1, 1, 1)),
    "global": "--",
    HYBRIDS["validation"]: ":",
    HYBRIDS["test"]: "-.",
}
MARKERS = {"personal": "o", "consensus": "^", "global": "s", HYBRIDS["validation"]: "*", HYBRIDS["test"]: "x"}

Point = tuple[float, float, float | None]
"""Position, mean, and standard deviation over seeds if there are several."""
_BAND = "_band"
"""Label of bands; matplotlib leaves labels that begin with an underscore out of legends."""
_FAINT = 0.15
_CONTROL = 0.4


def draw(kind: str, runs: list[FinishedRun], path: Path) -> None:
    """Draw a picture of runs and write it to a file.

    Args:
        kind: scores, losses, attacks, fairness, duals or learned.
        runs: the runs.
        path: the file; its ending (.png, .pdf or .svg) decides the format.
    """
    kinds: dict[str, Callable[[list[FinishedRun], Any], None]] = {
        "scores": _rounds,
        "losses": lambda runs, figure: _rounds(runs, figure, losses=True),
        "attacks": _attacks,
        "fairness": _fairness,
        "duals": _duals,
        "learned": _learned,
    }
    if len({run.summary["metric"] for run in runs}) > 1:
        raise EquipoiseError("these runs have different metrics; draw one picture per metric")
    with figure_file(path) as figure:
        kinds[kind](runs, figure)


def draw_curves(
    curves: Sequence[tuple[str, Sequence[tuple[float, list[float]]]]],
    path: Path,
    *,
    title: str = "",
    axis: str = "score",
    horizontal: str = "round",
    logarithmic: bool = False,
) -> None:
    """Draw values against rounds or megabytes, as means over seeds with bands of deviations, and write the picture.

    Args:
        curves: names, and the values of all seeds at each round.
        path: the file; its ending decides the format.
        title: title of the picture.
        axis: label of the vertical axis.
        horizontal: label of the horizontal axis; rounds are whole numbers.
        logarithmic: whether the vertical axis is logarithmic.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    with figure_file(path) as figure:
        axes = figure.subplots()
        for number, (name, values) in enumerate(curves):
            points = [_point(at, list(found)) for at, found in values]
            style = ("-", "--", ":", "-.")[number // 10 % 4]
            marker = "." if len(points) == 1 else ""
            _line(axes, points, linestyle=style, color=f"C{number % 10}", label=name, marker=marker)
        if horizontal == "round":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel=horizontal, ylabel=axis, title=title)
        if logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")  # the default writes powers as mathematics, which is off
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        figure.legend(*_legend(axes), fontsize="x-small", loc="outside right upper")


def draw_similarity(found: "list[Similarity]", path: Path) -> None:
    """Draw CKA against the layer, as mean, minimum and maximum over clients, and write the picture."""
    with figure_file(path) as figure:
        axis = figure.subplots()
        for similarity in found:
            mean = np.nanmean(similarity.values, axis=1)
            (line,) = axis.plot(mean, marker="o", label=f"{similarity.run[:50]}, after round {similarity.rounds}")
            low, high = np.nanmin(similarity.values, axis=1), np.nanmax(similarity.values, axis=1)
            axis.fill_between(range(len(mean)), low, high, color=line.get_color(), alpha=_FAINT, linewidth=0)
        if len({similarity.layers for similarity in found}) == 1:
            axis.set_xticks(range(len(found[0].layers)), found[0].layers, rotation=45, ha="right", fontsize=8)
        else:
            axis.set_xlabel("layer, from input to output")
        axis.set(ylim=(0, 1.02), ylabel="linear CKA (band: minimum to maximum)")
        axis.set_title("; ".join(sorted({similarity.between for similarity in found})), fontsize=9)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)


def _learned(runs: list[FinishedRun], figure: Any) -> None:
    """Draw how strongly each client's parameters are tied to the others', before and after training."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator
    from safetensors.numpy import load_file

    runs = [run for run in runs if (run.path / SHOWN).exists()]
    if not runs:
        raise EquipoiseError("none of these runs has learned which parameters to share; only runs of learn2pfed do")
    shown = [load_file(group[0].path / SHOWN) for group in grouped(runs)]  # the first seed of each
    panels = [("before training", shown[0]["begin.lam"])]
    panels += [(_name(row), found["lam"]) for row, found in zip(compare(runs), shown, strict=True)]
    every = np.concatenate([lam[lam > 0] for _, lam in panels] + [np.ones(1)])
    low, high = every.min(), every.max()
    figure.set_size_inches(max(8, 3.2 * len(panels)), 3.6)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    image = None
    for axis, (title, lam) in zip(axes, panels, strict=True):
        image = axis.imshow(lam, aspect="auto", norm=LogNorm(low, max(high, 10 * low)), interpolation="nearest")
        axis.set_title(textwrap.fill(title, 42), fontsize=7)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel("parameter")
        axis.set_facecolor("white")  # zero
    axes[0].set_ylabel("client")
    figure.colorbar(image, ax=axes, label="Λ (white: 0)", format=lambda value, _: f"{value:g}")


def _name(row: dict[str, Any]) -> str:
    return f"{row['algorithm']} {row['settings']}".strip()[:70]


def _scaled(runs: list[FinishedRun]) -> tuple[float, str]:
    metric = runs[0].summary["metric"]
    return (100, "test accuracy, mean over clients (%)") if metric == "accuracy" else (1, f"test {metric}")


def _rounds(runs: list[FinishedRun], figure: Any, losses: bool = False) -> None:
    """Draw scores or losses against rounds: solid lines for personal models, dashed lines for global ones."""
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    scale, label = (1, "test loss, mean over clients") if losses else _scaled(runs)
    field = "loss" if losses else runs[0].summary["metric"]
    curves: dict[tuple[Point, ...], list[str]] = {}
    styles: dict[tuple[Point, ...], tuple[Any, str]] = {}
    for number, (group, row) in enumerate(zip(grouped(runs), compare(runs), strict=True)):
        for kind in SCORED:
            points = _curve(group, kind, field, scale)
            if points:  # methods with the same global model share its curve
                curves.setdefault(points, []).append(f"{_name(row)} ({kind})")
                styles.setdefault(points, (STYLES[kind], f"C{number % 10}"))
    for points, labels in curves.items():
        style, colour = styles[points]
        marker = "." if len(points) == 1 else ""
        _line(axes, points, linestyle=style, color=colour, label=", ".join(labels), marker=marker)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="round", ylabel=label)
    axes.set_title(f"{runs[0].summary['dataset']}, {runs[0].summary['clients']} clients")
    axes.grid(alpha=0.3)
    axes.legend(*_legend(axes), fontsize="small")


def _duals(runs: list[FinishedRun], figure: Any) -> None:
    """Draw what clients report about their updates, one panel per number, against rounds."""
    from matplotlib.ticker import MaxNLocator

    names = diagnostics_in(runs)
    if not names:
        raise EquipoiseError("none of these runs has duals; runs of flame, flame-lp-proj, fedadmm and fedeq do")
    figure.set_size_inches(4.5 * len(names) + 3.5, 4.5)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        for number, (group, row) in enumerate(zip(grouped(runs), compare(runs), strict=True)):
            if points := _curve(group, DIAGNOSTICS, name, 1.0):
                marker = "." if len(points) == 1 else ""
                _line(axes, points, color=f"C{number % 10}", label=_name(row), marker=marker)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(title=TITLES.get(name, name), xlabel="round")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("mean over the clients of the round")
    figure.legend(*_legend(panels[0]), fontsize="x-small", loc="outside right upper")


def _point(at: float, values: list[float]) -> Point:
    return at, mean(values), stdev(values) if len(values) > 1 else None


def _curve(group: list[FinishedRun], kind: str, field: str, scale: float) -> tuple[Point, ...]:
    """Return mean and deviation over seeds at each round that was scored with all seeds."""
    found: dict[int, list[float]] = {}
    for run in group:
        for line in run.metrics:
            if (value := line.get(kind, {}).get(field)) is not None:
                found.setdefault(line["round"], []).append(scale * value)
    return tuple(_point(at, values) for at, values in sorted(found.items()) if len(values) == len(group))


def _line(axes: Any, points: Sequence[Point], **style: Any) -> None:
    """Draw means as a line, and the deviations as a band where there are several seeds."""
    at, means, deviations = zip(*points, strict=True)
    axes.plot(at, means, **style)
    if any(deviation is not None for deviation in deviations):
        centre = np.array(means)
        spread = np.array([np.nan if deviation is None else deviation for deviation in deviations])
        band = {"color": style["color"], "alpha": _FAINT, "linewidth": 0}
        if len(points) > 1:
            axes.fill_between(at, centre - spread, centre + spread, **band, label=_BAND)
        else:  # a band needs two points
            axes.errorbar(at, centre, spread, color=style["color"], capsize=3, label=_BAND)


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    """Return the entries of a legend, with one that says what the bands are, if there are any."""
    from matplotlib.patches import Patch

    handles, labels = axes.get_legend_handles_labels()
    if any(artist.get_label() == _BAND for artist in (*axes.collections, *axes.containers)):
        handles.append(Patch(color="grey", alpha=_FAINT, linewidth=0))
        labels.append("band: ± standard deviation over seeds")
    return handles, labels


def _attacks(runs: list[FinishedRun], figure: Any) -> None:
    """Draw one panel per attack; runs without malicious clients are in all panels."""
    under: dict[str, list[FinishedRun]] = {}
    controls = [run for run in runs if attack_of(run) == CONTROL]
    attacked = [run for run in runs if attack_of(run) not in (None, CONTROL)]
    for run, attack in zip(attacked, setting_labels(attacked, "attack", attack_of), strict=True):
        under.setdefault(attack, []).append(run)
    if not under:
        raise EquipoiseError("none of these runs has malicious clients; add a section [attack] with a fraction")
    free = [run for run in runs if not _fraction(run)]
    scale, label = _scaled(runs)
    defences = setting_labels(runs, "reducer", defence_of)
    methods = {id(run): _method(run, defence) for run, defence in zip(runs, defences, strict=True)}
    names = sorted(set(methods.values()))
    panels = figure.subplots(1, len(under), squeeze=False, sharey=True)[0]
    figure.set_size_inches(3.5 * len(under) + 3.5, 4.5)
    for axes, (attack, some) in zip(panels, under.items(), strict=True):
        for number, name in enumerate(names):
            for kind in ("personal", "global", "hybrid"):
                style = {"linestyle": STYLES[kind], "color": f"C{number % 10}", "marker": MARKERS[kind]}
                for drawn, more in (
                    (controls, {"alpha": _CONTROL, "label": f"{name} ({kind}), no attack"}),
                    (some, {}),
                ):
                    values: dict[float, list[float]] = {}
                    for run in (run for run in [*free, *drawn] if drawn and methods[id(run)] == name):
                        if (value := run.summary.get(kind, {}).get(run.summary["metric"])) is not None:
                            values.setdefault(_fraction(run), []).append(scale * value)
                    if values:
                        points = [_point(fraction, found) for fraction, found in sorted(values.items())]
                        _line(axes, points, **{**style, "label": f"{name} ({kind})", **more})
        axes.set(title=attack, xlabel="fraction of malicious clients")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(label)
    figure.legend(*_legend(panels[0]), fontsize="x-small", loc="outside right upper")


def _method(run: FinishedRun, defence: str) -> str:
    """Return the algorithm, and the defence if there is one."""
    return str(run.config["algorithm.name"]) + ("" if defence in ("mean", "weighted-mean") else f" with {defence}")


def _fraction(run: FinishedRun) -> float:
    """Return the fraction of malicious clients."""
    return len(run.summary.get("malicious", ())) / int(run.summary["clients"])


def _fairness(runs: list[FinishedRun], figure: Any) -> None:
    """Draw the variance of losses against the score; lower right is better."""
    axes = figure.subplots()
    scale, label = _scaled(runs)
    several = False
    for number, row in enumerate(compare(runs)):
        for kind, marker in MARKERS.items():
            x, y = row[kind], row[f"{kind}_loss_variance"]
            if x is None or y is None:
                continue
            colour = f"C{number % 10}"
            axes.scatter(scale * x, y, marker=marker, color=colour, label=f"{_name(row)} ({kind})")
            if row[f"{kind}_std"] is not None:
                spread = scale * row[f"{kind}_std"], row[f"{kind}_loss_variance_std"]
                axes.errorbar(scale * x, y, spread[1], spread[0], color=colour, linewidth=0.8)
                several = True
    axes.set(xlabel=label, ylabel="variance of test losses over clients")
    if several:
        axes.set_title("bars: ± standard deviation over seeds", fontsize="small")
    axes.grid(alpha=0.3)
    figure.legend(fontsize="x-small", loc="outside right upper")
    figure.set_size_inches(9, 5)
