"""The forecasts of a finished simulation, scored with models that are made one client at a time."""

from collections.abc import Callable, Collection, Iterator, Sequence

from torch import nn

from equipoise.data.federation import Federation
from equipoise.evaluation.forecast_scores import ForecastRow, ForecastScores, score_client, series_of
from equipoise.evaluation.forecaster import Forecaster
from equipoise.executors.base import ClientJob, ClientModel, Executor, ModelKind
from equipoise.torch_device import one_thread
from equipoise.training.task import Task

_AT_ONCE = 64  # clients whose models are made together


def models_made_alone(
    executor: Executor, round: int, clients: Sequence[int], kind: ModelKind, job: Callable[[int], ClientJob]
) -> Iterator[ClientModel | None]:
    """Yield the models of clients, each exactly as if it were made alone; the executor is closed at the end.

    Args:
        executor: makes the models.
        round: number of the last round.
        clients: the clients, which all trained ("personal"), or all did not ("unseen").
        kind: the kind of model.
        job: returns the job of a client.
    """
    # The rounding of a stack depends on its size, so each stack has one client here.
    at_once = 1 if executor.mode == "stacked" else _AT_ONCE
    try:
        for first in range(0, len(clients), at_once):
            jobs = [job(who) for who in clients[first : first + at_once]]
            yield from (model for model, _ in executor.models(round, jobs, kind))
    finally:
        executor.close()


def score_forecasts(
    task: Task,
    federation: Federation,
    personal: Callable[[list[int], ModelKind], Iterator[ClientModel | None]],
    shared: Callable[[int], nn.Module | None],
    module_of: Callable[[ClientModel], nn.Module],
    malicious: Collection[str],
) -> ForecastScores:
    """Score the forecasts of all clients' personal models, of the global model, and those that need no model.

    Args:
        task: the task that the models were trained for.
        federation: the clients and their data.
        personal: yields the personal models of clients.
        shared: returns the global model as a client uses it, if there is one.
        module_of: returns the module that a client predicts with.
        malicious: names of the clients that do not count in figures.
    """
    series, rows = series_of(federation), dict[int, list[ForecastRow]]()
    training, unseen = federation.by_name
    kinds: list[tuple[list[int], ModelKind]] = [(sorted(training), "personal"), (sorted(unseen), "unseen")]
    with one_thread():
        for clients, kind in kinds:
            for who, model in zip(clients, personal(clients, kind), strict=True) if clients else ():
                made = {"personal": None if model is None else module_of(model), "global": shared(who)}
                forecasters = {k: Forecaster(task, m, federation, who) for k, m in made.items() if m is not None}
                rows[who] = list(score_client(federation, who, forecasters, malicious))
    ordered = [row for who in sorted(rows) for row in rows[who]]
    return ForecastScores(ordered, series.unit, series.step, series.horizon)
