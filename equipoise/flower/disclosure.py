"""The list of all that leaves a client, and which of it privacy covers, for its owner to read before joining."""

import math

from equipoise.algorithms.schema import MessageSchema
from equipoise.flower.protocol import STATUSES
from equipoise.flower.release_plan import ReleasePlan
from equipoise.metrics import MetricCollection


def disclosures(
    schema: MessageSchema,
    metrics: MetricCollection,
    plan: ReleasePlan | None,
    *,
    trains: bool,
    scores: bool,
    counts: bool,
    size: bool,
    success: bool = False,
    horizon: int = 0,
    unit: str = "",
) -> list[str]:
    """Return one line for each kind of thing that leaves a client.

    Args:
        schema: the shapes of the algorithm's messages.
        metrics: the metrics of the scores.
        plan: what is released under privacy; None without privacy.
        trains: whether the client trains.
        scores: whether scores are sent.
        counts: whether numbers of samples and solves are sent.
        size: whether the algorithm needs the number of training samples.
        success: whether the success of an attack is counted.
        horizon: number of values that a sample of a time series forecasts; 0: there are no forecasts.
        unit: the unit in which their errors are computed.
    """
    lines = ["what leaves this client:"]
    if trains:
        lines += _update(schema, plan)
    not_covered = "" if plan is None else " (not covered by privacy)"
    if scores:
        columns = ", ".join(("loss", *(metric.name for metric in metrics.metrics)))
        lines.append(f"- scores: {columns} of its models on its own samples, as often as the server asks{not_covered}")
        lines.append(f"- sizes: numbers of training, validation and test samples, with the scores{not_covered}")
        if metrics.arrays:
            n = metrics.outputs
            lines.append(f"- confusion matrices: {n} x {n} numbers per model, with the scores{not_covered}")
        if success:
            lines.append(
                "- counts of the attack's success: four numbers per model, of its predictions on the client's test "
                f"samples, with the scores{not_covered}"
            )
        if horizon:
            own_unit = f" in {unit}" if unit else ""
            lines.append(
                f"- errors of forecasts{own_unit}: {2 * horizon + 9} numbers per model and per naive forecast, when "
                "the server says that training is over: sums over the test samples of errors (for each step, squared "
                "ones, relative ones) and of the values themselves, and coverage and width of intervals"
                f"{not_covered}"
            )
    else:
        lines.append(f"- no scores, no sizes of splits, no confusion matrices{', no forecasts' if horizon else ''}")
    if counts:
        solves = ", iterations of equilibrium solves and, if asked for, spectral radii" if plan is None else ""
        lines.append(f"- counters: samples processed in training and for scores{solves}{not_covered}")
        if trains and schema.diagnostics:
            lines.append(f"- diagnostics: one number each with every update: {', '.join(schema.diagnostics)}")
        if size:
            lines.append(f"- the number of training samples, when it joins{not_covered}")
    else:
        lines.append("- no counters and no number of samples, only that they are switched off")
    lines.append(
        "- its name, whether it trains, the layout of its model, and for every order the order's own numbers and one "
        f"word of status: {', '.join(STATUSES)}{not_covered}"
    )
    lines.append(f"- not sent, but seen by the server: when it is online and how long it takes{not_covered}")
    if plan is None:
        lines.append("none of this is covered by privacy, because the experiment has no section [privacy]")
    return lines


def _update(schema: MessageSchema, plan: ReleasePlan | None) -> list[str]:
    """Return the lines about the tensors of an update."""
    tensors = [
        f"{name} {list(shape)} ({math.prod(shape):,} {'number' if math.prod(shape) == 1 else 'numbers'})"
        for name, (shape, _) in schema.up.items()
    ]
    total = sum(math.prod(shape) for shape, _ in schema.up.values())
    lines = [f"- an update of {total:,} numbers for every order to train: {', '.join(tensors)}"]
    if plan is None:
        return lines
    if plan.central:
        lines.append(
            f"  clipped, but without noise: the server adds noise to the sum and must be trusted; {plan.planned:,} "
            "updates are planned, and this client can check their number, not their epsilon"
        )
    elif plan.local is not None:
        one, planned = (_number(plan.epsilon(count)) for count in (1, plan.planned))
        lines.append(
            f"  covered by privacy of single samples: gradients clipped and noised here (sigma {plan.sigma:.4g}); "
            f"epsilon {one} for one, {planned} for all {plan.planned:,} planned (delta {plan.delta:g})"
        )
    else:
        one, planned = (_number(plan.epsilon(count)) for count in (1, plan.planned))
        lines.append(
            f"  covered by privacy: clipped and noised here (sigma {plan.sigma:.4g}); epsilon {one} for one, {planned} "
            f"for all {plan.planned:,} planned (delta {plan.delta:g})"
        )
    return lines


def _number(epsilon: float) -> str:
    return f"{epsilon:.4g}" if math.isfinite(epsilon) else "infinity"
