"""Charts of scores and losses against rounds and bytes, and of scores under attack."""

from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import Any

from equipoise.reporting.attack_table import CONTROL
from equipoise.reporting.comparison import diagnostics_in, other_metrics
from equipoise.reporting.html.chart import DASHES, SYMBOLS, Chart, Method, Trace, chart, plain, trace, unit
from equipoise.storage.diagnostics import DIAGNOSTICS, TITLES

Point = tuple[float, float, float]
"""Position, value, and standard deviation over seeds."""


def _curve(method: Method, kind: str, field: str, at: Callable[[dict[str, Any]], float], scale: float) -> list[Point]:
    """Return the means over seeds at each evaluation that all seeds have."""
    found: dict[int, list[tuple[float, float]]] = {}
    for run in method.runs:
        for line in run.metrics:
            if (value := line.get(kind, {}).get(field)) is not None:
                found.setdefault(line["round"], []).append((at(line), scale * value))
    points = []
    for _, pairs in sorted(found.items()):
        if len(pairs) == len(method.runs):
            values = [value for _, value in pairs]
            points.append((mean(x for x, _ in pairs), mean(values), stdev(values) if len(values) > 1 else 0.0))
    return points


def _lines(methods: Sequence[Method], field: str, at: Callable[[dict[str, Any]], float]) -> list[Trace]:
    """Return the traces of a figure; `{metric}` in its name is the first metric."""
    traces = []
    for method in methods:
        for kind in method.kinds:
            scale = method.scale if field.startswith("{metric}") else 1.0
            traces += _line(method, kind, _curve(method, kind, field.format(metric=method.metric), at, scale))
    return traces


def _line(method: Method, kind: str, points: list[Point]) -> list[Trace]:
    """Return a line through points, after its band if there are several seeds; nothing without points."""
    if not points:
        return []
    x, y, deviation = (list(column) for column in zip(*points, strict=True))
    line = trace(
        method,
        kind,
        x=x,
        y=y,
        customdata=deviation,
        mode="lines+markers" if len(points) < 20 else "lines",
        line={"color": method.colour, "dash": DASHES[kind], "width": 2},
        marker={"symbol": SYMBOLS[kind], "size": 6},
        hovertemplate="%{x}: %{y:.4~f} ± %{customdata:.2~g}",
        type="scatter",
    )
    several = len(method.runs) > 1 and len(points) > 1
    return [_band(method, kind, x, y, deviation), line] if several else [line]


def _band(method: Method, kind: str, x: list[float], y: list[float], deviation: list[float]) -> Trace:
    above = [a + d for a, d in zip(y, deviation, strict=True)]
    below = [a - d for a, d in zip(y, deviation, strict=True)]
    return trace(
        method,
        kind,
        x=[*x, *x[::-1]],
        y=[*above, *below[::-1]],
        fill="toself",
        fillcolor=f"{method.colour}26",
        line={"width": 0},
        hoverinfo="skip",
        mode="lines",
        type="scatter",
    )


_BAND = "the band is one standard deviation over seeds, if there are several."


def scores(methods: Sequence[Method]) -> Chart:
    """Return the chart of scores against rounds."""
    data = _lines(methods, "{metric}", lambda line: line["round"])
    return chart("scores", "Score against rounds", f"Mean over clients; {_BAND}", data, "round", unit(methods))


def pooled(methods: Sequence[Method]) -> Chart:
    """Return the chart of pooled scores against rounds."""
    data = _lines(methods, "{metric}_pooled", lambda line: line["round"])
    note = f"On the test samples of all clients together, so that each sample counts once; {_BAND}"
    return chart("pooled", "Pooled score against rounds", note, data, "round", unit(methods))


def others(methods: Sequence[Method]) -> list[Chart]:
    """Return one chart for each further metric, against rounds."""
    charts = []
    for name in other_metrics([run for method in methods for run in method.runs]):
        some = [method for method in methods if method.metric != name]
        data = _lines(some, name, lambda line: line["round"])
        note = f"Mean over the clients whose test samples define it; {_BAND}"
        charts.append(chart(f"metric-{name}", f"{name} against rounds", note, data, "round", f"test {plain(name)}"))
    return charts


def diagnostics(methods: Sequence[Method]) -> list[Chart]:
    """Return one chart for each number that clients report about their updates, against rounds."""
    charts = []
    for name in diagnostics_in([run for method in methods for run in method.runs]):
        data = []
        for method in methods:
            points = _curve(method, DIAGNOSTICS, name, lambda line: line["round"], 1.0)
            # It belongs to no kind of model; the page switches it with the first kind that the method has.
            lines = _line(method, method.kinds[0], points) if method.kinds else []
            data += [{**each, "name": plain(method.name)} for each in lines]
        note = f"Of the clients of each round, after their updates; {_BAND}"
        title = plain(TITLES.get(name, name))
        charts.append(
            chart(f"{DIAGNOSTICS}-{name}", f"{title.capitalize()} against rounds", note, data, "round", title)
        )
    return charts


def losses(methods: Sequence[Method]) -> Chart:
    """Return the chart of losses against rounds."""
    data = _lines(methods, "loss", lambda line: line["round"])
    return chart("losses", "Loss against rounds", "On test samples, mean over clients.", data, "round", "test loss")


def traffic(methods: Sequence[Method]) -> Chart | None:
    """Return the chart of scores against bytes, or None if nothing was sent."""
    data = _lines(methods, "{metric}", lambda line: (line["bytes_up"] + line["bytes_down"]) / 1e6)
    if not any(max(trace["x"]) > 0 for trace in data):
        return None
    note = "All bytes between server and clients so far, in both directions."
    return chart("bytes", "Score against bytes", note, data, "sent (MB)", unit(methods))


def attacks(methods: Sequence[Method]) -> list[Chart]:
    """Return one chart per attack and problem: scores of benign clients against the fraction of malicious clients."""
    found: dict[tuple[str, str, str], list[Method]] = {}
    for method in methods:
        if _fraction(method) and not _is_control(method):
            strength = [v for k, v in method.config.items() if k.startswith("attack.") and k not in _NOT_THE_ATTACK]
            found.setdefault((_problem(method), str(method.config["attack.name"]), str(strength)), []).append(method)
    charts = []
    several = len({problem for problem, *_ in found}) > 1
    for number, ((problem, attack, _), some) in enumerate(found.items()):
        same = [m for m in methods if _problem(m) == problem and m.metric == some[0].metric]
        benign = [m for m in same if not _fraction(m)]
        controls = [m for m in same if _is_control(m)]
        where = f", {some[0].runs[0].summary['dataset']}" if several else ""
        note = "Benign clients only; one line per method and kind of model."
        note += " Faint: the same clients when nobody attacks." if controls else ""
        axis = {"title": {"text": "fraction of malicious clients"}, "tickformat": ".0%"}
        title = f"Under attack: {attack}{where}"
        data = [{**line, "opacity": _FAINT} for line in _under_attack(controls)] + _under_attack([*benign, *some])
        made = chart(f"attack-{attack}-{number}", title, note, data, "", unit(some), xaxis=axis, showlegend=True)
        charts.append({**made, "height": _PLOT + _ENTRY * len(data)})
    return charts


_FAINT = 0.35
_PLOT, _ENTRY = 300, 20
"""Height in pixels of a chart, and of a line in its legend."""
_NOT_THE_ATTACK = ("attack.name", "attack.fraction", "attack.clients")


def _under_attack(methods: Sequence[Method]) -> list[Trace]:
    lines: dict[tuple[str, str], list[Method]] = {}
    for method in methods:
        for kind in method.kinds:
            lines.setdefault((method.settings("attack."), kind), []).append(method)
    data = []
    for (_, kind), group in lines.items():
        points = sorted((_fraction(m), mean(found)) for m in group if (found := m.scores(kind)))
        if points:
            x, y = (list(column) for column in zip(*points, strict=True))
            first = group[-1]  # an attacked one, whose name is shown
            data.append(
                trace(
                    first,
                    kind,
                    x=x,
                    y=y,
                    mode="lines+markers",
                    line={"color": first.colour, "dash": DASHES[kind]},
                    marker={"symbol": SYMBOLS[kind], "size": 8},
                    hovertemplate=f"{plain(first.name)}, %{{x:.0%}}: %{{y:.4~f}}",
                    type="scatter",
                )
            )
    return data


def _is_control(method: Method) -> bool:
    return bool(_fraction(method)) and method.config.get("attack.name") == CONTROL


def _problem(method: Method) -> str:
    return str(sorted((k, str(v)) for k, v in method.config.items() if k.startswith(("data.", "privacy."))))


def _fraction(method: Method) -> float:
    summary = method.runs[0].summary
    return len(summary.get("malicious", ())) / int(summary["clients"])
