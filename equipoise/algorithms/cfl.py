"""CFL: one model for all clients until their updates contradict each other, then one model per group of clients."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.capabilities import ReducesGroups
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.settings import Count, Fraction, Positive
from equipoise.state import RoundUploads, State, Upload, Uploads
from equipoise.torch_device import widened


class CFL(ReducesGroups, Algorithm):
    """FedAvg within groups of clients, which are split when their updates contradict each other (CFL).

    w: one model per group; delta: a client's update of its group's model. A group is split in two when the mean of its
    updates is short (below eps1: the group has converged) while some of them are long (above eps2: single clients have
    not). The split minimises the largest cosine between updates of clients on different sides.
    """

    paper: ClassVar[str] = "Sattler et al., Clustered Federated Learning, 2020, Algorithms 1 and 3"

    buffers: Literal["average", "local"] | None = "local"
    "BatchNorm statistics: kept by each client, because groups of clients differ; or averaged over all"

    eps1: Positive = 0.4
    "norm of a group's mean update below which it may be split"
    eps2: Positive = 1.6
    "norm of a group's longest update above which it may be split; both conditions must hold"
    gamma_max: Fraction = 0.0
    "bound on the noise of updates; a split needs sqrt((1 - largest cosine across it) / 2) above this"
    quiet: Annotated[int, Field(ge=0, le=1_000_000)] = 20
    "number of rounds before the first split"
    groups: Count = 8
    "largest number of groups"

    def init_server(self, start: Start) -> State:
        own = start.w0.new_zeros(start.clients)
        return State(
            w=start.w0.expand(self.groups, -1).clone(),
            group=own,  # group of each client, by its number
            delta=start.w0.new_zeros((start.clients, start.space.size)),  # last update of each client, or zero
            round=own.new_zeros(1),
        )

    def broadcast(self, server: State, client: int) -> State:
        if client < len(server.group):
            return State(w=server.w[int(server.group[client])])
        return State(w=self.global_model(server))  # the group of a newcomer is not known

    def origin(self, server: State) -> State:
        return State(delta=torch.zeros_like(server.w[0]))

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        delta = data.descend(down.w) - down.w
        return client, Upload(State(delta=delta), reference=State(delta=torch.zeros_like(delta)), weight=data.size)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        w, group, delta = server.w.clone(), server.group.clone(), server.delta.clone()
        senders = torch.tensor(uploads.who, device=group.device)
        known = senders < len(group)
        delta[senders[known]] = torch.stack([u.message.delta for u in uploads.uploads])[known]
        sent_by = torch.where(known, group[senders.clamp(max=len(group) - 1)], -1)
        after = server.round + 1
        for c in sent_by.unique().int().tolist():
            here = (sent_by == c).nonzero().flatten().tolist()
            if c < 0:
                continue
            part = RoundUploads(tuple(uploads.who[k] for k in here), tuple(uploads.uploads[k] for k in here))
            mean, longest = reduce(part).delta, max(float(u.message.delta.norm()) for u in part.uploads)
            w[c] += mean
            free = int(group.max()) + 1
            if float(mean.norm()) < self.eps1 and longest > self.eps2 and after > self.quiet and free < self.groups:
                members = ((group == c) & delta.any(-1)).nonzero().flatten()
                apart = self._apart(delta[members])
                group[members[apart]] = free
                w[free] = w[c]
        return State(w=w, group=group, delta=delta, round=after)

    def _apart(self, delta: Tensor) -> Tensor:
        """Return a mask of the clients on the second side of the best split; all False if it is not good enough."""
        unit = torch.nn.functional.normalize(widened(delta), dim=-1)
        cosines = (unit @ unit.T).cpu()  # the rest is many small decisions
        side = torch.arange(len(delta))  # the most similar are joined until two sides are left (single linkage), which
        rows, columns = torch.triu_indices(len(delta), len(delta), offset=1)  # minimises the largest cosine across
        for k in cosines[rows, columns].argsort(descending=True, stable=True).tolist():
            one, other = side[rows[k]].item(), side[columns[k]].item()
            if one != other:
                if len(side.unique()) == 2:
                    break
                side[side == other] = one
        across = cosines[side[:, None] != side]
        if not len(across) or ((1 - across.max()) / 2).clamp(min=0).sqrt() <= self.gamma_max:
            return torch.zeros(len(delta), dtype=torch.bool, device=delta.device)
        return (side != side[0]).to(delta.device)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return down.w

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(down.w, epochs=self.adapt_epochs)

    def global_model(self, server: State) -> Tensor:
        """Return the mean over clients of their groups' models."""
        return server.w[server.group.long()].mean(0)
