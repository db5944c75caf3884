"""Orders and answers as messages of Flower's: what is not exactly one of them is refused."""

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.flower.codec import RejectedMessage, pack
from equipoise.flower.protocol import STATUSES, Answer, Order, content, open_message, size
from equipoise.settings import Settings
from tests.support.flower_memory import SUPERLINK, over_the_wire, speaking_as
from tests.support.messages import ALLOWED, NUMBERS, RUN, bits, examples, json_values, tensors_of


def sent(record: RecordDict) -> Message:
    with speaking_as(SUPERLINK):
        return over_the_wire(Message(record, 2, "query"))


def said(facts: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> Message:
    return sent(RecordDict({"equipoise": ConfigRecord({"message": pack(tensors or {}, facts)})}))


def refused(message: Message, cls: type[Settings] = Order) -> str:
    with pytest.raises(RejectedMessage) as caught:
        open_message(message, cls, ALLOWED)
    assert caught.value.reason == "malformed"
    assert 0 < len(str(caught.value)) <= 200
    return str(caught.value)


FACTS: list[Settings] = [
    Order(run=RUN),
    Order(run=RUN, exchange=2**53, client="é" * 256, clients=9, accepted=3, train=4, evaluate=3, finish=True),
    Order(run=RUN, hello=True, shared="down.w"),
    Answer(run=RUN, number=0, client=""),
    Answer(run=RUN, number=7, client="ward 3", status="hello", unseen=True, layout="abc", trained=1, samples=10**12),
    *(Answer(run=RUN, number=1, client="a", status=status, evaluated=5, adapted=6) for status in STATUSES),
]


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: type(facts).__name__)
def test_orders_and_answers_come_through_flower(facts: Settings) -> None:
    tensors = tensors_of(bytes(range(NUMBERS)))
    received = sent(content(facts, tensors))
    heard, found = open_message(received, type(facts), ALLOWED)
    assert heard == facts
    assert bits(found) == bits(tensors)
    assert size(received) == len(pack(tensors, facts.table()))
    heard, found = open_message(sent(content(facts)), type(facts), ALLOWED)
    assert (heard, found) == (facts, {})


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "message.run is missing"),
        ({"run": RUN, "exchnge": 1}, "it contains 'exchnge', which is not expected"),
        ({"run": RUN, "adapted": 1}, "it contains 'adapted', which"),  # that is for answers
        ({"run": RUN, "": 1}, "it contains ''"),
        ({"run": RUN, "__class__": "Order"}, "it contains '__class__'"),
        ({"run": RUN, "train": -1}, "message.train = -1 is not allowed"),
        ({"run": RUN, "accepted": -(2**70)}, "message.accepted"),
        ({"run": RUN, "exchange": 2**53 + 1}, "message.exchange = 9007199254740993 is not allowed"),
        ({"run": RUN, "exchange": 10**4000}, "message.exchange"),
        ({"run": RUN, "train": 1.0}, "message.train = 1.0 is not allowed"),
        ({"run": RUN, "train": float("nan")}, "message.train = nan is not allowed"),
        ({"run": RUN, "train": True}, "message.train = True is not allowed"),
        ({"run": RUN, "train": "1"}, "message.train = '1' is not allowed"),
        ({"run": RUN, "train": None}, "message.train = None is not allowed"),
        ({"run": RUN, "train": [1]}, "message.train"),
        ({"run": RUN, "hello": 1}, "message.hello = 1 is not allowed"),
        ({"run": RUN, "client": "x" * 257}, "message.client"),
        ({"run": RUN, "client": {"name": "a"}}, "message.client"),
        ({"run": RUN, "client": "\ud800"}, "message.client"),
        ({"run": RUN, "client": "a\nequipoise: all is well"}, "message.client"),
        ({"run": RUN, "shared": "\x1b[2J"}, "message.shared"),
        ({"run": RUN, "protocol": 2}, "message.protocol = 2 is not allowed; it must be 1"),
        ({"run": ""}, "message.run = ''"),
        ({"run": RUN[1:]}, "message.run"),
        ({"run": RUN + "0"}, "message.run"),
        ({"run": RUN + "\n"}, "message.run"),
        ({"run": RUN.upper()}, "message.run"),
        ({"run": f"../../{RUN[6:]}"}, "message.run"),
        ({"run": 7}, "message.run = 7"),
    ],
)
def test_facts_that_no_server_says_are_malformed(facts: dict[str, Any], words: str) -> None:
    assert words in refused(said(facts))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "message.number is missing"),
        ({"status": "splendid"}, "message.status = 'splendid' is not allowed"),
        ({"samples": -1}, "message.samples = -1"),
        ({"trained": 0.5}, "message.trained = 0.5"),
        ({"unseen": "no"}, "message.unseen = 'no'"),
        ({"train": 1}, "it contains 'train', which is not expected"),
        ({"layout": "0" * 300}, "message.layout"),
    ],
)
def test_facts_that_no_client_says_are_malformed(facts: dict[str, Any], words: str) -> None:
    usual = {"number": 1, "client": "a"} if facts else {}
    assert words in refused(said({"run": RUN, **usual, **facts}), Answer)


@given(
    facts=st.dictionaries(
        st.sampled_from([*Order.model_fields, "adapted"]) | st.text(max_size=4),
        json_values | st.integers(0, 3),
        max_size=3,
    ),
    run=st.sampled_from([RUN, RUN, None]),
)
@examples
def test_any_facts_are_malformed_or_an_order(facts: dict[str, Any], run: str | None) -> None:
    facts |= {} if run is None else {"run": run}
    try:
        order, _ = open_message(said(facts), Order, ALLOWED)
    except RejectedMessage as error:
        found = error.reason
    else:
        found = "an order"
        assert order.table() == Order(run=RUN).table() | facts
    assert found in ("malformed", "an order")


def test_tensors_in_a_message_are_looked_at_too() -> None:
    with pytest.raises(RejectedMessage) as caught:
        open_message(said({"run": RUN}, {"up.w": torch.zeros(4)}), Order, ALLOWED)
    assert caught.value.reason == "shape"


def records() -> dict[str, RecordDict]:
    good = pack({}, {"run": RUN})
    return {
        "nothing": RecordDict(),
        "another name": RecordDict({"message": ConfigRecord({"message": good})}),
        "another field": RecordDict({"equipoise": ConfigRecord({"order": good})}),
        "another field beside it": RecordDict({"equipoise": ConfigRecord({"message": good, "more": 1})}),
        "another record beside it": RecordDict({"equipoise": ConfigRecord({"message": good}), "more": ConfigRecord()}),
        "text": RecordDict({"equipoise": ConfigRecord({"message": "text"})}),
        "a list": RecordDict({"equipoise": ConfigRecord({"message": [good]})}),
        "arrays": RecordDict({"equipoise": ArrayRecord({"message": torch.zeros(3)})}),
        "no bytes": RecordDict({"equipoise": ConfigRecord({"message": b""})}),
    }


@pytest.mark.parametrize("case", records())
def test_records_of_another_kind_are_malformed(case: str) -> None:
    received = sent(records()[case])
    refused(received)
    assert size(received) == 0


def test_a_message_that_is_an_error_is_malformed() -> None:
    order = sent(content(Order(run=RUN)))
    with speaking_as(2):
        received = over_the_wire(Message(Error(1, "no"), reply_to=order))
    refused(received)
    assert size(received) == 0
