"""What a reducer remembers and draws: the same in both engines, resumed or not, in any order of the clients."""

from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.config.uploads import UploadSettings
from equipoise.errors import EquipoiseError
from equipoise.reducers import REDUCERS, CenteredClip, DnC, FlameFilter, FoolsGold
from equipoise.reducers.base import ContextReducer
from equipoise.reducers.context import ReductionContext
from equipoise.state import State, Uploads
from tests.support.flower_memory import deployed, in_both_engines, run, table
from tests.support.marks import slow_except
from tests.support.problems import classification, registered, simulation, small_mlp


class Heavy(ContextReducer):
    """Momentum of the mean difference, with a weight drawn for each client and round."""

    needs_origin = True

    @property
    def remembers(self) -> bool:
        return True

    def memory(self, like: State, clients: int) -> State:
        return State({f"m.{k}": torch.zeros_like(t) for k, t in like.items()}, rounds=torch.zeros(1))

    def reduce(self, uploads: Uploads, context: ReductionContext) -> tuple[State, State]:
        origin = context.origin_for(uploads, self)
        drawn = torch.tensor([context.generator(name).random() for name in context.names(uploads)])
        mean = uploads.combined((drawn / drawn.sum()).double())
        m = State({k: 0.5 * context.memory[f"m.{k}"] + 0.5 * (t - origin[k]) for k, t in mean.items()})
        memory = State({f"m.{k}": t for k, t in m.items()}, rounds=context.memory.rounds + 1)
        return State({k: origin[k] + t for k, t in m.items()}), memory


@pytest.fixture(autouse=True)
def heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REDUCERS.entries, "heavy", Heavy)


UPLOADS = UploadSettings(reducer=Heavy())


@pytest.mark.parametrize("name", ["fedavg", "flame"])
def test_a_resumed_run_is_an_unbroken_one(name: str, tmp_path: Path) -> None:
    whole = simulation(registered(name), folder=tmp_path / "whole", uploads=UPLOADS, rounds=6)
    whole.run()
    first = simulation(registered(name), folder=tmp_path / "broken", uploads=UPLOADS, rounds=6, checkpoint_every=2)
    for _ in range(3):  # the last of them is not in a checkpoint
        first.advance()
    again = simulation(registered(name), folder=tmp_path / "broken", uploads=UPLOADS, rounds=6, new=False)
    again.resume()
    assert again.done == 2
    again.run()
    for kind in ("server", "memory"):
        one, other = (r.server if kind == "server" else r.pipeline.reduction.memory for r in (whole, again))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[k], other[k]) for k in one)
    assert again.pipeline.reduction.memory.rounds.item() == 6


def test_an_interrupted_round_leaves_no_trace(tmp_path: Path) -> None:
    one = simulation(registered("fedavg"), uploads=UPLOADS)
    one.advance()
    before = one.pipeline.reduction.memory
    one.interrupted.set()
    assert not one.advance()
    assert one.pipeline.reduction.memory is before


@pytest.mark.parametrize("name", ["fedavg", "flame"])
def test_both_engines_remember_and_draw_the_same(name: str, tmp_path: Path) -> None:
    """With last messages the rows are those of all clients, whose names both engines must know."""
    over_flower, simulated = in_both_engines(
        tmp_path, registered(name), classification(4), small_mlp(), UPLOADS, {"reducer": {"name": "heavy"}},
        participation=0.6,
    )  # fmt: skip
    for field, t in simulated.server.items():
        np.testing.assert_allclose(over_flower.server[field], t, rtol=1e-9, atol=1e-12)
    assert over_flower.pipeline.reduction.memory.rounds.item() == len(simulated.lines)


DRAWING = {
    "centered-clip": CenteredClip(momentum=0.5, before=({"name": "bucketing"},)),
    "foolsgold": FoolsGold(),
    "dnc": DnC(coordinates=20, before=({"name": "nnm"},)),
    "flame-filter": FlameFilter(noise=0.1),
}


@pytest.mark.parametrize("name", slow_except(DRAWING, "centered-clip"))
def test_both_engines_agree_on_defences_that_remember_or_draw(name: str, tmp_path: Path) -> None:
    tables = {"reducer": {"name": name, **DRAWING[name].table()}}
    over_flower, simulated = in_both_engines(
        tmp_path, registered("flame"), classification(4), small_mlp(), UploadSettings(reducer=DRAWING[name]), tables,
        participation=0.6,
    )  # fmt: skip
    np.testing.assert_allclose(over_flower.server.w, simulated.server.w, rtol=1e-8, atol=1e-11)


def test_a_deployment_that_starts_again_remembers(tmp_path: Path) -> None:
    problem = classification(3), small_mlp(), table(registered("fedavg"))
    options = {"reducer": {"name": "heavy"}, "participation": 1.0}
    app, grid = deployed(tmp_path / "a", *problem, rounds=2, **options)
    run(app, grid, tmp_path / "a-out")
    app, grid = deployed(tmp_path / "a", *problem, rounds=4, **options)
    resumed = run(app, grid, tmp_path / "a-out", resume=True)
    app, grid = deployed(tmp_path / "b", *problem, rounds=4, **options)
    whole = run(app, grid, tmp_path / "b-out")
    assert all(torch.equal(resumed.server[k], whole.server[k]) for k in whole.server)


def test_algorithms_that_it_cannot_be_used_with_are_refused_by_name() -> None:
    with pytest.raises(EquipoiseError, match=r"Heavy remembers .* CFL reduces several groups .* 'median'"):
        simulation(registered("cfl"), uploads=UPLOADS)
    with pytest.raises(EquipoiseError, match=r"Heavy compares .* messages of FedPAC are not changes"):
        simulation(registered("fedpac"), uploads=UPLOADS)
