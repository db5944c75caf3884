"""Record forecasts that no federation makes, on the data of a sweep: naive ones, and gradient boosted trees.

    python experiments/learn2pfed/outside.py experiments/learn2pfed/NAME.toml --data DATA OPTIONS \\
        --record experiments/learn2pfed/results/NAME-outside.jsonl

with NAME forecast, newcomers, and day-ahead (`--only naive`).

Trees are scikit-learn's HistGradientBoostingRegressor with its own settings (pip install 'equipoise[trees]'): one model
per client from its own samples, and one of all clients that train, from the same inputs as the linear models of the
sweep. The number of trees, at most 100, is the one that is best on validation samples. Newcomers get a model of their
own history, and that of the others as it is; only they are scored then. The records are read as those of runs, with
`algorithm.name` "naive" or "trees".
"""

import argparse
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise.data.config import DataSection
from equipoise.data.federation import Federation
from equipoise.data.sources import data_folder
from equipoise.evaluation.conformal import LEVEL, Forecasts, conformal_margin
from equipoise.evaluation.figures import summarize
from equipoise.evaluation.forecast_errors import ForecastErrors, interval_figures
from equipoise.evaluation.forecast_scores import NAIVE, ClientForecastScores, ForecastRow, ForecastScores, series_of
from equipoise.metrics import find_metrics
from equipoise.runs.recording import kept_settings
from equipoise.runs.sweep import expand_sweep, run_settings
from equipoise.storage.client_scores import TRAINED, UNSEEN
from equipoise.storage.result_records import Record, add_records
from equipoise.storage.run_folder import read_toml

TREES = 100
Model = Callable[[int, np.ndarray], np.ndarray]
"""Returns the scaled forecasts of samples of a client, one row per sample."""


class Trees:
    """Gradient boosted trees."""

    def __init__(self) -> None:
        """Remember the models of all clients, which the history of newcomers does not change."""
        self.pooled: dict[Any, Callable[[np.ndarray], np.ndarray]] = {}

    def fitted(self, federation: Federation, clients: list[int]) -> Callable[[np.ndarray], np.ndarray]:
        """Return the forecasts of trees that these clients' samples train, as a function of samples."""
        from sklearn.ensemble import HistGradientBoostingRegressor

        train, judge = (np.concatenate([each[who] for who in clients]) for each in _parts(federation))
        model = HistGradientBoostingRegressor(max_iter=TREES, early_stopping=False, random_state=0)
        model.fit(*_arrays(federation, train))
        stage = TREES - 1
        if len(judge):
            x, y = _arrays(federation, judge)
            stage = int(np.argmin([np.mean((made - y) ** 2) for made in model.staged_predict(x)]))

        def predict(x: np.ndarray) -> np.ndarray:
            return next(made for k, made in enumerate(model.staged_predict(x)) if k == stage)[:, None]

        return predict

    def alone(self, federation: Federation) -> Model:
        """Return models of each client's own samples."""
        made: dict[int, Callable[[np.ndarray], np.ndarray]] = {}

        def model(who: int, samples: np.ndarray) -> np.ndarray:
            if who not in made:
                made[who] = self.fitted(federation, [who])
            return made[who](_arrays(federation, samples)[0])

        return model

    def together(self, federation: Federation, origin: Any) -> Model:
        """Return the model of all clients that train, which is the same for the same origin and seed."""
        if origin not in self.pooled:
            self.pooled[origin] = self.fitted(federation, federation.by_name[0])
        return lambda who, samples: self.pooled[origin](_arrays(federation, samples)[0])


def _parts(federation: Federation) -> tuple[Any, Any]:
    return federation.train, federation.validation


def _arrays(federation: Federation, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, y = federation.gather(torch.from_numpy(samples))
    return x.numpy(), y.numpy().reshape(len(samples))


def naive(federation: Federation, kind: Any) -> Model:
    """Return the naive forecasts of a kind."""
    return lambda who, samples: series_of(federation).naive(kind, samples)


def scored(federation: Federation, model: Model) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Return the figures of a model as a run has them, and the scores of single clients."""
    [metric] = find_metrics(["rmse"])
    rows, clients = list[ForecastRow](), dict[str, dict[str, float]]()
    found: dict[str, Any] = {}
    training, unseen = federation.by_name
    # Where there are newcomers, it is they who are looked at.
    for group, members in ((TRAINED, [] if unseen else sorted(training)), (UNSEEN, sorted(unseen))):
        tests, judged, sizes = [], [], []
        for who in members:
            scores = ClientForecastScores(federation, who)
            point, validation = model(who, federation.test[who]), model(who, federation.validation[who])
            actual, known = (_targets(federation, part[who]) for part in (federation.test, federation.validation))
            margin = conformal_margin(Forecasts(validation, validation, validation), known, LEVEL)
            ends = Forecasts(point, point, point).widened(margin)
            errors = ForecastErrors.of(scores.own(point), scores.actual, scores.naive["weekly"], scores.naive_error)
            inside = interval_figures(scores.own(ends.lower), scores.own(ends.upper), scores.actual)
            name = federation.names[who]
            rows.append(ForecastRow(name, "personal", group == UNSEEN, True, errors, inside))
            mse = float(np.mean((point - actual) ** 2))
            clients.setdefault(group, {})[name] = float(f"{mse**0.5:.6g}")
            tests.append((mse, mse**0.5))
            judged.append(float(np.mean((validation - known) ** 2)) ** 0.5)
            sizes.append(len(actual))
        if members:
            place = found.setdefault("unseen", {"clients": len(members)}) if group == UNSEEN else found
            place["personal"] = summarize(np.array(tests), np.array(judged), metric, np.array(sizes))
    series = series_of(federation)
    found["forecast"] = ForecastScores(rows, series.unit, series.step, series.horizon).summary()
    return found, clients


def _targets(federation: Federation, samples: np.ndarray) -> np.ndarray:
    return federation.y.numpy()[samples].reshape(len(samples), -1).astype(np.float64)


def methods(
    federation: Federation, only: list[str], trees: Trees, origin: Any
) -> Iterator[tuple[dict[str, Any], Callable[[], Model]]]:
    """Yield the settings of each method, and what makes its models."""
    if "naive" in only:
        for kind in NAIVE:
            yield {"algorithm.name": "naive", "algorithm.kind": kind}, lambda kind=kind: naive(federation, kind)
    if "trees" in only:
        yield {"algorithm.name": "trees", "algorithm.pooled": False}, lambda: trees.alone(federation)
        yield {"algorithm.name": "trees", "algorithm.pooled": True}, lambda: trees.together(federation, origin)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="sweep whose data are forecast")
    parser.add_argument("--data", type=Path, default=None, help="folder of data sets")
    parser.add_argument("--record", type=Path, required=True, help="file of records to add to")
    parser.add_argument("--cuts", type=float, nargs="*", help="origins; by default all of the sweep")
    parser.add_argument("--seeds", type=int, nargs="*", help="seeds; by default all of the sweep")
    parser.add_argument("--history", type=int, help="unseen_history; by default all of the sweep")
    parser.add_argument("--only", nargs="*", default=["naive", "trees"], choices=["naive", "trees"])
    given = parser.parse_args()
    seen, trees = set(), Trees()
    for cell in expand_sweep(read_toml(given.file), scale="small")[0]:
        section, seed = cell.experiment.data, cell.seed
        assert isinstance(section, DataSection)
        settings = kept_settings(run_settings(cell.experiment))
        data = {key: value for key, value in settings.items() if key.startswith("data.")}
        key = (repr(data), seed)
        if (
            key in seen
            or (given.cuts and data["data.cut"] not in given.cuts)
            or (given.seeds and seed not in given.seeds)
            or (given.history and data["data.unseen_history"] != given.history)
        ):
            continue
        seen.add(key)
        federation = section.federation(data_folder(given.data), seed)
        for own, make in methods(federation, given.only, trees, (seed, data["data.cut"])):
            start = time.perf_counter()
            figures, clients = scored(federation, make())
            kept = {**data, **own}
            digest = blake2b(repr(sorted(kept.items())).encode(), digest_size=6).hexdigest()
            costs = {"bytes_up": 0, "bytes_down": 0, "gradient_samples": 0}
            costs["seconds"] = round(time.perf_counter() - start, 1)
            facts = {"dataset": federation.title, "clients": len(federation.by_name[0]), "rounds": 1, "metric": "rmse"}
            summary = _rounded({**facts, "higher_is_better": False, **figures, **costs})
            record = Record(digest, seed, kept, summary=summary, clients=clients, scale="small")
            add_records(given.record, [record])
            print(seed, own, data["data.cut"], summary.get("unseen", summary)["personal"]["rmse"], flush=True)


if __name__ == "__main__":
    main()
