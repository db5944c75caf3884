"""A run ends exactly when its validation score has not improved for long enough."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import equipoise as eq
from equipoise.callbacks.base import Line, RunContext
from tests.support.callbacks import CLIENTS, Kill, StopAt, contents, module, train
from tests.support.flower_memory import Killed
from tests.support.problems import classification, small_mlp


class Scored(RunContext):
    """A run of which only scores are known."""

    metric, no_validation = "accuracy", ""

    def __init__(self, higher: bool):
        self.higher, self.reason = higher, ""

    @property
    def higher_is_better(self) -> bool:
        return self.higher

    def stop(self, reason: str) -> None:
        self.reason = reason


def by_hand(scores: list[float | None], patience: int, min_delta: float, higher: bool) -> int | None:
    """The first evaluation that, with the patience - 1 before it, is no improvement over all before these."""
    signed = [None if score is None else score if higher else -score for score in scores]
    gains = []
    for i, score in enumerate(signed):
        # the best so far is the last score that was an improvement in its time
        best = next((signed[j] for j in reversed(range(i)) if gains[j]), None)
        gains.append(score is not None and (best is None or score - best > min_delta))
    return next((i + 1 for i in range(patience - 1, len(gains)) if not any(gains[i - patience + 1 : i + 1])), None)


@given(
    scores=st.lists(st.none() | st.integers(0, 8).map(lambda k: k / 8), max_size=20),
    patience=st.integers(1, 6),
    min_delta=st.sampled_from([0.0, 0.125, 0.25]),
    higher=st.booleans(),
    resumed=st.integers(0, 20),
)
def test_it_stops_at_the_round_that_a_hand_computation_gives(
    scores: list[float | None], patience: int, min_delta: float, higher: bool, resumed: int
) -> None:
    callback = eq.EarlyStopping(patience=patience, min_delta=min_delta)
    run = Scored(higher)
    callback.attach(run)
    callback.on_run_begin()
    stopped = None
    for round, score in enumerate(scores, 1):
        callback.on_evaluation({"round": round, "personal": {"accuracy": 0.0, "validation_accuracy": score}})
        if run.reason:
            stopped = round
            break
        if round == resumed:  # the process ends and begins again
            saved = json.loads(json.dumps(callback.state_dict()))
            callback = eq.EarlyStopping(patience=patience, min_delta=min_delta)
            callback.attach(run)
            callback.on_run_begin()
            callback.load_state_dict(saved)
    assert stopped == by_hand(scores, patience, min_delta, higher)


@pytest.mark.parametrize("model", ["personal", "global", "hybrid"])
def test_a_run_stops_where_its_scores_say_and_is_the_beginning_of_the_whole_run(model: str) -> None:
    whole = train([])
    scores = [line[model]["validation_accuracy"] for line in whole.metrics]
    expected = by_hand(scores, 2, 0.0, True)
    assert expected is not None
    assert expected < 12  # else nothing is tested
    result = train([eq.EarlyStopping(model=model, patience=2)])
    assert result.metrics == whole.metrics[:expected]
    assert result.summary["rounds"] == expected
    best = max(scores[:expected])
    assert result.summary["stopped"] == (
        f"early stopping, as the {model} model's accuracy on validation samples did not improve in 2 evaluations "
        f"(the best was {best:.4g} in round {scores.index(best) + 1})"
    )


def test_without_personal_models_the_global_one_is_watched() -> None:
    result = train([eq.EarlyStopping(patience=1)], algorithm=eq.FedAvg(batch=5, lr=0.3))
    assert "the global model's accuracy" in result.summary["stopped"]
    with pytest.raises(eq.EquipoiseError, match=r"watches the personal model, but this run has scores of: global"):
        train([eq.EarlyStopping(model="personal")], algorithm=eq.FedAvg(batch=5))


def test_evaluations_count_and_not_rounds() -> None:
    whole = train([], rounds=30, evaluate_every=2)
    expected = by_hand(
        [line["personal"]["validation_accuracy"] for line in whole.metrics if "personal" in line], 2, 0, True
    )
    assert expected is not None
    assert train([eq.EarlyStopping(patience=2)], rounds=30, evaluate_every=2).summary["rounds"] == 2 * expected < 30


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_run_that_was_killed_and_resumed_stops_in_the_same_bytes(after: int, tmp_path: Path) -> None:
    callbacks = [eq.EarlyStopping(patience=3), eq.BestModel()]
    whole = train(callbacks, out=tmp_path / "whole", checkpoint_every=2)
    assert whole.summary["rounds"] >= after
    assert "stopped" in whole.summary
    with pytest.raises(Killed):
        train([*callbacks, Kill(after)], out=tmp_path / "killed", checkpoint_every=2)
    train(callbacks, out=tmp_path / "killed", resume=True, checkpoint_every=2)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    # resumed once more, even with more rounds, it stays as it is
    again = train(callbacks, out=tmp_path / "killed", resume=True, checkpoint_every=2, rounds=40)
    assert again.metrics == whole.metrics
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_other_settings_are_another_run(tmp_path: Path) -> None:
    train([eq.EarlyStopping(patience=2)], out=tmp_path / "run")
    with pytest.raises(eq.EquipoiseError, match=r"had callbacks.early-stopping.patience = 2, not 3"):
        train([eq.EarlyStopping(patience=3)], out=tmp_path / "run", resume=True)


def test_a_stop_in_a_round_that_is_not_scored_scores_it(tmp_path: Path) -> None:
    """With newcomers, who are scored after the last round only, and a target that the summary looks for."""
    options: dict[str, Any] = {"evaluate_every": 5, "unseen": 0.25, "targets": [0.0, 1.0]}
    whole = train([], rounds=7, **options)
    result = train([StopAt(round=7)], out=tmp_path / "run", **options)
    assert result.metrics == whole.metrics
    assert result.summary["stopped"] == "round 7 was enough"
    same = [key for key in whole.summary if key not in ("seconds", "samples_per_second", "peak_memory_mb")]
    assert {key: result.summary[key] for key in same} == {key: whole.summary[key] for key in same}
    assert result.summary["unseen"]["clients"] == 1
    assert result.summary["rounds_to"]["personal"] == {"0": 5, "1": None}
    assert (tmp_path / "run" / "checkpoint" / "round-000007.json").exists()


@pytest.mark.parametrize(
    ("split", "missing"),
    [((0.8, 0.0, 0.2), "no client has validation samples"), ((0.8, 0.2, 0.0), "no client has test samples")],
)
@pytest.mark.parametrize("callback", [eq.EarlyStopping(), eq.BestModel()], ids=["early-stopping", "best-model"])
def test_what_cannot_be_watched_is_said_before_the_first_round(
    split: tuple[float, ...], missing: str, callback: eq.Callback, tmp_path: Path
) -> None:
    with pytest.raises(eq.EquipoiseError, match=missing):
        eq.train(module(), CLIENTS, eq.Ditto(), head=None, split=split, callbacks=[callback], out=tmp_path / "run")
    assert not (tmp_path / "run" / "run.toml").exists()


def test_clients_that_are_malicious_or_without_validation_do_not_decide() -> None:
    seen: list[dict[str, float]] = []

    class Look(eq.Callback):
        def on_evaluation(self, line: Line) -> None:
            scores = self.run.validation_scores("personal")
            seen.append(scores)
            assert line["personal"]["validation_accuracy"] == pytest.approx(sum(scores.values()) / len(scores))

    attack = eq.SignFlip(clients=("client-3",))
    eq.train(small_mlp(), classification(), eq.Ditto(batch=4), rounds=2, attack=attack, callbacks=[Look()])
    assert [sorted(scores) for scores in seen] == [["client-0", "client-2", "client-4", "client-5"]] * 2
