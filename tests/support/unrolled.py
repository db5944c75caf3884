"""Learn2pFed's unrolled network in one place, for comparison with the network that is spread over clients."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.algorithms import Learn2pFed
from equipoise.data.federation import Federation, from_clients
from equipoise.engine.simulation import Simulation
from equipoise.models.base import BodyAndHead
from equipoise.state import State
from tests.support.problems import LeastSquares, classification, linear_module, simulation, small_mlp

FAMILIES = ("lam", "rho", "eta", "theta")
BEGIN: dict[str, Any] = {"cells": 3, "rho": 1.5, "eta": 0.7, "gamma": 0.9, "theta": 0.8, "lam": 2.0}
LOSS: dict[str, Any] = {"fit": "loss", "solve": "gradient", "solve_steps": 3}


def pseudo_huber(output: Tensor, target: Tensor) -> Tensor:
    """A loss of the user's own, one value per sample."""
    return ((1 + (output - target).square()).sqrt() - 1).mean(-1)


def mean_pseudo_huber(output: Tensor, target: Tensor) -> Tensor:
    """The same as a mean over the batch, of which single values are not known."""
    return pseudo_huber(output, target).mean()


Pair = tuple[Tensor, Tensor]
LOSSES: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": nn.functional.cross_entropy,
    "squared": nn.functional.mse_loss,
    pseudo_huber: mean_pseudo_huber,
    mean_pseudo_huber: mean_pseudo_huber,
}


@dataclass
class Central:
    """The whole unrolled network in one place, written from the equations; every sample in sight."""

    algorithm: Learn2pFed
    loss_of_task: Any
    fits: list[list[Pair]]
    "features and targets that each client's networks are fitted to"
    judges: list[list[Pair]]
    "features and targets on which they are judged"
    sizes: list[int]
    bodies: list[list[Tensor]]
    "parameters of the clients' bodies, of which the features are functions"
    outputs: int
    leaves: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shape = self.fits[0][0][0].shape[1], self.outputs

    def start(self, raws: list[Tensor]) -> None:
        """Leaves of autograd, from the clients' vectors of learnables; those of the server begin alike for all."""
        a, k = self.algorithm, self.shape[0] * self.shape[1]
        sets = a.cells if a.sets == "each" else 1
        for raw in raws:
            cuts = raw.double().split([sets * k, sets, sets, sets])
            own = dict(zip(FAMILIES, (c.clone().requires_grad_() for c in cuts), strict=True))
            own["p"] = torch.zeros(sets).double().requires_grad_()
            own["gamma"] = torch.full((sets,), a.gamma).double().log().requires_grad_()
            self.leaves.append(own)

    def loss(self, detach: bool = False, start: Any = None) -> Tensor:
        """The sum of the clients' outer losses."""
        return torch.stack(self.losses(detach, start)).sum()

    def losses(self, detach: bool = False, start: Any = None) -> list[Tensor]:
        a, clients = self.algorithm, range(len(self.fits))
        networks = len(self.fits[0])
        zero = torch.zeros(networks, *self.shape).double()
        w, x = start or (zero, [(zero, zero, zero) for _ in clients])
        x = list(x)
        for cell in range(a.cells):
            k = cell if a.sets == "each" else 0
            total, weight = 0.0, 0.0
            for i in clients:
                own = self.leaves[i]
                raw = own["lam"].reshape(-1, *self.shape)[k]
                lam = raw.exp() if a.positive == "log" else raw.relu()
                rho, eta, theta = (own[name][k].exp() for name in ("rho", "eta", "theta"))
                eta, theta = rho if "eta" in a.follow else eta, rho if "theta" in a.follow else theta
                alpha, v, z = x[i]
                given = w.detach() if detach else w
                alpha = alpha + theta * (z - v + given)
                v = torch.stack([self.fitted(i, s, rho, (given + z + alpha)[s], v[s]) for s in range(networks)])
                z = eta / (lam + eta) * (v - given - alpha)
                x[i] = alpha, v, z
                pg = self.sizes[i] * (own["p"][k] + own["gamma"][k]).exp()
                total, weight = total + pg * (v - z - alpha), weight + pg
            w = total / weight
        self.w, self.x = w, x
        return [self.judged(i, x[i][1]) for i in clients]

    def judged(self, i: int, v: Tensor) -> Tensor:
        """A client's mean loss over all samples on which one of its networks is judged."""
        total, samples = torch.zeros(()).double(), 0
        for s, (x, y) in enumerate(self.judges[i]):
            if self.algorithm.fit == "squares":
                total = total + (x @ v[s] - y).square().sum()
            elif len(x):
                total = total + len(x) * LOSSES[self.loss_of_task](x @ v[s], y)
            samples += len(x)
        return total / max(samples, 1)

    def fitted(self, i: int, s: int, rho: Tensor, q: Tensor, v: Tensor) -> Tensor:
        """v after Eq. 10 or Eq. 14."""
        X, Y = self.fits[i][s]
        if self.algorithm.fit == "loss":
            return self.descended(X, Y, rho, q, v)
        H = X.T @ X + rho * torch.eye(self.shape[0]).double()
        if self.algorithm.solve == "closed":
            return torch.linalg.solve(H, rho * q + X.T @ Y)
        rate = self.algorithm.solve_rate / torch.linalg.eigvalsh(H).max()
        for _ in range(self.algorithm.solve_steps):
            v = v - rate * (H @ v - rho * q - X.T @ Y)
        return v

    def descended(self, X: Tensor, y: Tensor, rho: Tensor, q: Tensor, v: Tensor) -> Tensor:
        """v after steps of Eq. 14 on the task's own loss."""
        curvature = {"cross-entropy": 0.5, "squared": 2 / self.outputs}.get(self.loss_of_task, 1.0)
        smooth = curvature * torch.linalg.eigvalsh(X.T @ X / max(len(X), 1)).max()
        for _ in range(self.algorithm.solve_steps):
            v = v if v.requires_grad else v.requires_grad_()
            slope = rho * (v - q)
            if len(X):
                value = LOSSES[self.loss_of_task](X @ v, y)
                slope = slope + torch.autograd.grad(value, v, create_graph=True)[0]
            v = v - self.algorithm.solve_rate / (smooth + rho) * slope
        return v

    def gradients(self, detach: bool = False, start: Any = None) -> list[dict[str, Tensor]]:
        """The gradient by every learnable of every client, by one pass of autograd through the whole network."""
        leaves = [t for own in self.leaves for t in own.values()]
        found = iter(torch.autograd.grad(self.loss(detach, start), leaves, allow_unused=True, materialize_grads=True))
        return [{name: next(found) for name in own} for own in self.leaves]

    def body_gradients(self, detach: bool = False) -> list[Tensor]:
        """The gradient by every client's body."""
        leaves = [t for body in self.bodies for t in body]
        found = iter(torch.autograd.grad(self.loss(detach), leaves))
        return [torch.cat([next(found).flatten() for _ in body]) for body in self.bodies]


def central(run: Simulation) -> Central:
    """What a run of one round computed, with the features that its networks had."""
    algorithm, federation, task = run.algorithm, run.federation, run.task
    assert isinstance(algorithm, Learn2pFed)
    loss = next((name for name in LOSSES if task.loss.mean is name or task.loss.each is name), None)
    loss = loss or ("squared" if federation.y.is_floating_point() else "cross-entropy")
    fits, judges, sizes, bodies = [], [], [], []
    for i in range(len(federation)):
        client = run.store.get(i)
        body = task.to_module(client.network).body.double() if task.space.body_size else nn.Identity()
        bodies.append([p.requires_grad_() for p in body.parameters()])

        def rows(split: str, i: int = i, body: nn.Module = body) -> Pair:
            x, y = federation.gather(torch.from_numpy(getattr(federation, split)[i]))
            x = body(x.double())
            if len(task.space.entries) - len(bodies[-1]) > 1:
                x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
            if y.is_floating_point():
                return x, y.double().reshape(len(y), -1)
            return x, nn.functional.one_hot(y, task.outputs).double() if algorithm.fit == "squares" else y

        X, Y = rows("train")
        sizes.append(len(X))
        if algorithm.outer == "folds":
            k, n = algorithm.folds, np.arange(len(X))
            fold = n % k
            in_time = algorithm.fold_order == "blocks" or (algorithm.fold_order == "auto" and federation.chronological)
            if in_time:
                fold = np.searchsorted([len(X) * (j + 1) // k for j in range(k)], n, side="right")
            held = [(X[fold == j], Y[fold == j]) for j in range(k)]
            keeps = [~(near_block(federation, i, fold == j) if in_time else fold == j) for j in range(k)]
            fits.append([(X[keep], Y[keep]) for keep in keeps] + [(X, Y)])
            judges.append([*held, (X[:0], Y[:0])])
        else:
            fits.append([(X, Y)])
            judges.append([rows("validation") if algorithm.outer == "validation" else (X, Y)])
    return Central(algorithm, loss, fits, judges, sizes, bodies, task.outputs)


def near_block(federation: Federation, who: int, block: np.ndarray) -> np.ndarray:
    """The training samples that forecast an hour which a sample in the block forecasts, those of the block too."""
    series = federation.series
    if series is None:
        return block
    hours = [set(range(at, at + series.horizon)) for at in series.target[federation.train[who]].tolist()]
    held = set().union(*(own for own, inside in zip(hours, block, strict=True) if inside))
    return np.array([bool(own & held) for own in hours])


def forecasting() -> Federation:
    """Windows of noisy waves, of which the next two values are asked for."""
    rng = np.random.default_rng(5)
    parts = []
    for i in range(3):
        wave = np.sin(np.arange(40) * (0.3 + 0.1 * i)) + 0.1 * rng.normal(size=40)
        windows = np.lib.stride_tricks.sliding_window_view(wave, 7).copy()
        x, y = windows[:, :5], windows[:, 5:]
        parts.append({"train": (x[:20], y[:20]), "validation": (x[20:27], y[20:27]), "test": (x[27:], y[27:])})
    return from_clients(parts)


def two_outputs() -> nn.Module:
    return BodyAndHead(nn.Identity(), nn.Linear(5, 2))


TASKS: dict[str, tuple[Any, Any, Any]] = {
    "regression": (lambda: LeastSquares(3).federation(), linear_module, "squared"),
    "forecasting": (forecasting, two_outputs, "squared"),
    "classification": (lambda: classification(4), small_mlp, "cross-entropy"),
    "own loss": (forecasting, two_outputs, pseudo_huber),
    "own mean loss": (forecasting, lambda: small_mlp(outputs=2), mean_pseudo_huber),
}


def trained(task: str, algorithm: Learn2pFed, **schedule: Any) -> Simulation:
    """A finished run, by default of one round with all clients."""
    federation, module, loss = TASKS[task]
    schedule = {"rounds": 1, "participation": 1.0, **schedule}
    run = simulation(algorithm, federation(), module(), loss=loss, metric="mae" if callable(loss) else None, **schedule)
    run.run()
    return run


def gap(found: Tensor, meant: Tensor) -> float:
    """The largest difference, relative to numbers above one."""
    return float((found - meant).abs().max()) / max(1.0, float(meant.abs().max()))


def check_gradients(run: Simulation, whole: Central, detach: bool = False) -> None:
    """The slopes that clients and server found are those of the whole network."""
    meant = whole.gradients(detach)
    for i in range(len(run.federation)):
        client: State = run.store.get(i)
        assert gap(client.slope, torch.cat([meant[i][name] for name in FAMILIES])) < 1e-9
        if not detach:
            assert gap(run.server.slope[:, :, i], torch.stack([meant[i]["p"], meant[i]["gamma"]])) < 1e-9
    assert gap(run.server.w, whole.w.detach()) < 1e-9
