"""FedAMP and FedCAC: who learns from whom."""

from typing import Any

import numpy as np
import pytest
import torch

from equipoise.algorithms import FedAMP, FedAvg, FedCAC
from equipoise.algorithms.fedcac import critical, overlaps
from equipoise.config.uploads import UploadSettings
from equipoise.data.federation import from_clients
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.reducers import Mean
from equipoise.state import State
from tests.support.problems import FULL, LeastSquares, classification, least_squares, simulation

COMMON: dict[str, Any] = {"lr": 0.05, "epochs": 2, "batch": 4}


def finished(algorithm: Any, *given: Any, **options: Any) -> Simulation:
    run = simulation(algorithm, *given, **{"rounds": 3, "participation": 1.0, **options})
    run.run()
    return run


def twins() -> Any:
    """Clients 0 and 1 have the same samples, client 2 has others."""
    x, y = (t.numpy() for t in classification().gather(torch.arange(30)))
    parts = [(x[:15], y[:15]), (x[:15], y[:15]), (x[15:], y[15:])]
    return from_clients([{"train": part, "test": part} for part in parts])


# FedAMP


def weights(algorithm: FedAMP, w: torch.Tensor) -> np.ndarray:
    return algorithm._weights(w)[0].numpy()


def test_fedamps_weights_are_those_of_the_paper() -> None:
    w = torch.randn(5, 300_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 500 + 3
    w[1] = w[0]
    d = np.array([[((a - b) ** 2).sum() for b in w.numpy()] for a in w.numpy()])
    xi = 0.1 / 0.7 * np.exp(-d / 0.7) * ~np.eye(5, dtype=bool)
    xi += np.diag(1 - xi.sum(1))
    algorithm = FedAMP(alpha_k=0.1, sigma=0.7)
    np.testing.assert_allclose(weights(algorithm, w), xi, rtol=1e-9)
    np.testing.assert_allclose(float(algorithm._weights(w)[1]), np.sort(d[~np.eye(5, dtype=bool)])[9], rtol=1e-9)


def test_heurfedamps_weights_are_those_of_the_paper() -> None:
    w = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit = (w / w.norm(dim=1, keepdim=True)).numpy()
    e = np.exp(3.0 * unit @ unit.T) * ~np.eye(4, dtype=bool)
    expected = 0.4 * e / e.sum(1, keepdims=True) + 0.6 * np.eye(4)
    algorithm = FedAMP(similarity="cosine", own_weight=0.6, sigma=3.0)
    np.testing.assert_allclose(weights(algorithm, w), expected, rtol=1e-12)


def test_with_a_wide_attraction_all_have_the_mean_and_with_a_narrow_one_their_own() -> None:
    w = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    np.testing.assert_allclose(weights(FedAMP(sigma=1e12), w), np.full((4, 4), 0.25), rtol=1e-9)
    np.testing.assert_array_equal(weights(FedAMP(sigma=1e-3), w), np.eye(4))


@pytest.mark.parametrize("settings", [{}, {"similarity": "cosine"}, {"begin": "cloud"}])
def test_clients_with_equal_data_stay_equal_and_absent_ones_keep_their_row(settings: dict) -> None:
    run = finished(FedAMP(lr=0.1, batch=FULL, **settings), twins())
    torch.testing.assert_close(run.server.w[0], run.server.w[1], rtol=1e-12, atol=1e-14)
    assert not torch.allclose(run.server.w[0], run.server.w[2])
    run = simulation(FedAMP(lr=0.1, batch=FULL, **settings), twins(), participation=1)
    for round in (1, 2, 3):
        before = run.server.w
        run.advance()
        [here] = run.sample(round)
        absent = [i for i in range(3) if i != here]
        assert torch.equal(run.server.w[absent], before[absent])
        assert torch.equal(run.server.w[here], run.store.get(here).w)
    run.close()


def test_fedamps_newcomers_get_the_mean_and_change_nothing() -> None:
    run = finished(FedAMP(**COMMON))
    torch.testing.assert_close(run.algorithm.broadcast(run.server, 6).u, run.server.w.mean(0))
    distance = run.algorithm.broadcast(run.server, 0).distance
    assert run.algorithm.diagnostics(State(), State(distance=distance)) == {"squared_distance": distance}
    assert run.lines[-1]["diagnostics"]["squared_distance"] > 0


def test_fedamp_refuses_weights_below_zero_and_pulls_that_diverge(problem: LeastSquares) -> None:
    with pytest.raises(EquipoiseError, match=r"alpha_k = 1 is not allowed with sigma = 1 and 6 clients.*at most 0.2"):
        simulation(FedAMP(alpha_k=1.0))
    with pytest.raises(EquipoiseError, match=r"lam / alpha_k = 600, for which algorithm.lr = 0.01 is too large"):
        simulation(FedAMP(lam=100.0))


# FedCAC


def test_critical_parameters_are_the_largest_of_every_tensor() -> None:
    c = torch.rand(3, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = critical(c, [7, 11], 0.5)
    assert mask[:, :7].sum(1).tolist() == [3, 3, 3]
    assert mask[:, 7:].sum(1).tolist() == [2, 2, 2]
    for row, chosen in zip(c, mask, strict=True):
        for part in (slice(0, 7), slice(7, 11)):
            assert row[part][chosen[part]].min() > row[part][~chosen[part]].max()
    assert not critical(c, [7, 11], 0.1).any()  # less than one of a tensor
    assert critical(torch.tensor([[0.0, 0.0, 3.0]]), [3], 1.0).tolist() == [[False, False, True]]
    assert critical(torch.tensor([[2.0, 2.0, 1.0]]), [3], 0.4).tolist() == [[True, True, False]]


def test_overlaps_of_masks_of_one_size_are_what_they_have_in_common() -> None:
    M = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]]).bool()
    expected = torch.tensor([[1, 0.5, 0], [0.5, 1, 0.5], [0, 0.5, 1]])
    torch.testing.assert_close(overlaps(M), expected)
    unequal = overlaps(torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]).bool())
    torch.testing.assert_close(unequal, torch.tensor([[1, 1 - 1 / 4], [1 - 1 / 2, 1]]))


def test_if_everything_is_critical_fedcac_is_fedavg_with_equal_weights(problem: LeastSquares) -> None:
    """Also after beta rounds, as all overlaps are equal."""
    settings = {"lr": 0.05, "batch": FULL, "steps": 2}
    cac = least_squares(problem, FedCAC(tau=1.0, beta=2, **settings), rounds=4)
    avg = least_squares(problem, FedAvg(**settings), rounds=4, uploads=UploadSettings(reducer=Mean()))
    assert cac.server.M.all()
    for i in range(4):
        torch.testing.assert_close(cac.algorithm.broadcast(cac.server, i).s, avg.server.w, rtol=1e-10, atol=1e-12)


def test_after_beta_rounds_critical_parameters_are_the_clients_own() -> None:
    run = simulation(FedCAC(**COMMON, beta=1), participation=1.0)
    run.advance()
    shared = run.server.u
    sent = []
    aggregate = run.aggregate
    run.aggregate = lambda round, uploads, names: sent.extend(uploads.uploads) or aggregate(round, uploads, names)
    run.advance()
    run.close()
    for i in range(6):
        own, s = sent[i].message.w, run.algorithm.broadcast(run.server, i).s
        assert torch.equal(s, torch.where(run.server.M[i], own, run.server.w))
        assert not torch.equal(own, shared[i])


def test_clients_with_equal_data_share_their_critical_parameters() -> None:
    run = finished(FedCAC(lr=0.1, batch=FULL, beta=1), twins())
    assert torch.equal(run.server.M[0], run.server.M[1])
    assert not torch.equal(run.server.M[0], run.server.M[2])
    x, y = (t.numpy() for t in classification().gather(torch.arange(20)))
    same = finished(FedCAC(lr=0.1, batch=FULL, beta=1), from_clients([{"train": (x, y), "test": (x, y)}] * 3))
    for u in same.server.u:
        torch.testing.assert_close(u, same.server.w, rtol=1e-12, atol=1e-14)


def test_a_client_without_a_mask_begins_at_the_global_model() -> None:
    run = simulation(FedCAC(**COMMON), participation=2)
    run.advance()
    run.close()
    for i in set(range(6)) - set(run.sample(1)):
        assert torch.equal(run.algorithm.broadcast(run.server, i).s, run.server.w)
    for i in run.sample(1):
        assert not torch.equal(run.algorithm.broadcast(run.server, i).s, run.server.w)
    assert torch.equal(run.algorithm.broadcast(run.server, 99).s, run.server.w)
