"""Runs of many kinds, in one process or in several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from equipoise.attacks import ATTACKS, Attack, AttackContext
from equipoise.callbacks import BestModel, EarlyStopping
from equipoise.callbacks.callback_list import CallbackList
from equipoise.config.uploads import UploadSettings
from equipoise.distributed.ranks import Ranks, current_ranks
from equipoise.engine.simulation import Simulation
from equipoise.executors import build
from equipoise.models.base import BodyAndHead
from equipoise.privacy.mechanisms import Privacy
from equipoise.reducers import REDUCERS
from equipoise.state import State
from tests.support import series
from tests.support.problems import EVERY, KINDS, classification, image_module, images, registered, simulation
from tests.support.reducers import IN_RUNS

CLIENTS = 9


class Average(Attack):
    """Malicious clients know what the others send, and send the opposite of their mean."""

    fraction: float = 0.3

    def messages(self, context: AttackContext) -> Sequence[State]:
        mean = {k: -torch.stack([m[k] for m in context.benign]).mean(0) for k in context.benign[0]}
        return [State(mean) for _ in context.names]


def normalized() -> nn.Module:
    """A model with BatchNorm statistics, which are averaged."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BodyAndHead(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 3))


def uploads(method: str, settings: UploadSettings) -> dict[str, Any]:
    return {"algorithm": registered(method), "uploads": settings, "rounds": 2}


def cases() -> dict[str, dict[str, Any]]:
    """Return arguments of `simulation` by the name of the case.

    What happens to uploads is the same in every round, so two are enough; methods may do more after the second one.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in EVERY:
        found[f"{name} threads"] = {"algorithm": registered(name), "rounds": 3}
    for name in KINDS:
        found[f"{name} stacked"] = {"algorithm": registered(name), "mode": "stacked", "rounds": 3}
    for turn, method in enumerate(("fedavg", "flame")):
        for rule, reducer in IN_RUNS.items():
            found[f"{method} {rule}"] = uploads(method, UploadSettings(None, reducer))
        found[f"{method} fltrust"]["participation"] = 1.0  # the client that it trusts has to be there
        # An attack sees messages and not methods: each with one of the two, by turns.
        for attack in [*(cls(fraction=0.3) for cls in [*ATTACKS.values()][turn::2]), Average()]:
            settings = UploadSettings(attack, REDUCERS["krum"]())
            if not (attack.needs_weights and method == "flame"):  # it sends none
                pictures = {"federation": images(CLIENTS), "module": image_module()} if attack.success() else {}
                found[f"{method} {type(attack).__name__}"] = uploads(method, settings) | pictures
        for where in ("local", "central"):
            privacy = Privacy(clip=1.0, sigma=0.1, where=where)
            settings = UploadSettings(None, REDUCERS["weighted-mean"](), privacy)
            found[f"{method} {where}"] = uploads(method, settings)
    found["statistics"] = {"algorithm": registered("fedavg"), "module": normalized()}
    found["unseen"] = {"algorithm": registered("fedavg-ft"), "federation": classification(CLIENTS).holding_out(0.4, 0)}
    loads = {"federation": series.federation(5, unseen=("c3",)), "module": nn.Linear(24, 6), "loss": "pinball"}
    with torch.no_grad():
        for parameter in loads["module"].parameters():
            parameter.fill_(0.01)
    for mode in ("threads", "stacked"):
        found[f"forecasts {mode}"] = {"algorithm": registered("fedavg-ft"), "mode": mode, **loads}
    found["metrics"] = {"algorithm": registered("ditto"), "metrics": ("macro-f1", "auroc", "accuracy")}
    found["callbacks"] = {"algorithm": registered("ditto"), "callbacks": True}
    found["memory"] = {"algorithm": registered("ditto"), "rounds": 8, "checkpoint_every": 1, "participation": 3}
    return found


def run_case(
    given: dict[str, Any], folder: Path, ranks: Ranks, *, new: bool = True, back: int = 0, **more: Any
) -> Simulation:
    """Run a case, or resume it, going back by so many checkpoints."""
    given = {"participation": 0.7, "checkpoint_every": 2, "federation": classification(CLIENTS), **given, **more}
    if given.get("callbacks"):
        given["callbacks"] = CallbackList([BestModel(), EarlyStopping(patience=2, min_delta=0.1)])
    # Stacks of one client, so that a few clients are stacks enough for several processes.
    with mock.patch.multiple(build, _FEWEST=1, _MOST=1):
        run = simulation(**given, folder=folder, ranks=ranks, new=new)
    if not new:
        run.resume(back)
    run.run()
    return run


def run_cases(out: str, how: str, rounds: str, *names: str) -> None:
    """Run or resume cases in this process, which is one of several.

    Args:
        out: the folder of all runs.
        how: "new", "resume" or "back" (by one checkpoint).
        rounds: the number of rounds, or 0 for that of the case.
        names: names of cases, none for all.
    """
    torch.set_num_threads(1)
    ranks = current_ranks()
    assert ranks.size > 1
    for name, given in cases().items():
        if not names or name in names:
            more = {"rounds": int(rounds)} if int(rounds) else {}
            run_case(given, Path(out) / name, ranks, new=how == "new", back=int(how == "back"), **more)
    ranks.close()
