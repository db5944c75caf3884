"""FedReCo: personal models, and consensus on their representations of samples instead of their parameters."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import field_validator
from torch import Tensor

from equipoise import randomness
from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.capabilities import HasConsensusModel
from equipoise.algorithms.feature_decay import Size
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.representations.points import HEAD
from equipoise.representations.terms import LossTerm
from equipoise.settings import Count, NonNegative, Positive
from equipoise.state import State, Upload, Uploads


class Discord(LossTerm):
    """H: the squared distance between the representations of two extractors."""

    @staticmethod
    def each(h: Sequence[Tensor], probed: Sequence[Tensor], y: Tensor, given: State) -> Tensor:
        """Return the sum of squared distances over the representation points, weighted by given.weight."""
        apart = [(a - b).square().sum(-1) for a, b in zip(h, probed, strict=True)]
        return torch.stack(apart, dim=-1) @ given.weight


class FedReCo(HasConsensusModel, Algorithm):
    """Representations are pulled towards those of a common probe, which follows them; models stay private.

    u_i, v_i: client i's extractor and head; u_0: the probe, which is an extractor too; h: the representation of a
    sample; H_i: the mean over the client's samples of |h(u_i) - h(u_0)|^2, of which only the gradient in u_0 is sent.
    lam = 0 is Local, with head and extractor trained in turn. With a `probe` that does not move, nothing is sent: these
    are controls, which tell what of the gain is consensus.
    """

    paper: ClassVar[str] = "Consensus Optimization at Representation (FedReCo), 2023, Alg. 1"

    lam: NonNegative = 0.01
    "strength of the pull of a client's representations towards the probe's"
    server_lr: NonNegative = 0.001
    "learning rate of the probe (eta_0); 0 keeps the initial probe"
    probe: Literal["consensus", "initial", "other", "zero"] = "consensus"
    """consensus: the probe follows the clients. Controls: it stays the initial model; or is another random network, of
    the same weights in another order; or its representations are zero, so that the size of the client's own counts"""
    initialisation: Literal["common", "own"] = "common"
    "whether clients begin with the common initial model, or each with weights of its own: the same in another order"
    head_epochs: Count = 1
    "passes that train the head, before those that train the extractor"
    head_lr: Positive | None = None
    "learning rate of the head; by default lr"
    sent_batches: Count = 1
    "number of batches used for the gradient that is sent"
    variance_reduction: Literal["none", "partial", "full"] = "none"
    """partial: correct the pull on each batch by its error at the start of the round; full: correct the loss, too, for
    head and extractor, and send the gradient on all samples"""
    split: tuple[str, ...] = ()
    "submodule whose output is the representation, instead of the head's input; with several, clients take turns"

    @field_validator("variance_reduction", mode="before")
    @classmethod
    def _partial_was_true(cls, value: Any) -> Any:
        return {True: "partial", False: "none"}[value] if isinstance(value, bool) else value

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True, head_module=not self.split)

    @property
    def _at(self) -> tuple[str, ...]:
        return self.split or (HEAD,)

    def _reaches(self, of: Start | LocalData) -> Tensor:
        """Return one row per representation point: the mask of its extractor's parameters."""
        return torch.stack([of.point(name).reach for name in self._at])

    def init_server(self, start: Start) -> State:
        u_0 = start.w0
        if self.probe == "other":
            u_0 = start.space.shuffled(u_0, randomness.torch_generator(start.seed, "other probe"))
        return State(u_0=u_0[self._reaches(start).any(0)])

    def init_client(self, start: Start) -> State:
        state = State(w=start.w0)  # (u_i, v_i)
        return state if self.initialisation == "common" else State(state, new=start.w0.new_ones(1))

    def broadcast(self, server: State, client: int) -> State:
        if len(self._at) == 1:
            return server
        mine = torch.arange(len(self._at), device=server.u_0.device) == client % len(self._at)
        return State(server, mine=mine.to(server.u_0.dtype))

    @staticmethod
    def _mine(down: State) -> Tensor:
        """Return the weight of each representation point for the client: 1 or 0."""
        return down.get("mine", down.u_0.new_ones(*down.u_0.shape[:-1], 1))

    def _own(self, down: State, data: LocalData) -> Tensor:
        """Return the mask of the client's extractor's parameters: 1 or 0."""
        return self._mine(down) @ self._reaches(data).to(down.u_0.dtype)

    def _parts(self, down: State, data: LocalData) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return v_i and u_i as arguments of `descend`: by name if they are the head and the body, else as masks."""
        reaches = self._reaches(data)
        body = torch.zeros_like(reaches[0])
        body[data.space.part("body")] = True
        if len(reaches) == 1 and torch.equal(reaches[0], body):
            return {"part": "head"}, {"part": "body"}
        u = self._own(down, data)
        return {"part": 1 - u}, {"part": u}

    def _with_probe(self, w: Tensor, down: State, data: LocalData) -> Tensor:
        """Return w with the probe in place of the client's extractor."""
        probe = w.clone()
        probe[..., self._reaches(data).any(0)] = down.u_0.expand(*w.shape[:-1], -1)
        return torch.where(self._own(down, data) > 0, probe, w)

    def _pull(self, w: Tensor, down: State, data: LocalData) -> LossTerm:
        """Return lam/2 H as a function of the client's model, with variance reduction from w on."""
        weight = State(weight=self.lam / 2 * self._mine(down))
        pull: LossTerm
        if self.probe == "zero":
            pull = Size(self._at, given=weight)
        else:
            pull = Discord(self._at, self._with_probe(w, down, data), weight)
        if self.variance_reduction == "partial":
            return replace(pull, anchor=(w, data.term_gradient(pull, w)))
        if self.variance_reduction == "full":
            g = data.full_gradient(w) + data.term_gradient(pull, w)
            return replace(pull, anchor=(w, g), anchored="objective")
        return pull

    def _local(self, w: Tensor, down: State, data: LocalData, epochs: int | None = None) -> Tensor:
        """Train head and extractor (Alg. 1, lines 8 to 17)."""
        v, u = self._parts(down, data)
        full = self.variance_reduction == "full" and down.u_0.shape[-1]
        # H does not depend on the head: there the term only carries the correction of the loss.
        head_term = self._pull(w, down, data) if full else None
        w = data.descend(w, **v, epochs=epochs or self.head_epochs, lr=self.head_lr, stream=1, term=head_term)
        if not down.u_0.shape[-1] or (self.lam == 0 and not full):
            return data.descend(w, **u, epochs=epochs)
        return data.descend(w, **u, epochs=epochs, term=self._pull(w, down, data))

    def origin(self, server: State) -> State:
        return State(g=torch.zeros_like(server.u_0))

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        own, state = client.w, State()
        if self.initialisation == "own":
            own = torch.where(client.new > 0, data.reinitialised(client.w), client.w)
            state = State(new=torch.zeros_like(client.new))
        w = self._local(own, down, data)
        state = State(state, w=w)
        if self.probe != "consensus":
            return state, Upload()
        if not down.u_0.shape[-1]:
            return state, Upload(State(g=torch.zeros_like(down.u_0)))  # the whole model is head
        # H is symmetric: its gradient in u_0 is the gradient, at u_0, of the distance from u_i.
        H = Discord(self._at, w, State(weight=self._mine(down)))
        steps = None if self.variance_reduction == "full" else self.sent_batches
        g = data.term_gradient(H, self._with_probe(w, down, data), steps=steps, stream=2)
        return state, Upload(State(g=g[..., self._reaches(data).any(0)]))

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        if self.probe != "consensus":
            return server
        return State(u_0=server.u_0 - self.server_lr * reduce(uploads).g)  # Eq. 8

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return client.w

    def consensus_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return self._with_probe(client.w, down, data)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return self._local(self._with_probe(client.w, down, data), down, data, self.adapt_epochs)
