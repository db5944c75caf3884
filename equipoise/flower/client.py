"""A real client: one order in, one answer out; data and state stay here."""

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from flwr.app import Message
from pydantic import Field
from torch import Tensor

from equipoise.algorithms.capabilities import HasConsensusModel, exchanges_of, initial_upload_of
from equipoise.algorithms.schema import infer_schema
from equipoise.attacks import poison_labels
from equipoise.data.federation import Federation
from equipoise.engine.model_files import write_model
from equipoise.errors import EquipoiseError
from equipoise.evaluation.scoreboard import score_row
from equipoise.executors.base import (
    BUFFERS,
    RELEASED,
    ClientJob,
    ClientModel,
    ClientResult,
    ModelKind,
    with_engine_state,
)
from equipoise.executors.threaded import ThreadedExecutor
from equipoise.flower.client_data import DataFunction, client_data
from equipoise.flower.client_state import ClientStateFile, StoredState
from equipoise.flower.codec import RejectedMessage, group, named
from equipoise.flower.deployment_plan import DeploymentPlan
from equipoise.flower.protocol import (
    NOBODY,
    PRINTABLE,
    STATUSES,
    Answer,
    Order,
    content,
    open_message,
    order_shapes,
    solver_facts,
)
from equipoise.flower.release_ledger import ReleaseLedger
from equipoise.privacy.accounting import ReleaseCount
from equipoise.privacy.mechanisms import public_reference, secure_noise
from equipoise.settings import MOST, Settings, read
from equipoise.state import State, Upload
from equipoise.storage import atomic_files

log = logging.getLogger("equipoise")


class ClientSettings(Settings):
    """A client's own settings: the file that its SuperNode is given as --node-config."""

    name: Annotated[str, Field(min_length=1, max_length=256, pattern=PRINTABLE)]
    "who it is; no other client may have the same name"
    data: str = ""
    "folder or file with its samples"
    state: str
    "folder in which it keeps its state"
    unseen: bool = False
    "take no part in training, only adapt the result to its own data"
    iterations: Annotated[int, Field(ge=0, le=MOST)] = 0
    "most iterations of an equilibrium layer's solve that this machine affords in training; 0: as the experiment says"
    evaluate: bool = True
    "may the scores of its models leave, where the experiment asks for them?"


def work(plan: DeploymentPlan, settings: Mapping[str, Any], hook: DataFunction | None, message: Message) -> Message:
    """The answer to an order, whatever happens: the server hears one word of what goes wrong here.

    An error's text may speak of the data, so it goes to the client's own log.
    """
    try:
        return Client(plan, settings, hook)(message)
    except Exception as error:
        _say(settings.get("name"), error)
        return Message(content(Answer(run=NOBODY, number=0, client="", status="failed")), reply_to=message)


def _say(name: object, error: Exception) -> None:
    log.error("%s: %s", name, error, exc_info=not isinstance(error, (EquipoiseError, RejectedMessage)))


def client_settings(given: Mapping[str, Any], own: bool) -> ClientSettings:
    """Checked. A data function of the user's own may have settings of its own, if they are no misspelt ones of ours."""
    fields = ClientSettings.model_fields
    others = [key for key in given if key not in fields and own and not get_close_matches(key, fields, cutoff=0.75)]
    return read(ClientSettings, {k: v for k, v in given.items() if k not in others}, "client")


class Client:
    def __init__(self, plan: DeploymentPlan, settings: Mapping[str, Any], hook: DataFunction | None = None):
        self.plan, self.hook, self.given = plan, hook, settings
        self.settings = client_settings(settings, hook is not None)
        self.task = plan.task()
        start = self.task.start(1, seed=plan.experiment.schedule.seed)
        self.schema = infer_schema(plan.experiment.algorithm, start, plan.experiment.privacy is None)
        self.accepts = order_shapes(self.schema, start, len(self.task.buffers))

    def __call__(self, message: Message) -> Message:
        order, given = open_message(message, Order, self.accepts)
        try:
            return Message(content(*self.answer(order, given)), reply_to=message)
        except Exception as error:
            _say(self.settings.name, error)
            status = error.reason if isinstance(error, RejectedMessage) and error.reason in STATUSES else "failed"
            return Message(content(self._answer(order, status=status)), reply_to=message)

    def _answer(self, order: Order, **facts: Any) -> Answer:
        return Answer(run=order.run, number=order.number, client=self.settings.name, **facts)

    def answer(self, order: Order, tensors: State) -> tuple[Answer, dict[str, Tensor]]:
        if order.hello:
            own = self._own()  # who cannot take part says so now
            if (privacy := self.plan.experiment.privacy) is not None:
                privacy.guarantee(privacy.noise(ReleaseCount(1)), ReleaseCount(1))
            atomic_files.make_folder(Path(self.settings.state).expanduser())
            facts: dict[str, Any] = {"unseen": self.settings.unseen, "layout": self.task.space.fingerprint()}
            if self.plan.experiment.algorithm.requires.total_samples:
                facts["size"] = len(own.train[0])
            return self._answer(order, status="hello", **facts), {}
        if order.client != self.settings.name:
            raise RejectedMessage("failed", f"an order for {order.client!r} came to {self.settings.name!r}")
        home = ClientStateFile(Path(self.settings.state).expanduser(), order.run, self.settings.name)
        with home.locked():
            kept = home.read()
            if self.schema.client or self.task.keeps:  # else there is nothing to get out of step
                if order.number <= kept.newest:
                    raise RejectedMessage("stale", f"order {order.number} comes after {kept.newest}; it is left alone")
                kept = kept.settled(order.accepted, order.within)
            return self._work(home, kept, order, tensors)

    def data(self) -> Federation:
        return client_data(self.plan, self.settings.name, self.given, self.hook)

    def _own(self) -> Federation:
        try:
            return self.data()
        except EquipoiseError as error:
            raise RejectedMessage("no-data", str(error)) from None

    def _work(
        self, home: ClientStateFile, kept: StoredState, order: Order, tensors: State
    ) -> tuple[Answer, dict[str, Tensor]]:
        experiment, task = self.plan.experiment, self.task
        down = group(tensors, "down")
        if down.shapes() != self.schema.down or not tensors.finite():
            raise RejectedMessage("failed", "the server's message is not whole, or has NaN or infinite numbers")
        federation = self._own().prepared(task.dtype, task.channels_last)
        if order.malicious and experiment.attack is not None:
            federation = poison_labels(federation, experiment.attack, federation.names, experiment.schedule.seed)
        threads = experiment.deploy.threads or len(os.sched_getaffinity(0))
        executor = ThreadedExecutor(task, federation, experiment.algorithm, experiment.schedule.seed, 1, threads)
        try:
            state = kept.now
            if state is None:
                state = self._initial(order, tensors, len(federation.train[0]))
            job = ClientJob(0, state, down, self._budget(order))
            facts: dict[str, Any] = {}
            sent: dict[str, Tensor] = {}
            if order.evaluate:
                shared = tensors.get(order.shared) if order.shared else None
                scores, facts["adapted"], models = self._evaluate(executor, job, order.evaluate, shared)
                if order.finish:
                    self._keep(home, order, models)
                if experiment.deploy.evaluate and self.settings.evaluate:
                    facts["evaluated"] = order.evaluate
                    sent |= named(scores, "scores")
                else:
                    del facts["adapted"]
            if order.train:
                done = next(iter(executor.train(order.train, [job], lambda: False)))
                solves, complaint = task.judge([done.solves])
                if complaint:
                    log.warning("%s: round %d: %s", self.settings.name, order.train, complaint)
                if not done.finite:
                    raise RejectedMessage("not-finite", f"round {order.train}: the update has NaN or infinite numbers")
                facts |= {"trained": order.train, "samples": done.gradient_samples}
                facts |= solver_facts(solves) if experiment.privacy is None else {}
                upload, client = self._released(home, done, job)
                sent |= named(upload.wire, "up")
                # Written before it is sent: an update that the server takes is never lost here.
                home.write(kept.trained_on(order.number, client))
            else:
                home.write(replace(kept, trained=0, pending=None, newest=order.number))
            return self._answer(order, **facts), sent
        finally:
            executor.close()

    def _released(self, home: ClientStateFile, done: ClientResult, job: ClientJob) -> tuple[Upload, State]:
        """What leaves, and what is kept, with the last message as the server has it where that is needed."""
        experiment = self.plan.experiment
        if (privacy := experiment.privacy) is None:
            return done.upload, done.client
        known = State(
            {k.removeprefix(RELEASED): t for k, t in job.client.items() if k.startswith(RELEASED)}
        ) or public_reference(done.upload, job.down)
        planned = ReleaseCount(experiment.schedule.rounds, exchanges_of(experiment.algorithm))
        ledger = ReleaseLedger(home.path / "releases.json", planned.rounds * planned.exchanges)
        noise = secure_noise() if privacy.central else ledger.noise(done.upload.message)
        upload = privacy.release(done.upload, known, privacy.noise(planned), noise)
        if not any(k.startswith(RELEASED) for k in job.client):
            return upload, done.client
        return upload, State(done.client, **{RELEASED + k: t for k, t in upload.message.items()})

    def _budget(self, order: Order) -> int | None:
        """The iterations that it affords: what it says itself, and what the experiment's classes of devices give it."""
        given = [k for k in (order.iterations, self.settings.iterations) if k]
        return min(given) if given else None

    def _initial(self, order: Order, tensors: State, samples: int) -> State:
        """The state of a client that has not taken part yet, from the model that all began with."""
        if not self.schema.client and not len(self.task.buffers):
            return with_engine_state(State(), self.task, samples)
        start = group(tensors, "start")
        if "w0" not in start or ("buffers" in start) != bool(len(self.task.buffers)):
            raise RejectedMessage("failed", "the server did not send the model that all began with")
        seed, algorithm = self.plan.experiment.schedule.seed, self.plan.experiment.algorithm
        begin = replace(self.task.start(order.clients, order.samples, seed), w0=start.w0)
        state = with_engine_state(algorithm.init_client(begin), self.task, samples, start.get("buffers"))
        first = None if self.plan.experiment.privacy is None else initial_upload_of(algorithm, begin)
        return State(state, **{RELEASED + k: t for k, t in (first or State()).items()})

    def _evaluate(
        self, executor: ThreadedExecutor, job: ClientJob, round: int, shared: Tensor | None
    ) -> tuple[dict[str, Tensor], int, dict[str, ClientModel]]:
        """Scores of all models that the client has on its own samples."""
        federation = executor.federation
        splits = (federation.train[0], federation.validation[0], federation.test[0])
        scores = {"sizes": torch.tensor([len(split) for split in splits])}
        own, cut = np.concatenate(splits[1:]), len(splits[1])

        unseen, samples = self.settings.unseen, 0
        models: dict[str, ClientModel] = {}
        made: dict[str, ModelKind] = {"personal": "unseen" if unseen else "personal"}
        if isinstance(self.plan.experiment.algorithm, HasConsensusModel) and not unseen:
            made["consensus"] = "consensus"
        for kind, how in made.items():
            model, trained = next(iter(executor.models(round, [job], how)))
            models |= {} if model is None else {kind: model}
            samples += trained
        if shared is not None and not (unseen and len(self.task.buffers)):
            # Who never trained has no statistics of its own to run the global model with.
            models["global"] = ClientModel(0, shared, job.client.get(BUFFERS))
        for kind, scored in zip(models, executor.score(list(models.values()), [own] * len(models)), strict=True):
            scores[kind] = torch.from_numpy(score_row(scored, cut, self.task.metric))
        return scores, samples, models

    def _keep(self, home: ClientStateFile, order: Order, models: Mapping[str, ClientModel]) -> None:
        """The models that there are, as files that need neither the server nor this state."""
        for kind, model in models.items():
            if model.looks_up:
                log.info("%s: its own model is the global one together with its samples, and no file", order.client)
                continue
            module = self.task.to_module(model.vector, model.buffers)
            path = home.path / f"{kind}.safetensors"
            write_model(path, module, *self.plan.described(), order.client if kind != "global" else kind)
            log.info("%s: the %s model is in %s", self.settings.name, kind, path)
