"""The summary of a run: what summary.json contains in both engines."""

from collections import Counter
from typing import Any

from equipoise.engine.counters import solver_figures
from equipoise.engine.run import Run
from equipoise.metrics import AnyMetric, Metric
from equipoise.storage.model_kinds import KINDS
from equipoise.training.memory_usage import peak_memory_mb


def summarize_run(
    run: Run, title: str, clients: int, scores: dict[str, Any], adaptation_samples: int
) -> dict[str, Any]:
    """Summarize a run.

    Args:
        run: the run, as it is.
        title: name of the data.
        clients: number of clients that train.
        scores: figures of each kind of model.
        adaptation_samples: samples that were trained on to make the models of the last evaluation.
    """
    counters, settings = run.counters, run.pipeline.settings
    # What was trained to make the models of the last evaluation (fine-tuning) is part of their price.
    samples = counters.gradient_samples + adaptation_samples
    return {
        "algorithm": type(run.algorithm).__name__,
        "dataset": title,
        "seed": run.schedule.seed,
        "clients": clients,
        "rounds": run.done,
        **({"stopped": run.stopped} if run.stopped is not None else {}),
        "metric": run.task.metric.name,
        "higher_is_better": run.task.metric.higher_is_better,
        "metrics": {metric.name: _described(metric) for metric in run.task.metrics.metrics},
        **scores,
        "bytes_up": counters.bytes_up,
        "bytes_down": counters.bytes_down,
        **_efficiency(run),
        "gradient_samples": samples,
        "left_out": counters.left_out,
        **solver_figures(counters.solves),
        **({"privacy": run.pipeline.ledger.guarantee(run.releases())} if settings.privacy is not None else {}),
        **_attack(run),
        **({"devices": _device_counts(run.budgets)} if run.budgets else {}),
        **({"rounds_to": _rounds_to_targets(run)} if run.schedule.targets else {}),
        "mode": run.mode,
        "device": str(run.task.device),
        "seconds": round(counters.seconds, 3),
        "samples_per_second": round(samples / max(counters.seconds, 1e-9), 1),
        "peak_memory_mb": round(peak_memory_mb(), 1),
    }


def _attack(run: Run) -> dict[str, Any]:
    """Return who was malicious, and how the success of the attack was measured, if it was."""
    attack = run.pipeline.settings.attack
    if attack is None:
        return {}
    measure = attack.success()
    return {
        "malicious": sorted(run.pipeline.malicious),
        **({"attack_measure": measure.facts()} if measure is not None else {}),
    }


def _described(metric: AnyMetric) -> dict[str, Any]:
    """Return which values of a metric are better; None if it is not one number."""
    one_number = isinstance(metric, Metric) or metric.form == "number"
    return {"higher_is_better": metric.higher_is_better if one_number else None}


def _efficiency(run: Run) -> dict[str, Any]:
    """Return what the method costs: parameters, traffic, and the memory of a client's step."""
    sent = run.counters.bytes_up + run.counters.bytes_down
    return {
        "bytes_a_round": round(sent / max(run.done, 1)),
        "parameters_shared": run.schema.parameters_shared,
        "parameters_personal": run.schema.parameters_personal,
        "parameters_sent": sent // run.task.w0.element_size(),
        "step_memory_mb": round(run.task.step_bytes(run.algorithm.batch, run.longest) / 1e6, 3),
    }


def _device_counts(budgets: dict[str, int]) -> dict[str, int]:
    """Return how many clients have each iteration limit, the largest first."""
    return {str(k): n for k, n in sorted(Counter(budgets.values()).items(), reverse=True)}


def _rounds_to_targets(run: Run) -> dict[str, dict[str, int | None]]:
    """Return, for each kind of model and each target score, the first evaluated round that reached it."""
    name, better = run.task.metric.name, run.task.metric.better
    found: dict[str, dict[str, int | None]] = {}
    for kind in ("global",) if run.rescored else KINDS:  # of other kinds only the last round was scored
        scores = [(line["round"], line[kind].get(name)) for line in run.lines if kind in line]
        if scores:
            found[kind] = {
                f"{target:g}": next((r for r, s in scores if s is not None and not better(target, s)), None)
                for target in run.schedule.targets or ()
            }
    return found
