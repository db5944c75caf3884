"""Every reducer with every algorithm: it works, or is refused in one sentence before the first round."""

from typing import Any

import pytest

from equipoise.algorithms.base import Algorithm
from equipoise.config.uploads import UploadSettings
from equipoise.engine.aggregation_pipeline import AggregationPipeline
from equipoise.engine.compatibility import check_reducer
from equipoise.errors import EquipoiseError
from equipoise.reducers import CenteredClip, FLTrust, Median, Reducer, TrimmedMean
from tests.support.problems import registered, simulation
from tests.support.reducers import QUIET

REDUCERS: dict[str, Reducer] = QUIET | {
    "fltrust": FLTrust(root="client-0"),
    "nnm": TrimmedMean(before=({"name": "nnm"},)),
    "bucketing": CenteredClip(momentum=0.5, before=({"name": "bucketing"},)),
}


def test_works_or_is_refused_in_one_sentence(algorithm: Algorithm) -> None:
    """The uploads of one round, as they come, are reduced by every rule in turn."""
    run = simulation(algorithm, participation=1.0, rounds=2)
    seen: list[tuple[Any, ...]] = []
    aggregate = run.pipeline.aggregate

    def look(*given: Any) -> Any:
        seen.append(given)
        return aggregate(*given)

    run.pipeline.aggregate = look  # type: ignore[method-assign]
    run.advance()
    refused: dict[str, str] = {}
    for name, reducer in REDUCERS.items():
        settings = UploadSettings(reducer=reducer)
        try:
            check_reducer(algorithm, settings, run.server, run.schema)
        except EquipoiseError as error:
            refused[name] = str(error)
            continue
        pipeline = AggregationPipeline(settings, algorithm, run.start, run.draw_noise, None, 2, run.client_name)
        for given in seen[:1]:
            server, _ = pipeline.aggregate(*given)
            assert server.finite()
            assert server.shapes() == given[1].shapes()
    assert all(type(algorithm).__name__ in why for why in refused.values())
    assert not refused.keys() & {"median", "multi-krum", "rfa", "dnc", "nnm", "bulyan"}


def test_what_is_refused_says_why() -> None:
    for algorithm, reducer, why in (
        ("least-squares", "norm-bound", "messages of LeastSquares are not changes of anything"),
        ("learn2pfed", "sign-majority", "messages of Learn2pFed are not changes of anything"),
        ("fedrep", "crfl", "messages of FedRep are not whole models"),
        ("cfl", "crfl", "messages of CFL are not whole models"),
        ("cfl", "foolsgold", "CFL reduces several groups"),
    ):
        with pytest.raises(EquipoiseError, match=why):
            simulation(registered(algorithm), uploads=UploadSettings(reducer=QUIET[reducer]))


def test_heads_are_compared_where_messages_are_models() -> None:
    from equipoise.reducers import FoolsGold

    run = simulation(registered("ditto"), uploads=UploadSettings(reducer=FoolsGold(features="head")), rounds=1)
    run.run()
    memory = run.pipeline.reduction.memory
    assert memory["row.w"].shape[1] == run.task.space.size - run.task.space.body_size
    with pytest.raises(EquipoiseError, match=r"messages of FedRep are not whole models with a body and a head"):
        simulation(registered("fedrep"), uploads=UploadSettings(reducer=FoolsGold(features="head")), rounds=1).run()


def test_who_is_trusted_may_not_be_malicious() -> None:
    from equipoise.attacks import SignFlip

    uploads = UploadSettings(SignFlip(clients=("client-1",)), FLTrust(root="client-1"))
    with pytest.raises(EquipoiseError, match=r"trusts 'client-1', which is malicious"):
        simulation(registered("fedavg"), uploads=uploads, participation=1.0).run()


def test_settings_of_a_mixer_reach_a_run_and_its_table() -> None:
    rule = Median(before=({"name": "bucketing", "size": 3}, {"name": "nnm"}))
    assert rule.table() == {
        "before": [{"name": "bucketing", "size": 3}, {"name": "nnm", "malicious": 0.2}],
    }
    assert Median(**rule.table()) == rule
