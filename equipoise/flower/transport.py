"""Orders and replies over Flower's grid; everything that is not a valid reply to an order is refused."""

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

_POLL = 0.25  # seconds between two requests for replies
_NODE_POLL = 2.0  # seconds between two requests for the nodes that are online


@dataclass(frozen=True)
class PendingOrder:
    """An order without a reply so far."""

    node: int
    name: str
    order: Order
    sent: float
    "time of sending, by time.monotonic"


@dataclass(frozen=True)
class Reply:
    """A client's reply to an order."""

    order_sent: PendingOrder
    answer: Answer
    tensors: State
    seconds: float
    "time from sending the order to receiving the reply"


class Transport:
    """Sends orders, receives replies, and counts what was refused by reason."""

    def __init__(self, grid: Grid, accepts: Shapes, report: Callable[[str, str], None]):
        """Create a transport.

        Args:
            grid: Flower's connection to the nodes.
            accepts: names, shapes and types of the tensors that a reply may contain.
            report: gets the name of an event and its text.
        """
        self.grid, self.accepts, self._report = grid, accepts, report
        self.waiting: dict[str, PendingOrder] = {}
        "orders without a reply, by the identity of the message"
        self.nodes: dict[int, NodeInfo] = {}
        self.looked = 0.0
        self.turned_away: dict[int, float] = {}
        "time at which a node was turned away"
        self.refused: Counter[str] = Counter()
        "number of refused messages by reason"
        self.bytes_sent = 0
        self.bytes_received = 0

    def online(self, now: bool = False) -> dict[int, NodeInfo]:
        """Return the nodes that are online: `now`, or as of a moment ago."""
        if now or time.monotonic() - self.looked > _NODE_POLL:
            self.nodes = {node.node_id: node for node in self.grid.get_nodes()}
            self.looked = time.monotonic()
        return self.nodes

    def send(self, node: int, name: str, order: Order, tensors: dict[str, Tensor], ttl: float) -> None:
        """Send an order to a node.

        Args:
            node: the node.
            name: its client's name, for reports.
            order: the order.
            tensors: the tensors that go with it.
            ttl: seconds for which Flower keeps the message.
        """
        # One message at a time, so that models for many clients are never in memory at once.
        kind = "query" if order.hello else "train" if order.train else "evaluate"
        message = Message(content(order, tensors), node, kind, ttl=ttl, group_id=str(order.exchange))
        try:
            identities = [identity for identity in self.grid.push_messages([message]) if identity]
        except Exception as error:  # a node that has just left must not end the run
            identities = []
            self._report("unsent", f"{name}: {type(error).__name__}: {error}")
        if not identities:
            self.refuse("unsent", name, "Flower did not accept the order")
            self._turn_away(node, order)
        for identity in identities:
            self.waiting[identity] = PendingOrder(node, name, order, time.monotonic())
            self.bytes_sent += size(message)

    def _turn_away(self, node: int, order: Order) -> None:
        """Do not repeat a failed greeting at once, because every greeting starts a process on the client's machine."""
        if order.hello:
            self.turned_away[node] = time.monotonic()

    def refuse(self, reason: str, who: str, text: str) -> None:
        """Count and report something that is not used.

        Args:
            reason: the word under which it is counted.
            who: the client or node, for the report.
            text: what is wrong.
        """
        self.refused[reason] += 1
        self._report("refused", f"{who}: refused ({reason}): {text}")

    def replies(self) -> Iterator[Reply]:
        """Yield the valid replies, of any exchange, that have arrived since the last call."""
        for message in self._pull():
            pending = self.waiting.pop(message.metadata.reply_to_message_id, None)
            if pending is None:
                self.refuse("unknown", f"node {message.metadata.src_node_id}", "no order is waiting for this reply")
                continue
            try:
                yield Reply(pending, *self._open(message, pending), time.monotonic() - pending.sent)
            except RejectedMessage as error:
                self.refuse(error.reason, pending.name, str(error))
                self._turn_away(pending.node, pending.order)

    def _open(self, message: Message, pending: PendingOrder) -> tuple[Answer, State]:
        if message.has_error():
            # Only the error's number is reported: its text comes from the client and may contain something of the data.
            code = message.error.code
            if code == ErrorCode.NODE_UNAVAILABLE:
                raise RejectedMessage("unavailable", "its SuperNode cannot be reached")
            raise RejectedMessage("error", f"Flower reports error {code}")
        self.bytes_received += size(message)
        if message.metadata.src_node_id != pending.node:
            raise RejectedMessage("unknown", "the answer comes from a different node from the one that was asked")
        answer, tensors = open_message(message, Answer, self.accepts)
        order = pending.order
        if (answer.run, answer.status) == (NOBODY, "failed"):
            raise RejectedMessage("failed", "it cannot run this app; see the client's log")
        if (answer.run, answer.number) != (order.run, order.number):
            raise RejectedMessage("another-round", f"an answer to order {answer.number} of run {answer.run[:8]}")
        if not order.hello and answer.client != pending.name:
            raise RejectedMessage("unknown", f"the answer is from {answer.client!r}")
        return answer, tensors

    def _pull(self) -> Iterable[Message]:
        if not self.waiting:
            return []
        try:
            return self.grid.pull_messages(list(self.waiting))
        except Exception:  # one answer that Flower cannot read must not block the others
            found: list[Message] = []
            for identity, pending in list(self.waiting.items()):
                try:
                    found.extend(self.grid.pull_messages([identity]))
                except httpx.HTTPError:
                    raise  # the SuperLink is gone; this is not the fault of an answer
                except Exception as error:
                    del self.waiting[identity]
                    self.refuse("malformed", pending.name, f"Flower cannot read it ({type(error).__name__})")
            return found

    def forget(self, before: int) -> None:
        """Stop waiting for replies to orders of rounds before this one."""
        self.waiting = {k: p for k, p in self.waiting.items() if p.order.hello or p.order.exchange >= before}

    def pause(self) -> None:
        """Sleep until replies should be requested again."""
        time.sleep(_POLL)
