"""Learn2pFed: ADMM unrolled into a network, whose training learns how strongly each parameter is shared."""

from math import log
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.capabilities import HasConsensusModel, SeveralExchanges, ShowsState
from equipoise.algorithms.learn2pfed.cells import Cells, Fit
from equipoise.algorithms.learn2pfed.head import measure, network_with_head
from equipoise.algorithms.learn2pfed.learnables import SCALARS, Descent, Layout, initial_learnables, layout, set_of
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.parameter_space import ParameterSpace
from equipoise.representations.linear_head import linear_head
from equipoise.settings import Count, NonNegative, Positive
from equipoise.state import RoundUploads, State, Upload, Uploads
from equipoise.torch_device import widened

Family = Literal["lam", "p", "rho", "eta", "gamma", "theta"]
OfClients = Literal["lam", "rho", "eta", "theta"]


class Learn2pFed(SeveralExchanges, HasConsensusModel, ShowsState, Algorithm):
    """Clients fit linear heads by unrolled ADMM, and learn how strongly each parameter is shared.

    A round is an epoch: `cells` exchanges forward and, with backward = "exact", as many back. v: the client's head, as
    a matrix; w: the common head; z = v - w; alpha: its dual; Λ, one number per parameter: how strongly it is tied to w;
    p, gamma: a client's weight in w; rho, eta, theta: the constants of the three updates; u = v - z - alpha: what is
    sent. The body, if the model has one, stays with the client; it is trained first, and fixed in the cells.
    """

    paper: ClassVar[str] = "Learn2pFed: unrolled ADMM that learns which parameters take part, Algorithm 1"

    cells: Count = 10
    "number of unrolled iterations of ADMM (L)"
    sets: Literal["shared", "each"] = "shared"
    "one set of learnables for all cells, or one per cell"
    learn: tuple[Family, ...] = ("lam", "p", "rho", "eta", "gamma", "theta")
    "families of learnables that are learned; the others keep their initial values"
    tied: tuple[OfClients, ...] = ()
    "families with one value for all clients, learned from the sum of their gradients"
    follow: tuple[Literal["eta", "theta"], ...] = ()
    "families that equal the client's rho, the one symbol that the paper prints for them"
    outer: Literal["train", "validation", "folds"] = "train"
    "samples on which the learnables are judged: those that heads are fitted to, validation samples, or held-out folds"
    folds: Annotated[int, Field(ge=2, le=100)] = 5
    "number of parts of the training samples with outer = 'folds', each held out in a network of its own"
    backward: Literal["exact", "local"] = "exact"
    "exact: adjoints are sent, cell by cell; local: each client treats w as constant, and p and gamma are not learned"
    warm: bool = False
    "start an epoch where the last one ended, instead of at zero"
    lam: Positive = 0.001
    "initial scale of Λ, times a random number from 0 to 1 for each parameter, the same for all clients"
    draw: bool = True
    "draw these random numbers; otherwise they are 1"
    positive: Literal["relu", "log"] = "relu"
    "form of Λ: max(0, .), which may stay at 0, or exp(.)"
    rho: Positive = 0.01
    "initial constant in the update of v"
    eta: Positive = 0.01
    "initial constant in the update of z"
    gamma: Positive = 0.01
    "initial constant in the update of w"
    theta: Positive = 0.01
    "initial constant in the update of alpha"
    solve: Literal["closed", "gradient"] = "closed"
    "update of v: in closed form (Eq. 10), or by gradient steps on the same problem (Eq. 14)"
    solve_steps: Count = 10
    "number of steps with solve = 'gradient'"
    solve_rate: Annotated[float, Field(gt=0, lt=2)] = 1.0
    "learning rate of these steps, in units of one over the problem's smoothness"
    outer_lr: Positive = 0.01
    "learning rate of the learnables"
    outer_optimizer: Literal["sgd", "adam"] = "sgd"
    "update rule of the learnables"
    outer_clip: NonNegative = 1.0
    "largest norm of the gradient of a client's, or the server's, learnables; 0: no limit"
    decay_after: Count = 60
    "number of a client's epochs before outer_lr is reduced"
    decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    "factor by which outer_lr is then multiplied"
    train: Literal["body", "all"] = "body"
    "what local training changes before v is fitted again: the body under the head v, or the whole network"

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True, linear_head=True, validation=self.outer == "validation")

    @model_validator(mode="after")
    def _gradients_travel(self) -> Self:
        if self.tied and self.backward != "exact":
            raise ValueError("tied needs backward = 'exact', because otherwise no gradients are sent")
        return self

    @property
    def exchanges(self) -> int:
        return self.cells * (2 if self.backward == "exact" else 1)

    @property
    def _networks(self) -> int:
        """Return the number of networks: with folds, one per held-out fold and one fitted to all training samples."""
        return self.folds + 1 if self.outer == "folds" else 1

    @property
    def _sets(self) -> int:
        return 1 if self.sets == "shared" else self.cells

    def _layout(self, space: ParameterSpace) -> Layout:
        return layout(space, self._sets)

    def _cells(self, space: ParameterSpace) -> Cells:
        steps = (self.solve_rate, self.solve_steps)
        return Cells(self._layout(space), self.solve, *steps, self.positive, self.follow)

    @property
    def _descent(self) -> Descent:
        return Descent(self.outer_optimizer, self.outer_lr, self.outer_clip, self.decay_after, self.decay)

    # Before the first round.

    def _raw(self, start: Start) -> Tensor:
        """Return the initial learnables of a client."""
        scalars = (self.rho, self.eta, self.theta)
        log = self.positive == "log"
        found = initial_learnables(self._layout(start.space), start.seed, self.lam, scalars, self.draw, log)
        return found.to(start.w0.dtype).to(start.w0.device)

    def init_server(self, start: Start) -> State:
        v = linear_head(start.space).matrix(start.space.head(start.w0))
        w = v.expand(self._networks, -1, -1).clone()
        zero = v.new_zeros((self._sets, start.clients))
        raw = torch.stack([zero, zero + log(self.gamma)])  # log of p over its initial value, and of gamma
        state = State(
            phase=v.new_zeros(1),
            w=w,
            w_bar=torch.zeros_like(w),
            share=v.new_zeros((self.cells, zero.shape[1])),
            raw=raw,
            slope=torch.zeros_like(raw),
            **self._descent.memory(raw),
        )
        if self.tied:
            state["tied"] = self._raw(start)[self._layout(start.space).places(self.tied)]
            state |= {f"tied_{name}": t for name, t in self._descent.memory(state.tied).items()}
        return state

    def init_client(self, start: Start) -> State:
        v = linear_head(start.space).matrix(start.space.head(start.w0)).expand(self._networks, -1, -1)
        raw, square = self._raw(start), v.new_zeros((self._networks, v.shape[-2], v.shape[-2]))
        state = State(
            raw=raw,
            slope=torch.zeros_like(raw),
            **self._descent.memory(raw),
            x=torch.stack([torch.zeros_like(v), v, torch.zeros_like(v)]),  # alpha, v, z
            x_bar=v.new_zeros((3, *v.shape)),
            tape=v.new_zeros((self.cells, 4, *v.shape)),
            U=square,
            d=square[..., :1],
            UXY=torch.zeros_like(v),
            outer_xx=square,
            outer_xy=torch.zeros_like(v),
        )
        return State(state, network=start.w0) if start.space.body_size else state

    # The exchanges of a round, one cell each: forward, then backward.

    def broadcast(self, server: State, client: int) -> State:
        t = int(server.phase)
        vector = server.w
        if t >= self.cells:  # the adjoint of what this client sent in the cell
            known = client < server.share.shape[1]
            vector = server.w_bar * (server.share[2 * self.cells - 1 - t, client] if known else 0)
        return State(phase=server.phase, w=vector, **({"tied": server.tied} if self.tied else {}))

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        t = int(down.phase.flatten()[0])
        raw = self._with_tied(client.raw, down, data.space)
        if t < self.cells:
            client, sent = self._forward(t, client, raw, down.w, data)
        else:
            client, sent = self._backward(2 * self.cells - 1 - t, client, raw, down.w, data)
        return client, Upload(sent, weight=data.size)

    def _forward(self, t: int, client: State, raw: Tensor, w: Tensor, data: LocalData) -> tuple[State, State]:
        if t == 0:
            client = self._begun(client, data)
        alpha, v, z = client.x.unbind(-4)
        if t == 0 and not self.warm:
            alpha, v, z, w = (torch.zeros_like(v),) * 4
        elif t == 0:  # a client that takes part for the first time starts at w
            v = torch.where((client.age == 0)[..., None, None], w, v)
        tape = client.tape.clone()
        tape[..., t, :, :, :, :] = torch.stack([alpha, v, z, w.expand_as(v)], dim=-4)
        alpha, v, z = self._cells(data.space).forward(t, _fit(client), raw, alpha, v, z, w)
        client = State(client, x=torch.stack([alpha, v, z], dim=-4), tape=tape)
        sent = self._message(v - z - alpha, torch.zeros_like(data.size), torch.zeros_like(raw), data.space)  # line 8
        if self.backward == "local" and t == self.cells - 1:
            for cell in reversed(range(self.cells)):
                client, _ = self._backward(cell, client, raw, torch.zeros_like(v), data)
        return client, sent

    def _backward(self, cell: int, client: State, raw: Tensor, u_bar: Tensor, data: LocalData) -> tuple[State, State]:
        """Compute the adjoints of a cell's inputs from those of its outputs; the cell runs again on its stored inputs.

        The client sends the adjoint of w, and <u, u_bar>, which is all that p and gamma need.
        """
        x_bar, gradient = client.x_bar, client.slope
        if cell == self.cells - 1:  # the backward pass starts here; the last u is in no client's loss
            v = client.x[..., 1, :, :, :]
            outer = 2 * (client.outer_xx @ v - client.outer_xy)  # gradient of F_i, a mean of squared errors
            x_bar = torch.stack([torch.zeros_like(v), outer, torch.zeros_like(v)], dim=-4)
            u_bar, gradient = torch.zeros_like(v), torch.zeros_like(gradient)
        tape = client.tape[..., cell, :, :, :, :]
        u, found, w_bar, more = self._cells(data.space).backward(cell, _fit(client), raw, tape, x_bar, u_bar)
        client = State(client, x_bar=torch.stack(found, dim=-4), slope=gradient + more)
        s = (u * u_bar).flatten(-3).sum(-1, keepdim=True)
        sent = self._message(w_bar, s, client.slope, data.space)
        return (self._stepped(client, data.space) if cell == 0 else client), sent

    def _message(self, vector: Tensor, s: Tensor, gradient: Tensor, space: ParameterSpace) -> State:
        places = self._layout(space).places(self.tied)
        return State(
            u=vector,
            s=s,
            **({"tied": gradient[..., places] * self._learned(space, gradient)[places]} if places else {}),
        )

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        t, vectors = int(server.phase), [Upload(State(u=u.message.u)) for u in uploads.uploads]
        after = State(server, phase=server.phase.new_full((1,), (t + 1) % self.exchanges))
        known = [k for k, who in enumerate(uploads.who) if who < server.share.shape[1]]
        who = [uploads.who[k] for k in known]
        if t < self.cells:
            weights, share = self._weights(server, uploads, t), server.share.clone()
            share[t] = 0
            share[t, who] = (weights / weights.sum())[known].to(share.dtype)
            heavy = [Upload(u.message, weight=weights[k : k + 1]) for k, u in enumerate(vectors)]
            w = reduce(RoundUploads(uploads.who, tuple(heavy))).u  # Eq. 12
            return State(after, w=w, share=share, w_bar=torch.zeros_like(w))
        cell = 2 * self.cells - 1 - t
        gradient = torch.zeros_like(server.slope) if t == self.cells else server.slope.clone()
        s = torch.cat([u.message.s for u in uploads.uploads])
        # For both log p and log gamma: <u_i, u_bar_i> minus the client's share of the sum, as weights are relative.
        gradient[:, set_of(cell, self._sets)] -= server.share[cell] * s.sum()
        gradient[:, set_of(cell, self._sets), who] += s[known]
        after |= State(w_bar=len(uploads) * reduce(RoundUploads(uploads.who, tuple(vectors))).u, slope=gradient)
        return after if cell else self._server_stepped(after, uploads, reduce)

    def _weights(self, server: State, uploads: Uploads, cell: int) -> Tensor:
        """Return p gamma of the senders; initially p is the client's share of the samples."""
        raw = server.raw[:, set_of(cell, self._sets)].sum(0)
        raw = widened(raw)
        raw = torch.cat([raw, raw.mean(0, keepdim=True)])  # the last is for newcomers
        logs = raw[[min(who, len(raw) - 1) for who in uploads.who]]
        return uploads.weights() * (logs - logs.max()).exp()

    # At the end of an epoch: steps of the learnables.

    def _learned(self, space: ParameterSpace, like: Tensor) -> Tensor:
        """Return 1 for each of a client's learnables that is learned, by itself or by all clients together; else 0."""
        names = tuple(name for name in ("lam", *SCALARS) if name in self.learn and name not in self.follow)
        mask = like.new_zeros(like.shape[-1])
        mask[self._layout(space).places(names)] = 1
        return mask

    def _stepped(self, client: State, space: ParameterSpace) -> State:
        """Step the client's learnables (line 13)."""
        mask = self._learned(space, client.raw)
        mask[self._layout(space).places(self.tied)] = 0
        return State(client, **self._descent(client.raw, client.slope * mask, client, axes=1))

    def _server_stepped(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        """Step the server's learnables (line 12); of clients that dropped out the gradient is not known."""
        mask = server.raw.new_tensor([name in self.learn for name in ("p", "gamma")])[:, None, None]
        there = torch.zeros_like(server.share[0])
        there[[who for who in uploads.who if who < len(there)]] = 1
        mask = mask * there
        server = State(server, **self._descent(server.raw, server.slope * mask, server, axes=3))
        if not self.tied:
            return server
        sent = tuple(Upload(State(tied=u.message.tied)) for u in uploads.uploads)
        gradient = len(uploads) * reduce(RoundUploads(uploads.who, sent)).tied
        memory = State({name: server[f"tied_{name}"] for name in ("first", "second", "age")})
        after = self._descent(server.tied, gradient, memory, axes=1)
        return State(server, tied=after.pop("raw"), **{f"tied_{name}": t for name, t in after.items()})

    def _with_tied(self, raw: Tensor, down: State, space: ParameterSpace) -> Tensor:
        if not self.tied:
            return raw
        raw = raw.clone()
        raw[..., self._layout(space).places(self.tied)] = down.tied
        return raw

    # The client's network and data.

    def _begun(self, client: State, data: LocalData) -> State:
        """Start an epoch: train the network, then compute the moments of what its head reads."""
        if data.space.body_size:
            model = self._model(client, client.x[..., 1, :, :, :], data.space)
            return self._measured(State(client, network=data.descend(model, part=self.train)), data)
        known = bool(client.U.flatten(-3).any(-1).all())  # without a body, features stay the same
        return client if known else self._measured(client, data)

    def _measured(self, client: State, data: LocalData) -> State:
        model = self._model(client, client.x[..., 1, :, :, :], data.space)
        return measure(model, client, data, self.outer, self.folds)

    def _model(self, client: State, matrices: Tensor, space: ParameterSpace) -> Tensor:
        return network_with_head(self._layout(space), space, client, matrices)

    def shown_state(self, client: State, down: State, space: ParameterSpace) -> State:
        """Return the client's learnables."""
        raw, found = self._with_tied(client.raw, down, space), self._layout(space)
        rows = [raw[..., found.places((name,))] for name in ("lam", *SCALARS)]
        lam = rows[0].unflatten(-1, (self._sets, -1)).mean(-2)  # the mean over sets
        rho, eta, theta = self._cells(space).followed(*(row.exp() for row in rows[1:]))
        return State(lam=lam.exp() if self.positive == "log" else lam.relu(), rho=rho, eta=eta, theta=theta)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return self._model(client, client.x[..., 1, :, :, :], data.space)

    def consensus_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return self._model(client, down.w, data.space)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        """Run the cells with w fixed; tied learnables have learned values, the client's own have initial values."""
        if data.space.body_size:
            network = data.descend(client.network, epochs=self.adapt_epochs)
            client = State(client, network=network)
        client, raw = self._measured(client, data), self._with_tied(client.raw, down, data.space)
        v = down.w.expand_as(client.UXY)
        alpha = z = torch.zeros_like(v)
        for cell in range(self.cells):
            alpha, v, z = self._cells(data.space).forward(cell, _fit(client), raw, alpha, v, z, down.w)
        return self._model(client, v, data.space)


def _fit(client: State) -> Fit:
    return Fit(client.U, client.d, client.UXY)
