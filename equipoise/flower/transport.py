"""Sending orders and collecting answers over Flower's grid; what is not an answer to an order is refused."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import httpx
from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from torch import Tensor

from equipoise.algorithms.schema import Shapes
from equipoise.flower.codec import RejectedMessage
from equipoise.flower.protocol import NOBODY, Answer, Order, content, open_message, size
from equipoise.state import State

_LOOK = 0.25  # seconds between two looks for answers
_NODES = 2.0  # seconds between two looks for nodes


@dataclass(frozen=True)
class PendingOrder:
    """An order that is on its way or at work."""

    node: int
    name: str
    order: Order
    sent: float
    "when, by time.monotonic"


@dataclass(frozen=True)
class Reply:
    """A client's reply to an order."""

    order_sent: PendingOrder
    answer: Answer
    tensors: State
    seconds: float
    "between the order and the look that found its answer"


class Transport:
    """What goes out and comes in, with what was refused and why."""

    def __init__(self, grid: Grid, accepts: Shapes, report: Callable[[str, str], None]):
        self.grid, self.accepts, self._report = grid, accepts, report
        self.waiting: dict[str, PendingOrder] = {}
        self.nodes: dict[int, NodeInfo] = {}
        self.looked = 0.0
        self.turned_away: dict[int, float] = {}
        "nodes that cannot take part, and when that was found"
        self.refused: Counter[str] = Counter()
        self.bytes_sent = 0
        self.bytes_received = 0

    def online(self, now: bool = False) -> dict[int, NodeInfo]:
        """The nodes that are there, as of a moment ago."""
        if now or time.monotonic() - self.looked > _NODES:
            self.nodes = {node.node_id: node for node in self.grid.get_nodes()}
            self.looked = time.monotonic()
        return self.nodes

    def send(self, node: int, name: str, order: Order, tensors: dict[str, Tensor], ttl: float) -> None:
        # One at a time: a model for each of many clients need not be in memory at once.
        kind = "query" if order.hello else "train" if order.train else "evaluate"
        message = Message(content(order, tensors), node, kind, ttl=ttl, group_id=str(order.exchange))
        try:
            identities = [identity for identity in self.grid.push_messages([message]) if identity]
        except Exception as error:  # a node that has just gone must not end the run
            identities = []
            self._report("unsent", f"{name}: {type(error).__name__}: {error}")
        if not identities:
            self.refuse("unsent", name, "Flower did not take the order")
            self._give_up(node, order)
        for identity in identities:
            self.waiting[identity] = PendingOrder(node, name, order, time.monotonic())
            self.bytes_sent += size(message)

    def _give_up(self, node: int, order: Order) -> None:
        """Who cannot answer a greeting is not greeted again at once: every greeting starts a process over there."""
        if order.hello:
            self.turned_away[node] = time.monotonic()

    def refuse(self, reason: str, who: str, text: str) -> None:
        self.refused[reason] += 1
        self._report("refused", f"{who}: refused ({reason}): {text}")

    def replies(self) -> Iterator[Reply]:
        """What has come in since the last look, of any exchange, and is what it should be."""
        for message in self._pull():
            asked = self.waiting.pop(message.metadata.reply_to_message_id, None)
            if asked is None:
                self.refuse("unknown", f"node {message.metadata.src_node_id}", "nobody asked, or it answered before")
                continue
            try:
                yield Reply(asked, *self._open(message, asked), time.monotonic() - asked.sent)
            except RejectedMessage as error:
                self.refuse(error.reason, asked.name, str(error))
                self._give_up(asked.node, asked.order)

    def _open(self, message: Message, asked: PendingOrder) -> tuple[Answer, State]:
        if message.has_error():
            # The error's text is the client's; it is not repeated, only its number.
            code = message.error.code
            if code == ErrorCode.NODE_UNAVAILABLE:
                raise RejectedMessage("unavailable", "its SuperNode has not been heard of")
            raise RejectedMessage("error", f"Flower reports error {code}")
        self.bytes_received += size(message)
        if message.metadata.src_node_id != asked.node:
            raise RejectedMessage("unknown", "the answer comes from another node than the one that was asked")
        answer, tensors = open_message(message, Answer, self.accepts)
        order = asked.order
        if (answer.run, answer.status) == (NOBODY, "failed"):
            raise RejectedMessage("failed", "it cannot work with this app; its own log says why")
        if (answer.run, answer.number) != (order.run, order.number):
            raise RejectedMessage("another-round", f"an answer to order {answer.number} of run {answer.run[:8]}")
        if not order.hello and answer.client != asked.name:
            raise RejectedMessage("unknown", f"the answer is that of {answer.client!r}")
        return answer, tensors

    def _pull(self) -> Iterable[Message]:
        if not self.waiting:
            return []
        try:
            return self.grid.pull_messages(list(self.waiting))
        except Exception:  # one answer that Flower cannot read must not cost the others
            found: list[Message] = []
            for identity, asked in list(self.waiting.items()):
                try:
                    found.extend(self.grid.pull_messages([identity]))
                except httpx.HTTPError:
                    raise  # the SuperLink is gone: no answer is to blame
                except Exception as error:
                    del self.waiting[identity]
                    self.refuse("malformed", asked.name, f"Flower cannot read it ({type(error).__name__})")
            return found

    def forget(self, before: int) -> None:
        """Orders of exchanges this long ago will not be answered any more."""
        self.waiting = {k: a for k, a in self.waiting.items() if a.order.hello or a.order.exchange >= before}

    def pause(self) -> None:
        time.sleep(_LOOK)
