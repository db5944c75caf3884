"""Checks of clients' updates: complete, finite, of a plausible weight, within privacy's clip, not far beyond others.

No honest client fails them. They bound what one client can do to a run with a single message; a client that stays
within them can still send a poisoned update, which is what robust reducers are for.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.algorithms.schema import MessageSchema
from equipoise.config.deployment import Deploy
from equipoise.flower.codec import RejectedMessage, group
from equipoise.flower.protocol import reported_solves
from equipoise.flower.roster import Member
from equipoise.flower.transport import Reply
from equipoise.flower.upload_norms import UploadNorms, difference_norm
from equipoise.privacy.mechanisms import Privacy
from equipoise.state import State, Upload
from equipoise.training.buffers import BUFFERS

_ROUNDING = 1e-6  # relative: a whole number in float32 may be rounded up
_CLIP_ROUNDING = 1e-3  # relative: noise and the reference are added in the message's number format
_TAIL = 12.0  # noise of d numbers is longer than sigma (sqrt(d) + t) with a probability below exp(-t^2 / 2)


@dataclass(frozen=True)
class Received:
    """A client's reply to an order to train, and what the server knew beforehand."""

    member: Member
    reply: Reply
    down: State
    "the broadcast to it"
    last: State
    "its last upload, where the server uses the last uploads of all clients; otherwise empty"
    iterations: int
    "iteration limit of equilibrium solves on its device, as far as the server knows"


class UploadChecks:
    """Tells which updates of an exchange can be used; remembers how long each client's last update was."""

    def __init__(self, schema: MessageSchema, settings: Deploy, privacy: Privacy | None):
        """Prepare the checks of a run.

        Args:
            schema: what the algorithm's messages contain.
            settings: the section [deploy], which has the limits.
            privacy: the section [privacy], if there is one.
        """
        self.schema, self.settings, self.privacy = schema, settings, privacy
        self.norms = UploadNorms(settings.largest_norm)

    def check(
        self, received: Sequence[Received], round: int, step: int, sigma: float
    ) -> tuple[dict[str, Upload], dict[str, RejectedMessage]]:
        """Return the updates of an exchange that can be used, and why the others cannot, by the clients' names.

        Args:
            received: the replies.
            round: the round that they should have trained for.
            step: number of the exchange within the round.
            sigma: standard deviation of privacy's noise, if clients add it.
        """
        usable: dict[str, Upload] = {}
        rejected: dict[str, RejectedMessage] = {}
        norms: dict[str, float] = {}
        scale = 1.0
        for each in received:
            name = each.member.name
            try:
                upload = self._checked(each, round)
                scale = max(scale, difference_norm(each.down), difference_norm(each.last))
                references = self._references(upload.message, each)
                norms[name] = difference_norm(upload.message, references)
                self._check_clip(upload.message, norms[name], references, round, sigma)
                usable[name] = upload
            except RejectedMessage as error:
                rejected[name] = error
        for name, why in self.norms.outliers(step, {name: norms[name] for name in usable}, scale).items():
            del usable[name]
            rejected[name] = RejectedMessage("norm", f"round {round}: {why}")
        self.norms.keep(step, {name: norms[name] for name in usable})
        return usable, rejected

    def _checked(self, received: Received, round: int) -> Upload:
        """Return a client's upload, or raise RejectedMessage if it is incomplete or has an impossible weight."""
        tensors = group(received.reply.tensors, "up")
        if received.reply.answer.trained != round or tensors.shapes() != self.schema.up:
            raise RejectedMessage("shape", f"round {round}: the update is incomplete")
        if not tensors.finite():
            raise RejectedMessage("not-finite", f"round {round}: the update has NaN or infinite numbers")
        counted = reported_solves(received.reply.answer)
        if any(stats.unconverged > stats.solves for stats in (counted.forward, counted.backward)):
            raise RejectedMessage("counts", f"round {round}: more solves failed than there were")
        weight = tensors.get("weight")
        if weight is not None:
            self._check_weight(float(weight.min()), float(weight.max()), received, round)
        return Upload(State({k: t for k, t in tensors.items() if k != "weight"}), weight=weight)

    def _check_weight(self, low: float, high: float, received: Received, round: int) -> None:
        if low <= 0:
            raise RejectedMessage("weight", f"round {round}: the weight is not above zero")
        if high > self.settings.largest_weight:
            raise RejectedMessage(
                "weight",
                f"round {round}: the weight {high:g} is above deploy.largest_weight = {self.settings.largest_weight:g}",
            )
        samples, iterations = received.member.samples, received.iterations
        if self.schema.weighs_samples and 0 < samples < high * (1 - _ROUNDING):
            raise RejectedMessage(
                "weight", f"round {round}: the weight {high:g} is above the {samples} samples that it announced"
            )
        if self.schema.weighs_iterations and iterations < high * (1 - _ROUNDING):
            raise RejectedMessage(
                "weight",
                f"round {round}: the weight {high:g} is above the {iterations} iterations that its device may perform",
            )

    def _references(self, message: State, received: Received) -> dict[str, list[Tensor]]:
        """Return what each field of a message is a change of, as the algorithm declares it.

        The last upload comes first, as for privacy's clip. BatchNorm statistics are a change of those that were sent.
        """
        if received.last:
            return {name: [received.last[name]] for name in message if name in received.last}
        declared = {BUFFERS: (BUFFERS,), **self.schema.references}
        return {
            name: [received.down[field] for field in declared[name] if field in received.down]
            for name in message
            if name in declared
        }

    def _check_clip(
        self, message: State, norm: float, references: Mapping[str, Sequence[Tensor]], round: int, sigma: float
    ) -> None:
        """Raise RejectedMessage if a message is longer than privacy's clip and noise can make it."""
        if self.privacy is None or self.privacy.of_samples:
            return
        noise = 0.0 if self.privacy.central else sigma * (math.sqrt(message.numel) + _TAIL)
        precision = max((torch.finfo(t.dtype).eps for t in message.values() if t.is_floating_point()), default=0.0)
        rounding = 8 * precision * difference_norm(State({k: each[0] for k, each in references.items() if each}))
        if norm > (self.privacy.clip + noise) * (1 + _CLIP_ROUNDING) + rounding:
            most = f"privacy.clip = {self.privacy.clip:g}" + (f" and noise of sigma = {sigma:g}" if noise else "")
            raise RejectedMessage("clip", f"round {round}: the update's norm {norm:.3g} is above {most}")

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        return {"norms": self.norms.facts()}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Take back what was saved; runs of older versions saved nothing."""
        self.norms.restore(facts.get("norms", {}))
