"""Who takes part: clients by name, the nodes of Flower that speak for them, and what the server took from each."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from equipoise.flower.codec import RejectedMessage


@dataclass
class Member:
    name: str
    index: int
    "its number in this run; it never changes"
    node: int
    "the node of Flower that speaks for it now"
    unseen: bool = False
    registered: bool = False
    "did the operator register the name with its key?"
    samples: int = 0
    "how many training samples it has, where the algorithm asks for it"
    accepted: int = 0
    "the number of the order to it that ended the last round in which the server took its updates; 0: none"
    within: int = 0
    "the number of the last order whose update the server took in a round that is not over; 0: none"


class Roster:
    def __init__(self, allowed: Iterable[str] = ()):
        self.allowed = frozenset(allowed)
        self.members: dict[str, Member] = {}

    def enrol(self, name: str, node: int, unseen: bool, online: Mapping[int, str]) -> Member:
        """A node that says it speaks for `name`; `online` are nodes, with the names that the operator gave their keys.

        A name that was given to a key is that key's alone. Other names belong to who comes first; a client that comes
        back under another node (a new start without a registered key) keeps its place.
        """
        if not name:
            raise RejectedMessage("unknown", "a client without a name")
        registered, member = online.get(node, ""), self.members.get(name)
        if registered and registered != name:
            raise RejectedMessage("unknown", f"the node registered as {registered!r} says that it is {name!r}")
        if not registered and (name in online.values() or (member is not None and member.registered)):
            raise RejectedMessage("unknown", f"the name {name!r} is registered with another key")
        if self.allowed and name not in self.allowed:
            raise RejectedMessage("unknown", f"{name!r} is not among deploy.names")
        if member is None:
            member = self.members[name] = Member(name, len(self.members), node, unseen)
        elif member.node != node and member.node in online and (member.registered or not registered):
            raise RejectedMessage("duplicate", f"another node says that it is {name!r}, which is here already")
        elif member.unseen != unseen:
            raise RejectedMessage("unknown", f"{name!r} changed between taking part and not taking part in training")
        member.node, member.registered = node, bool(registered)
        return member

    def of(self, node: int) -> Member | None:
        return next((member for member in self.members.values() if member.node == node), None)

    def present(self, online: Iterable[int], unseen: bool = False) -> list[Member]:
        """Those whose nodes are online, in the order of names."""
        nodes = set(online)
        found = [m for m in self.members.values() if m.node in nodes and m.unseen == unseen]
        return sorted(found, key=lambda member: member.name)

    def renumber(self) -> None:
        """Before the first round: numbers follow names, not who happened to be here first; who trains is before."""
        for index, member in enumerate(sorted(self.members.values(), key=lambda m: (m.unseen, m.name))):
            member.index = index

    def facts(self) -> list[dict[str, Any]]:
        return [asdict(member) for member in self.members.values()]

    def restore(self, facts: list[dict[str, Any]]) -> None:
        self.members = {entry["name"]: Member(**entry) for entry in facts}
