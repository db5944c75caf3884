"""The roster: clients by name, their Flower nodes, and the last orders whose updates the server accepted."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from equipoise.flower.codec import RejectedMessage


@dataclass
class Member:
    """A client on the roster."""

    name: str
    index: int
    "its number in this run; it does not change after the first round has begun"
    node: int
    "the Flower node that is this client now"
    unseen: bool = False
    "whether it does not train, but only adapts the result"
    registered: bool = False
    "whether the operator registered the name with the node's key"
    samples: int = 0
    "number of training samples that it announced, if the algorithm needs it or weighs clients by it"
    accepted: int = 0
    "number of the order that ended the last round in which the server accepted its updates; 0: none"
    within: int = 0
    "number of the last order of an unfinished round whose update the server accepted; 0: none"
    counts: bool = True
    "whether it reports how many samples it trained on; its owner may have switched that off"


class Roster:
    """All clients of a run, present or not."""

    def __init__(self, allowed: Iterable[str] = ()):
        """Create an empty roster; `allowed` are the only names that may enrol, if there are any."""
        self.allowed = frozenset(allowed)
        self.members: dict[str, Member] = {}

    def enrol(self, name: str, node: int, unseen: bool, online: Mapping[int, str]) -> Member:
        """Add the client `name`, or find it again; raise RejectedMessage if the node may not have this name.

        A name that is registered with a key belongs to that key. Any other name belongs to the first node that uses it.
        A client that comes back as another node (restarted without a registered key) keeps its number.

        Args:
            name: the name that the node gives itself.
            node: the node.
            unseen: whether the client does not train.
            online: the nodes that are online, with the names that are registered with their keys.
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
        """Return the client of a node, if it has one."""
        return next((member for member in self.members.values() if member.node == node), None)

    def name_of(self, index: int) -> str:
        """Return the name of the client with this number."""
        return next(member.name for member in self.members.values() if member.index == index)

    def present(self, online: Iterable[int], unseen: bool = False) -> list[Member]:
        """Return the clients whose nodes are online, in the order of names: those that train, or the unseen ones."""
        nodes = set(online)
        found = [m for m in self.members.values() if m.node in nodes and m.unseen == unseen]
        return sorted(found, key=lambda member: member.name)

    def renumber(self) -> None:
        """Number the clients by name, not by arrival, before the first round; those that train come first."""
        for index, member in enumerate(sorted(self.members.values(), key=lambda m: (m.unseen, m.name))):
            member.index = index

    def facts(self) -> list[dict[str, Any]]:
        """Return what a checkpoint keeps, as JSON."""
        return [asdict(member) for member in self.members.values()]

    def restore(self, facts: list[dict[str, Any]]) -> None:
        """Take back what was saved."""
        self.members = {entry["name"]: Member(**entry) for entry in facts}
