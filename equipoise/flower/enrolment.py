"""Who comes in: new nodes are asked who they are, and become clients of this run or are turned away."""

import math
import time
from collections.abc import Callable

from equipoise.flower.codec import RejectedMessage
from equipoise.flower.protocol import Order
from equipoise.flower.roster import Member, Roster
from equipoise.flower.transport import Reply, Transport

_AGAIN = 60.0  # seconds until a node that could not take part is asked again


class Enrolment:
    def __init__(self, post: Transport, roster: Roster, layout: str, tell: Callable[[str, str], None]):
        self.post, self.roster, self.layout, self._tell = post, roster, layout, tell

    def present(self, unseen: bool = False) -> list[Member]:
        """The clients that are here, in the order of their names."""
        return self.roster.present(self.post.online(), unseen)

    def greet(self, run: str, patience: float, lifetime: float) -> None:
        """Ask nodes that are new who they are; and again after a while, for the cause may have been put right."""
        now = time.monotonic()
        greeted = {asked.node: asked.sent for asked in self.post.waiting.values() if asked.order.hello}
        for node in self.post.online():
            waiting = now - greeted.get(node, -math.inf) < patience
            turned_away = now - self.post.turned_away.get(node, -math.inf) < _AGAIN
            if self.roster.of(node) is None and not waiting and not turned_away:
                self.post.send(node, f"node {node}", Order(run=run, hello=True), {}, lifetime)

    def enrol(self, answered: Reply) -> None:
        """What a greeted node answered."""
        answer, node = answered.answer, answered.asked.node
        try:
            if answer.status != "hello":
                raise RejectedMessage(answer.status, f"{answer.client!r} cannot take part; its own log says why")
            if answer.layout != self.layout:
                raise RejectedMessage("unknown", f"{answer.client!r} has another model than the server")
            online = self.post.online()
            known = answer.client in self.roster.members
            registered = {identity: info.name for identity, info in online.items()}
            member = self.roster.enrol(answer.client, node, answer.unseen, registered)
            member.samples = answer.size
            self._tell("back" if known else "joined", f"{member.name} {'is back' if known else 'joined'}")
        except RejectedMessage as error:
            self.post.turned_away[node] = time.monotonic()
            self.post.refuse(error.reason, f"node {node}", str(error))
