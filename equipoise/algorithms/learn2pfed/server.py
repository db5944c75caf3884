"""The server's part of Learn2pFed: the common head, its adjoints, and the steps of p and gamma."""

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.algorithms.base import Reduce
from equipoise.algorithms.learn2pfed.learnables import Descent, set_of
from equipoise.state import RoundUploads, State, Upload, Uploads
from equipoise.torch_device import widened


@dataclass(frozen=True)
class Server:
    """What the server does with the uploads of an exchange."""

    cells: int
    sets: int
    learn: tuple[str, ...]
    tied: bool
    descent: Descent

    def forward(self, server: State, uploads: Uploads, reduce: Reduce, cell: int) -> State:
        """Return the state after a cell of the forward pass: the common head, and everybody's share in it (Eq. 12)."""
        known, who = _known(server, uploads)
        weights, share = self._weights(server, uploads, cell), server.share.clone()
        share[cell] = 0
        share[cell, who] = (weights / weights.sum())[known].to(share.dtype)
        heavy = [Upload(State(u=u.message.u), weight=weights[k : k + 1]) for k, u in enumerate(uploads.uploads)]
        w = reduce(RoundUploads(uploads.who, tuple(heavy))).u
        return State(server, w=w, share=share, w_bar=torch.zeros_like(w))

    def _weights(self, server: State, uploads: Uploads, cell: int) -> Tensor:
        """Return p gamma of the senders; initially p is the client's share of the samples."""
        raw = server.raw[:, set_of(cell, self.sets)].sum(0)
        raw = widened(raw)
        raw = torch.cat([raw, raw.mean(0, keepdim=True)])  # the last is for newcomers
        logs = raw[[min(who, len(raw) - 1) for who in uploads.who]]
        return uploads.weights() * (logs - logs.max()).exp()

    def backward(self, server: State, uploads: Uploads, reduce: Reduce, cell: int) -> State:
        """Return the state after a cell of the backward pass: the adjoint of w, and the gradient of p and gamma."""
        known, who = _known(server, uploads)
        gradient = torch.zeros_like(server.slope) if cell == self.cells - 1 else server.slope.clone()
        s = torch.cat([u.message.s for u in uploads.uploads])
        # For both log p and log gamma: <u_i, u_bar_i> minus the client's share of the sum, as weights are relative.
        gradient[:, set_of(cell, self.sets)] -= server.share[cell] * s.sum()
        gradient[:, set_of(cell, self.sets), who] += s[known]
        vectors = tuple(Upload(State(u=u.message.u)) for u in uploads.uploads)
        server = State(server, w_bar=len(uploads) * reduce(RoundUploads(uploads.who, vectors)).u, slope=gradient)
        return server if cell else self._stepped(server, uploads, reduce)

    def _stepped(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        """Step the server's learnables (line 12); of clients that are not there the gradient is not known."""
        learned = server.raw.new_tensor([name in self.learn for name in ("p", "gamma")])[:, None, None]
        there = torch.zeros_like(server.share[0])
        there[_known(server, uploads)[1]] = 1
        server = State(server, **self.descent(server.raw, server.slope * learned, server, axes=3, there=there))
        if not self.tied:
            return server
        sent = tuple(Upload(State(tied=u.message.tied)) for u in uploads.uploads)
        gradient = len(uploads) * reduce(RoundUploads(uploads.who, sent)).tied
        memory = State({name: server[f"tied_{name}"] for name in ("first", "second", "age")})
        after = self.descent(server.tied, gradient, memory, axes=1)
        return State(server, tied=after.pop("raw"), **{f"tied_{name}": t for name, t in after.items()})


def _known(server: State, uploads: Uploads) -> tuple[list[int], list[int]]:
    """Return the uploads of clients that were there when the run began, and the numbers of these clients."""
    known = [k for k, who in enumerate(uploads.who) if who < server.share.shape[1]]
    return known, [uploads.who[k] for k in known]
