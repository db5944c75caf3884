"""Learn2pFed: ADMM unrolled into a network, whose training learns how strongly each parameter is shared."""

from functools import partial
from math import log
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.algorithms.base import Reduce
from equipoise.algorithms.capabilities import HasConsensusModel, SeveralExchanges, ShowsState
from equipoise.algorithms.learn2pfed.fits import Fit, SquaresJudge
from equipoise.algorithms.learn2pfed.head import Sides, network_with_head
from equipoise.algorithms.learn2pfed.joint import body_memory, outer_loss, step_body
from equipoise.algorithms.learn2pfed.learnables import SCALARS, initial_learnables
from equipoise.algorithms.learn2pfed.settings import Learn2pFedSettings
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.parameter_space import ParameterSpace
from equipoise.representations.linear_head import linear_head
from equipoise.state import State, Upload, Uploads


class Learn2pFed(SeveralExchanges, HasConsensusModel, ShowsState, Learn2pFedSettings):
    """Clients fit linear heads by unrolled ADMM, and learn how strongly each parameter is shared.

    A round is an epoch: `cells` exchanges forward and, with backward = "exact", as many back. v: the client's head, as
    a matrix; w: the common head; z = v - w; alpha: its dual; Λ, one number per parameter: how strongly it is tied to w;
    p, gamma: a client's weight in w; rho, eta, theta: the constants of the three updates; u = v - z - alpha: what is
    sent. The body, if the model has one, stays with the client.

    F, what heads are fitted to, is ½|Xv - Y|² with fit = "squares", a sum over the client's samples, as in Eq. 10; and
    the mean of the task's loss with fit = "loss", as in Eqs. 2 and 14, so that Λ and rho mean the same for clients of
    any size. Of n samples with k squared outputs, the loss is 2 / (nk) times the squares: with Λ, rho and eta
    multiplied by this, both take the same steps.

    Two statements of the paper do not hold as printed (tests have counterexamples): Lemma 1, because v can stand still
    while alpha moves; and that steps lead downwards where everybody differentiates alone, as with backward = "local".
    """

    paper: ClassVar[str] = "Learn2pFed: unrolled ADMM that learns which parameters take part, Algorithm 1"

    @property
    def exchanges(self) -> int:
        return self.cells * (2 if self.backward == "exact" else 1)

    # Before the first round.

    def _raw(self, start: Start) -> Tensor:
        """Return the initial learnables of a client."""
        scalars = (self.rho, self.eta, self.theta)
        log = self.positive == "log"
        found = initial_learnables(self._layout(start.space), start.seed, self.lam, scalars, self.draw, log)
        return found.to(start.w0.dtype).to(start.w0.device)

    def init_server(self, start: Start) -> State:
        v = linear_head(start.space).matrix(start.space.head(start.w0))
        w = v.expand(self._trials.networks, -1, -1).clone()
        zero = v.new_zeros((self._sets, start.clients))
        raw = torch.stack([zero, zero + log(self.gamma)])  # log of p over its initial value, and of gamma
        state = State(
            phase=v.new_zeros(1),
            w=w,
            w_bar=torch.zeros_like(w),
            share=v.new_zeros((self.cells, zero.shape[1])),
            raw=raw,
            slope=torch.zeros_like(raw),
            **self._descent.memory(raw, columns=zero.shape[1]),
        )
        if self.tied:
            state["tied"] = self._raw(start)[self._layout(start.space).places(self.tied)]
            state |= {f"tied_{name}": t for name, t in self._descent.memory(state.tied).items()}
        return state

    def init_client(self, start: Start) -> State:
        v = linear_head(start.space).matrix(start.space.head(start.w0)).expand(self._trials.networks, -1, -1)
        raw = self._raw(start)
        state = State(
            raw=raw,
            slope=torch.zeros_like(raw),
            **self._descent.memory(raw),
            x=torch.stack([torch.zeros_like(v), v, torch.zeros_like(v)]),  # alpha, v, z
            x_bar=v.new_zeros((3, *v.shape)),
            tape=v.new_zeros((self.cells, 4, *v.shape)),
        )
        if self.fit == "squares":
            square, zero = v.new_zeros((*v.shape[:-1], v.shape[-2])), torch.zeros_like(v)
            state |= {"U": square, "d": square[..., :1], "UXY": zero, "outer_xx": square, "outer_xy": zero}
        if start.space.body_size:
            state["network"] = start.w0
        if self._is_joint(start.space):
            u_bars, memory = v.new_zeros((self.cells, *v.shape)), body_memory(self, start.space.body(start.w0))
            state = State(state, coming=start.w0, u_bars=u_bars, **memory)
        return state

    def _is_joint(self, space: ParameterSpace) -> bool:
        return self.network == "joint" and space.body_size > 0

    # The exchanges of a round, one cell each: forward, then backward.

    def broadcast(self, server: State, client: int) -> State:
        t = int(server.phase)
        vector = server.w
        if t >= self.cells:  # the adjoint of what this client sent in the cell
            known = client < server.share.shape[1]
            vector = server.w_bar * (server.share[2 * self.cells - 1 - t, client] if known else 0)
        return State(phase=server.phase, w=vector, **({"tied": server.tied} if self.tied else {}))

    def origin(self, server: State) -> None:
        return None  # what is sent depends on the exchange, and on the client

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        t = int(down.phase.flatten()[0])
        raw = self._with_tied(client.raw, down, data.space)
        if t < self.cells:
            client, sent = self._forward(t, client, raw, down.w, data)
        else:
            cell = 2 * self.cells - 1 - t
            sides = self._sides(client, data, judged=cell == self.cells - 1)
            client, sent = self._backward(cell, client, raw, down.w, sides, data)
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
        back_alone = self.backward == "local" and t == self.cells - 1
        sides = self._sides(client, data, judged=back_alone)
        alpha, v, z = self._cells(data.space).forward(t, sides.fit, raw, alpha, v, z, w)
        client = State(client, x=torch.stack([alpha, v, z], dim=-4), tape=tape)
        sent = self._message(v - z - alpha, torch.zeros_like(data.size), torch.zeros_like(raw), data.space)  # line 8
        for cell in reversed(range(self.cells)) if back_alone else ():
            client, _ = self._backward(cell, client, raw, torch.zeros_like(v), sides, data)
        return client, sent

    def _backward(
        self, cell: int, client: State, raw: Tensor, u_bar: Tensor, sides: Sides, data: LocalData
    ) -> tuple[State, State]:
        """Compute the adjoints of a cell's inputs from those of its outputs; the cell runs again on its stored inputs.

        The client sends the adjoint of w, and <u, u_bar>, which is all that p and gamma need.
        """
        x_bar, gradient = client.x_bar, client.slope
        if cell == self.cells - 1:  # the backward pass starts here; the last u is in no client's loss
            assert sides.judge is not None
            v = client.x[..., 1, :, :, :]
            x_bar = torch.stack([torch.zeros_like(v), sides.judge.gradient(v), torch.zeros_like(v)], dim=-4)
            u_bar, gradient = torch.zeros_like(v), torch.zeros_like(gradient)
        tape = client.tape[..., cell, :, :, :, :]
        u, found, w_bar, more = self._cells(data.space).backward(cell, sides.fit, raw, tape, x_bar, u_bar)
        client = State(client, x_bar=torch.stack(found, dim=-4), slope=gradient + more)
        if self._is_joint(data.space):
            u_bars = client.u_bars.clone()
            u_bars[..., cell, :, :, :] = u_bar
            client = State(client, u_bars=u_bars)
        s = (u * u_bar).flatten(-3).sum(-1, keepdim=True)
        sent = self._message(w_bar, s, client.slope, data.space)
        return (self._stepped(client, raw, data) if cell == 0 else client), sent

    def _message(self, vector: Tensor, s: Tensor, gradient: Tensor, space: ParameterSpace) -> State:
        places = self._layout(space).places(self.tied)
        return State(
            u=vector,
            s=s,
            **({"tied": gradient[..., places] * self._learned(space, gradient)[places]} if places else {}),
        )

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        t = int(server.phase)
        server = State(server, phase=server.phase.new_full((1,), (t + 1) % self.exchanges))
        if t < self.cells:
            return self._server.forward(server, uploads, reduce, t)
        return self._server.backward(server, uploads, reduce, 2 * self.cells - 1 - t)

    # At the end of an epoch: steps of the learnables.

    def _learned(self, space: ParameterSpace, like: Tensor) -> Tensor:
        """Return 1 for each of a client's learnables that is learned, by itself or by all clients together; else 0."""
        names = tuple(name for name in ("lam", *SCALARS) if name in self.learn and name not in self.follow)
        mask = like.new_zeros(like.shape[-1])
        mask[self._layout(space).places(names)] = 1
        return mask

    def _stepped(self, client: State, raw: Tensor, data: LocalData) -> State:
        """Step the client's learnables (line 13) and, in joint training, its body."""
        mask = self._learned(data.space, client.raw)
        mask[self._layout(data.space).places(self.tied)] = 0
        if self._is_joint(data.space):
            through = partial(outer_loss, self._cells(data.space), raw, client.tape, client.u_bars)
            gradient = self._trials.body_gradient(self._network(client, data.space), through, data)
            client = State(client, **step_body(self, client, data.space.body(gradient), data.lr))
        return State(client, **self._descent(client.raw, client.slope * mask, client, axes=1))

    def _with_tied(self, raw: Tensor, down: State, space: ParameterSpace) -> Tensor:
        if not self.tied:
            return raw
        raw = raw.clone()
        raw[..., self._layout(space).places(self.tied)] = down.tied
        return raw

    # The client's network and data.

    def _begun(self, client: State, data: LocalData) -> State:
        """Start an epoch: train the network or take the step of the last epoch, then measure what its head reads."""
        if self._is_joint(data.space):
            client = State(client, network=client.coming)
        elif data.space.body_size:
            model = self._network(client, data.space)
            client = State(client, network=data.descend(model, part=self.train))
        elif self.fit == "squares" and bool(client.U.flatten(-3).any(-1).all()):
            return client  # without a body, features stay the same
        return self._measured(client, data)

    def _measured(self, client: State, data: LocalData) -> State:
        """Keep the moments that are all that squares need; the task's loss needs the samples in every exchange."""
        return (
            self._trials.measure(self._network(client, data.space), client, data) if self.fit == "squares" else client
        )

    def _sides(self, client: State, data: LocalData, judged: bool) -> Sides:
        if self.fit == "loss":
            return self._trials.from_loss(self._network(client, data.space), data, judged)
        return Sides(Fit(client.U, client.d, client.UXY), SquaresJudge(client.outer_xx, client.outer_xy))

    def _network(self, client: State, space: ParameterSpace) -> Tensor:
        """Return the client's network with its own head."""
        return self._model(client, client.x[..., 1, :, :, :], space)

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
        return self._network(client, data.space)

    def consensus_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return self._model(client, down.w, data.space)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        """Run the cells with w fixed; tied learnables have learned values, the client's own have initial values."""
        if data.space.body_size:
            network = data.descend(client.network, epochs=self.adapt_epochs)
            client = State(client, network=network)
        client, raw = self._measured(client, data), self._with_tied(client.raw, down, data.space)
        fit = self._sides(client, data, judged=False).fit
        alpha, v, z = torch.zeros_like(down.w), down.w, torch.zeros_like(down.w)
        for cell in range(self.cells):
            alpha, v, z = self._cells(data.space).forward(cell, fit, raw, alpha, v, z, down.w)
        return self._model(client, v, data.space)
