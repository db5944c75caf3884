"""The same rounds of FedAvg in each of several simulators; `peers.py` runs each contestant in a process of its own.

Every contestant gets the same data and initial model: plain SGD, one epoch, 10 of 100 clients per round, no evaluation.
It is used as its documentation shows. Its answer is one line of JSON on standard output.
"""

import argparse
import functools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLIENTS, COHORT, CLASSES = 100, 10, 10


@dataclass(frozen=True)
class Case:
    """A model, the shape of its inputs, the size of a batch, the number of samples of a client, the learning rate."""

    model: str
    shape: tuple[int, ...]
    batch: int
    samples: int
    lr: float


CASES = {
    "softmax-100": Case("softmax", (784,), 100, 600, 0.01),
    "mlp-100": Case("mlp", (784,), 100, 600, 0.2),
    "lenet-10": Case("lenet", (3, 32, 32), 10, 600, 0.05),
    "lenet-64": Case("lenet", (3, 32, 32), 64, 640, 0.2),
}


def write_data(case, folder):
    """Write the samples of all clients: one pattern per class, coarse enough for convolutions, and noise."""
    rng = np.random.default_rng(0)
    count = CLIENTS * case.samples
    patterns = rng.standard_normal((CLASSES, *case.shape), dtype=np.float32)
    if len(case.shape) == 3:
        patterns = patterns[..., ::8, ::8].repeat(8, axis=-1).repeat(8, axis=-2)
    y = rng.integers(0, CLASSES, count)
    x = rng.standard_normal((count, *case.shape), dtype=np.float32)
    x += 0.2 * patterns[y]
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)


@functools.cache
def data(folder):
    """Return the samples of all clients; those of client i are rows i * samples to (i + 1) * samples."""
    x, y = (np.load(Path(folder) / f"{name}.npy", mmap_mode="c") for name in "xy")
    return torch.from_numpy(x), torch.from_numpy(y)


@functools.cache
def clients_data(folder, samples):
    x, y = data(folder)
    return [(x[i * samples : (i + 1) * samples], y[i * samples : (i + 1) * samples]) for i in range(CLIENTS)]


def build(case):
    """Return the model with the same initial weights for every contestant."""
    from equipoise.models import MODELS

    torch.manual_seed(0)
    return MODELS[case.model]().build(case.shape, CLASSES)


def loss_of(module, folder):
    """Return the loss of a model on the first samples of all clients."""
    x, y = data(folder)
    with torch.no_grad():
        return float(F.cross_entropy(module.eval()(x[:5000]), y[:5000]))


def now():
    """Return the time of the wall clock and the processor time of this process."""
    return time.perf_counter(), time.process_time()


def ours(case, folder, rounds, threads):
    """Run Equipoise in one process."""
    from equipoise.algorithms import ALGORITHMS
    from equipoise.config.engine import Engine, Schedule
    from equipoise.data.federation import Federation, RaggedIndices
    from equipoise.engine.simulation import Simulation
    from equipoise.training.task import Task

    x, y = data(folder)
    train = RaggedIndices(list(np.arange(CLIENTS * case.samples).reshape(CLIENTS, -1)))
    none = RaggedIndices([np.empty(0, np.int64)] * CLIENTS)
    names = tuple(f"client-{i:03d}" for i in range(CLIENTS))
    federation = Federation(x, y, names, train, none, none, classes=CLASSES)
    task = Task(build(case), federation.sample())
    never = 10**9
    schedule = Schedule(rounds=never, participation=COHORT, evaluate_every=never, checkpoint_every=never)
    algorithm = ALGORITHMS["fedavg"](lr=case.lr, batch=case.batch)
    run = Simulation(task, federation, algorithm, schedule, Engine(workers=threads))
    ends = []
    for _ in range(1 + rounds):
        run.advance()
        ends.append(now())
    run.close()
    samples = run.counters.gradient_samples / (1 + rounds)
    return ends, samples, task.to_module(algorithm.global_model(run.server))


def pfl(case, folder, rounds, threads):
    """Run pfl; with PFL_WORKER_ADDRESSES and PFL_WORKER_RANK, this is one process of several."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = build(case)
            self.seen = 0  # samples that this process trained on

        def loss(self, x, y):
            self.seen += len(y)
            return F.cross_entropy(self.module(x), y)

        @torch.no_grad()
        def metrics(self, x, y):
            return {"loss": Weighted(F.cross_entropy(self.module(x), y, reduction="sum").item(), len(y))}

    class Clock(TrainingProcessCallback):
        def __init__(self):
            self.ends = []

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            self.ends.append(now())
            return False, Metrics()

    np.random.seed(0)  # noqa: NPY002 - pfl draws from NumPy's global generator
    torch.set_num_threads(threads)
    users = [PyTorchTensorDataset(pair) for pair in clients_data(folder, case.samples)]
    sampler = get_user_sampler("minimize_reuse", list(range(CLIENTS)))
    dataset = FederatedDataset(users.__getitem__, sampler)
    net = Net()
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=1 + rounds,
            evaluation_frequency=10**9,  # the first round is evaluated nevertheless, and not measured
            train_cohort_size=COHORT,
            val_cohort_size=0,
        ),
        SimulatedBackend(dataset, dataset),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=case.lr, local_batch_size=case.batch),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,  # which prints them after every round
    )
    return clock.ends, net.seen / (1 + rounds), net.module


def _train(message, context):
    """Train one client of Flower; the data and the module stay in the worker process."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    case, folder = CASES[os.environ["PEERS_CASE"]], os.environ["PEERS_DATA"]
    module = _flower_module(case)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    pair = clients_data(folder, case.samples)[context.node_config["partition-id"]]
    optimizer = torch.optim.SGD(module.parameters(), lr=case.lr)
    module.train()
    seen = 0
    for x, y in DataLoader(TensorDataset(*pair), batch_size=case.batch, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        seen += len(y)
    content = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": seen})}
    return Message(content=RecordDict(content), reply_to=message)


@functools.cache
def _flower_module(case):
    return build(case)


def flower(case, folder, rounds, threads):
    """Run Flower's simulation on Ray; each worker process has `threads` cores."""
    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app = ClientApp(), ServerApp()
    client_app.train()(_train)
    ends, samples, last = [], [], []

    class Counting(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            samples.append(sum(r.content["metrics"]["num-examples"] for r in replies))
            return super().aggregate_train(server_round, replies)

    def after_round(number, arrays):
        if number:
            ends.append(now())
            last[:] = [arrays]

    @server_app.main()
    def main(grid, context):
        strategy = Counting(fraction_train=COHORT / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        initial = ArrayRecord(build(case).state_dict())
        strategy.start(grid=grid, initial_arrays=initial, num_rounds=1 + rounds, evaluate_fn=after_round)

    cores = len(os.sched_getaffinity(0))
    resources = {"client_resources": {"num_cpus": threads, "num_gpus": 0.0}, "init_args": {"num_cpus": cores}}
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=resources)
    module = build(case)
    module.load_state_dict(last[0].to_torch_state_dict())
    return ends, samples[-1], module


CONTESTANTS = {"ours": ours, "pfl": pfl, "flower": flower}


def work(arguments=None):
    """Run one contestant, and print seconds per round, samples per round and the loss afterwards."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contestant", choices=CONTESTANTS)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("data")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    os.environ["PEERS_CASE"], os.environ["PEERS_DATA"] = options.case, options.data
    case = CASES[options.case]
    ends, samples, module = CONTESTANTS[options.contestant](case, options.data, options.rounds, options.threads)
    wall, busy = ((ends[-1][k] - ends[0][k]) / options.rounds for k in (0, 1))  # the first round is a warm-up
    answer = {"seconds_per_round": wall, "cpu_seconds_per_round": busy, "samples_per_round": samples}
    answer |= {"loss": loss_of(module, options.data)}
    print("\n" + json.dumps(answer), flush=True)
