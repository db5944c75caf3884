"""A client of a deployment: it receives an order and returns an answer; its data and its state stay on its machine."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from flwr.app import Message
from pydantic import Field
from torch import Tensor, nn

from equipoise.algorithms.capabilities import HasConsensusModel, initial_upload_of
from equipoise.attacks import TriggeredSamples, poison_samples
from equipoise.data.federation import Federation
from equipoise.data.series_scale import SeriesScale, client_scale
from equipoise.distributed.shards import ClientShards
from equipoise.engine.compatibility import check_batches
from equipoise.engine.model_files import write_model
from equipoise.engine.shared_buffers import message_schema
from equipoise.engine.unscaled import described_series
from equipoise.errors import EquipoiseError
from equipoise.evaluation.attack_success import SuccessCounter
from equipoise.evaluation.kept_predictions import check_room
from equipoise.evaluation.scoreboard import score_row
from equipoise.executors.base import (
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
from equipoise.flower.disclosure import disclosures
from equipoise.flower.protocol import (
    FORECASTS,
    NOBODY,
    PRINTABLE,
    STATUSES,
    SUCCESS_COUNTS,
    Answer,
    Order,
    content,
    open_message,
    order_shapes,
    solver_facts,
)
from equipoise.flower.release_ledger import ReleaseLedger, check_without_privacy
from equipoise.flower.release_plan import Budget, ReleasePlan
from equipoise.flower.release_records import as_digest, message_digest
from equipoise.flower.reported_forecasts import reported
from equipoise.privacy.mechanisms import public_reference, secure_noise
from equipoise.settings import MOST, Count, Positive, Settings, read
from equipoise.state import State, Upload
from equipoise.storage import atomic_files
from equipoise.storage.diagnostics import DIAGNOSTICS
from equipoise.training.buffers import BUFFERS
from equipoise.training.sample_privacy import SamplePrivacy

log = logging.getLogger("equipoise")


class ClientSettings(Settings):
    """A client's settings: the file that its SuperNode gets as --node-config."""

    name: Annotated[str, Field(min_length=1, max_length=256, pattern=PRINTABLE)]
    "name of the client; no other client may have the same name"
    data: str = ""
    "folder or file with the client's samples"
    state: str
    "folder for the client's state"
    unseen: bool = False
    "whether the client does not train, but only adapts the result to its own data"
    iterations: Annotated[int, Field(ge=0, le=MOST)] = 0
    "largest number of iterations per equilibrium solve in training on this machine; 0: as the experiment says"
    evaluate: bool = True
    "whether the scores of the client's models may be sent to the server if the experiment asks for them"
    counts: bool = True
    "whether numbers of samples and of equilibrium solves may be sent; without them, scores are not sent either"
    max_releases: Count | None = None
    "largest number of private messages that ever leave this state folder; default: one run of the first experiment"
    max_epsilon: Positive | None = None
    "largest epsilon of all private messages that ever leave this state folder"


def work(plan: DeploymentPlan, settings: Mapping[str, Any], hook: DataFunction | None, message: Message) -> Message:
    """Return the answer to an order, also after an error.

    The server only gets a status. The text of an error may contain something of the data, so it goes to the client's
    own log.

    Args:
        plan: what the deployment does.
        settings: the client's settings, as read from its file.
        hook: the user's function that returns the client's data, if there is one.
        message: the order.
    """
    try:
        return Client(plan, settings, hook)(message)
    except Exception as error:
        _log_error(settings.get("name"), error)
        return Message(content(Answer(run=NOBODY, number=0, client="", status="failed")), reply_to=message)


def _log_error(name: object, error: Exception) -> None:
    log.error("%s: %s", name, error, exc_info=not isinstance(error, (EquipoiseError, RejectedMessage)))


def client_settings(given: Mapping[str, Any], own: bool) -> ClientSettings:
    """Check a client's settings.

    Args:
        given: the settings, as read from the client's file.
        own: whether the user's own function loads the data. It may have further settings, as long as they do not look
            like misspelt names of ours.
    """
    fields = ClientSettings.model_fields
    others = [key for key in given if key not in fields and own and not get_close_matches(key, fields, cutoff=0.75)]
    return read(ClientSettings, {k: v for k, v in given.items() if k not in others}, "client")


class Client:
    """Carries out one order: greet the server, or check the order's number, score, train and answer."""

    def __init__(self, plan: DeploymentPlan, settings: Mapping[str, Any], hook: DataFunction | None = None):
        """Check the settings and build the model.

        Args:
            plan: what the deployment does.
            settings: the client's settings, as read from its file.
            hook: the user's function that returns the client's data, if there is one.
        """
        self.plan, self.hook, self.given = plan, hook, settings
        self.settings = client_settings(settings, hook is not None)
        self.task = plan.task()
        start = self.task.start(1, seed=plan.experiment.schedule.seed)
        privacy = plan.experiment.privacy
        noised = privacy is not None and not privacy.of_samples
        self.schema = message_schema(self.task, plan.experiment.algorithm, start, noised)
        self.accepts = order_shapes(self.schema, start, len(self.task.buffers))
        self.folder = Path(self.settings.state).expanduser()
        self.budget = Budget(self.settings.max_releases, self.settings.max_epsilon)
        self._check_counts()

    def __call__(self, message: Message) -> Message:
        """Return the reply to a message of the server."""
        order, tensors = open_message(message, Order, self.accepts)
        try:
            return Message(content(*self.answer(order, tensors)), reply_to=message)
        except Exception as error:
            _log_error(self.settings.name, error)
            status = error.reason if isinstance(error, RejectedMessage) and error.reason in STATUSES else "failed"
            return Message(content(self._answer(order, status=status)), reply_to=message)

    def answer(self, order: Order, tensors: State) -> tuple[Answer, dict[str, Tensor]]:
        """Carry out an order; return the answer and its tensors."""
        if order.hello:
            return self._greet(order), {}
        if order.client != self.settings.name:
            raise RejectedMessage("failed", f"an order for {order.client!r} came to {self.settings.name!r}")
        if order.train and self.settings.unseen:
            raise RejectedMessage("failed", "an order to train came, but this client does not train (unseen = true)")
        # First of all, because a state folder that may release nothing must not get a folder for the run either.
        evidence = self._admit(order.run)
        state_file = ClientStateFile(self.folder, order.run, self.settings.name)
        state_file.evidence = evidence
        with state_file.locked():
            stored = self._check_number(order, state_file.read())
            return self._execute(order, tensors, state_file, stored)

    @cached_property
    def release_plan(self) -> ReleasePlan | None:
        """Return what leaves under privacy, by the client's own copy of the experiment; None without privacy."""
        experiment, name = self.plan.experiment, self.settings.name
        if experiment.privacy is None:
            return None
        local, samples = None, 0
        if experiment.privacy.of_samples:
            start = self.task.start(1, seed=experiment.schedule.seed)
            rounds = 0 if self.settings.unseen else experiment.schedule.rounds
            local = SamplePrivacy.of(experiment.privacy, self.task, experiment.algorithm, start, rounds)
            samples = len(self._available_data().train[0])
        return ReleasePlan.of(experiment, self.schema, self.task.space.fingerprint(), local, name, samples)

    @property
    def ledger(self) -> ReleaseLedger | None:
        """Return the ledger of what the client has released; None without privacy."""
        return None if self.release_plan is None else ReleaseLedger(self.folder, self.release_plan, self.budget)

    def disclosures(self) -> list[str]:
        """Return the list of all that leaves this client, one line each, and how much of it privacy covers."""
        experiment, settings = self.plan.experiment, self.settings
        return disclosures(
            self.schema,
            self.task.metrics,
            self.release_plan,
            trains=not settings.unseen,
            scores=experiment.deploy.evaluate and settings.evaluate and settings.counts,
            counts=settings.counts,
            size=experiment.algorithm.requires.total_samples or self.schema.weighs_samples,
            success=experiment.attack is not None and experiment.attack.success() is not None and not settings.unseen,
            horizon=experiment.deploy.horizon,
            unit=experiment.deploy.unit,
        )

    def check_budget(self, run: str = NOBODY) -> str:
        """Raise an error if the client's settings or its state folder allow no release; return what is left.

        Args:
            run: the run that asks.
        """
        if self.ledger is None:
            check_without_privacy(self.folder, self.budget)
            return ""
        return self.ledger.check(run)

    def _admit(self, run: str) -> str | None:
        """Check that the client may take part in a run; return what its state file records of earlier releases."""
        if self.ledger is None:
            check_without_privacy(self.folder, self.budget)
            return None
        return self.ledger.admit(run)

    def _check_counts(self) -> None:
        """Raise an error if numbers of samples are not to be sent, but the algorithm needs them."""
        if self.settings.counts:
            return
        if self.plan.experiment.algorithm.requires.total_samples:
            raise EquipoiseError(
                f"counts = false in the client's settings, but {self.plan.experiment.algorithm_name} needs the number "
                "of training samples; allow counts, or do not take part"
            )
        if "weight" in self.schema.up:
            what = "a number of iterations" if self.schema.weighs_iterations else "computed from the training samples"
            raise EquipoiseError(
                "counts = false in the client's settings, but without [privacy] the weight in every update is "
                f"{'the number of training samples' if self.schema.weighs_samples else what}; "
                "allow counts, or do not take part"
            )

    def data(self) -> Federation:
        """Return the client's data, as a federation of one client."""
        return client_data(self.plan, self.settings.name, self.given, self.hook)

    def checked_data(self) -> Federation:
        """Return the client's data; whatever fails is an error in one sentence, for those who try the client out."""
        try:
            return self.data()
        except EquipoiseError:
            raise
        except Exception as error:  # whatever the user's function raises
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise EquipoiseError(f"the function data() of app.py failed for {self.settings.name!r}: {text}") from error

    def _greet(self, order: Order) -> Answer:
        """Report who this client is, after checking that it can take part."""
        data = self._available_data()
        atomic_files.make_folder(self.folder)
        left = self.check_budget(order.run)
        if not (self.folder / order.run).exists():
            for line in [*self.disclosures(), *([left] if left else [])]:
                log.info("%s: %s", self.settings.name, line)
        facts: dict[str, Any] = {"unseen": self.settings.unseen, "layout": self.task.space.fingerprint()}
        if self.plan.experiment.algorithm.requires.total_samples or self.schema.weighs_samples:
            facts["size"] = len(data.train[0])
        return self._answer(order, status="hello", **facts)

    def _check_number(self, order: Order, stored: StoredState) -> StoredState:
        """Reject an order that is not newer than those already seen; return the state that the server accepted last."""
        if not self.schema.client and not self.task.keeps:
            return stored  # without a state, nothing can get out of step
        if order.number <= stored.newest:
            raise RejectedMessage("stale", f"order {order.number} is not newer than {stored.newest}; it is ignored")
        return stored.settled(order.accepted, order.within, self.plan.experiment.schedule.keep_checkpoints)

    def _execute(
        self, order: Order, tensors: State, state_file: ClientStateFile, stored: StoredState
    ) -> tuple[Answer, dict[str, Tensor]]:
        """Score and train as the order asks, and write the new state."""
        experiment, task = self.plan.experiment, self.task
        down = group(tensors, "down")
        if down.shapes() != self.schema.down or not tensors.finite():
            raise RejectedMessage("failed", "the server's message is incomplete, or has NaN or infinite numbers")
        federation = self._available_data().prepared(task.dtype, task.channels_last)
        if order.malicious and experiment.attack is not None:
            places = {self.settings.name: order.place}
            federation = poison_samples(federation, experiment.attack, places, experiment.schedule.seed)
        check_batches(task, experiment.algorithm, {self.settings.name: len(federation.train[0])})
        threads = experiment.deploy.threads or len(os.sched_getaffinity(0))
        executor = ThreadedExecutor(
            task, federation, experiment.algorithm, experiment.schedule, 1, ClientShards(len(federation)), inner=threads
        )
        if self.release_plan is not None and self.release_plan.local is not None:
            # Models that are made to be scored stay here; their noise is never asked for again.
            executor.privacy = self.release_plan.local.with_source(lambda *_: secure_noise())
        try:
            state = stored.now
            if state is None:
                state = self._initial(order, tensors, len(federation.train[0]))
            job = ClientJob(0, state, down, self._budget(order))
            facts: dict[str, Any] = {}
            sent: dict[str, Tensor] = {}
            if order.evaluate:
                score_facts, scores = self._score(order, tensors, executor, job, state_file)
                facts |= score_facts
                sent |= scores
            if order.train:
                question = self._question(order, tensors, job.client)
                if self.ledger is not None:
                    self.ledger.open(order.run, question)
                train_facts, upload, new_state = self._train(order, question, executor, job, state_file)
                facts |= train_facts
                sent |= upload
                # The state is written before the update is sent: an update that the server accepts is never lost here.
                state_file.write(stored.trained_on(order.number, new_state))
            else:
                state_file.write(replace(stored, trained=0, pending=None, newest=order.number))
            return self._answer(order, **facts), sent
        finally:
            executor.close()

    def _question(self, order: Order, tensors: State, state: State) -> str:
        """Return a digest of all that an update depends on besides the client's data.

        A client's state follows from the run and from the order whose update was accepted last.
        """
        facts: list[int | str] = [order.train, order.clients, order.samples, order.malicious, order.iterations]
        facts += [order.place] if order.place else []
        facts += [order.run, order.accepted, order.within] if state else []
        given = State({k: tensors[k] for k in sorted(tensors) if k != "global"})  # which is only scored
        return as_digest(json.dumps(facts).encode() + bytes.fromhex(message_digest(given)))

    def _train(
        self, order: Order, question: str, executor: ThreadedExecutor, job: ClientJob, state_file: ClientStateFile
    ) -> tuple[dict[str, Any], dict[str, Tensor], State]:
        """Train for a round; return facts and tensors for the answer, and the client's new state."""
        self._use_secret_noise(order, question, executor, state_file)
        result = next(iter(executor.train(order.train, [job], lambda: False)))
        solves, complaint = self.task.judge([result.solves])
        if complaint:
            log.warning("%s: round %d: %s", self.settings.name, order.train, complaint)
        of_samples = executor.privacy is not None  # then whether training diverges is covered, too
        if not result.finite and (self.ledger is None or of_samples):
            raise RejectedMessage("not-finite", f"round {order.train}: the update has NaN or infinite numbers")
        facts: dict[str, Any] = {"trained": order.train}
        if self.settings.counts:
            facts["samples"] = result.gradient_samples
            facts |= solver_facts(solves) if self.plan.experiment.privacy is None else {}
        else:
            facts["counts"] = False
        upload, new_state = self._released(order, question, result, job, state_file)
        sent = named(upload.wire, "up")
        if self.settings.counts and self.schema.diagnostics:  # none under privacy
            numbers = {name: torch.tensor([value], dtype=torch.float64) for name, value in result.diagnostics.items()}
            sent |= named(numbers, DIAGNOSTICS)
        return facts, sent, new_state

    def _use_secret_noise(
        self, order: Order, question: str, executor: ThreadedExecutor, state_file: ClientStateFile
    ) -> None:
        """Let training draw its noise from the client's secret, if it is single samples that are hidden.

        The noise belongs to the question and to the samples, as everything else follows from these two.
        """
        plan, ledger = self.release_plan, self.ledger
        if plan is None or plan.local is None or ledger is None:
            return
        x, y = executor.federation.gather(torch.from_numpy(executor.federation.train[0]))
        noise, state_file.evidence = ledger.noise(order.run, question, State(x=x, y=y))
        executor.privacy = plan.local.with_source(lambda *_: noise)

    def _released(
        self, order: Order, question: str, result: ClientResult, job: ClientJob, state_file: ClientStateFile
    ) -> tuple[Upload, State]:
        """Return the upload with privacy's noise, and the new state, with the released message where that is needed."""
        privacy, plan, ledger = self.plan.experiment.privacy, self.release_plan, self.ledger
        if privacy is None or plan is None or ledger is None or plan.local is not None:
            return result.upload, result.client
        last_release = State({k.removeprefix(RELEASED): t for k, t in job.client.items() if k.startswith(RELEASED)})
        reference = last_release or public_reference(result.upload, job.down)
        made, new_state = result.upload, result.client
        if not result.finite:
            # Whether training diverges depends on the data, so that the server must not be told.
            log.warning("%s: round %d: NaN in the update; noise alone is sent", self.settings.name, order.train)
            unchanged = {k: reference.get(k, torch.zeros_like(t)) for k, t in made.message.items()}
            made, new_state = Upload(State(unchanged)), job.client
        noise, state_file.evidence = ledger.noise(order.run, question, privacy.clipped(made.message, reference))
        upload = privacy.release(made, reference, plan.sigma, noise)
        if not last_release:
            return upload, new_state
        return upload, State(new_state, **{RELEASED + k: t for k, t in upload.message.items()})

    def _score(
        self, order: Order, tensors: State, executor: ThreadedExecutor, job: ClientJob, state_file: ClientStateFile
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Score the client's models, and write them at the end of the run; return facts and tensors for the answer."""
        global_model = tensors.get(order.shared) if order.shared else None
        scores, samples, models = self._evaluate(executor, job, order.evaluate, global_model)
        if order.finish:
            self._write_models(state_file, order, models, client_scale(executor.federation, 0))
        deploy = self.plan.experiment.deploy
        if not (deploy.evaluate and self.settings.evaluate and self.settings.counts):
            return {}, {}
        if order.finish and deploy.horizon:
            modules = {kind: self._module(executor, model) for kind, model in models.items()}
            scores |= named(reported(self.task, executor.federation, modules), FORECASTS)
        return {"evaluated": order.evaluate, "adapted": samples}, scores

    def _evaluate(
        self, executor: ThreadedExecutor, job: ClientJob, round: int, global_model: Tensor | None
    ) -> tuple[dict[str, Tensor], int, dict[str, ClientModel]]:
        """Return the scores of the client's models, the samples that making them took, and the models."""
        federation, metrics = executor.federation, self.task.metrics
        check_room(federation, self.task)
        splits = (federation.train[0], federation.validation[0], federation.test[0])
        scores = {"scores.sizes": torch.tensor([len(split) for split in splits])}
        indices, cut = np.concatenate(splits[1:]), len(splits[1])

        unseen, samples = self.settings.unseen, 0
        models: dict[str, ClientModel] = {}
        kinds: dict[str, ModelKind] = {"personal": "unseen" if unseen else "personal"}
        if isinstance(self.plan.experiment.algorithm, HasConsensusModel) and not unseen:
            kinds["consensus"] = "consensus"
        for kind, how in kinds.items():
            model, trained = next(iter(executor.models(round, [job], how)))
            models |= {} if model is None else {kind: model}
            samples += trained
        shared = job.down.get(BUFFERS)
        if global_model is not None and not (unseen and len(self.task.buffers) and shared is None):
            # A client that never trained has no statistics of its own to run the global model with.
            layout, own = self.task.buffer_layout, job.client.get(BUFFERS)
            buffers = own if shared is None else layout.merged(shared, self.task.buffers)
            models["global"] = ClientModel(0, global_model, buffers)
        for kind, scored in zip(models, executor.score(list(models.values()), [indices] * len(models)), strict=True):
            scores[f"scores.{kind}"] = torch.from_numpy(score_row(scored, cut, metrics))
            if metrics.arrays and scored.predictions is not None and len(splits[2]):
                scores[f"confusion.{kind}"] = torch.from_numpy(scored.predictions[cut:].confusion)
        if (counter := self._success_counter(federation)) is not None:
            for kind, model in models.items():
                module = counter.module(model.vector, model.buffers)
                module = executor.predictor(module, 0) if model.looks_up else module
                scores[f"{SUCCESS_COUNTS}.{kind}"] = torch.from_numpy(counter.count(0, module))
        return scores, samples, models

    def _module(self, executor: ThreadedExecutor, model: ClientModel) -> nn.Module:
        """Return the module that the client predicts with."""
        module = self.task.to_module(model.vector, model.buffers)
        return executor.predictor(module, 0) if model.looks_up else module

    def _success_counter(self, federation: Federation) -> SuccessCounter | None:
        """Return the counter of an attack's success, if the experiment measures it on this client."""
        attack = self.plan.experiment.attack
        measure = None if attack is None or self.settings.unseen else attack.success()
        return None if measure is None else SuccessCounter(TriggeredSamples(federation, measure), self.task)

    def _write_models(
        self,
        state_file: ClientStateFile,
        order: Order,
        models: Mapping[str, ClientModel],
        scale: SeriesScale | None,
    ) -> None:
        """Write the client's models as files that can be used without the server and without the client's state.

        All of them are for the client's own use, so that all have its `scale`, the global one too.
        """
        series = described_series(scale, self.task.loss.pinball)
        for kind, model in models.items():
            if model.looks_up:
                log.info("%s: its own model is the global one and its samples, so there is no file", order.client)
                continue
            module = self.task.to_module(model.vector, model.buffers)
            path = state_file.path / f"{kind}.safetensors"
            write_model(path, module, *self.plan.described(), order.client if kind != "global" else kind, series)
            log.info("%s: the %s model is in %s", self.settings.name, kind, path)

    def _answer(self, order: Order, **facts: Any) -> Answer:
        return Answer(run=order.run, number=order.number, client=self.settings.name, **facts)

    def _available_data(self) -> Federation:
        try:
            return self.data()
        except EquipoiseError as error:
            raise RejectedMessage("no-data", str(error)) from None

    def _budget(self, order: Order) -> int | None:
        """Return the limit of iterations: the lower of the client's own and that of the experiment's device classes."""
        given = [k for k in (order.iterations, self.settings.iterations) if k]
        return min(given) if given else None

    def _initial(self, order: Order, tensors: State, samples: int) -> State:
        """Return the state of a client that has not taken part yet, made from the common initial model."""
        if not self.schema.client and not len(self.task.buffers):
            return with_engine_state(State(), self.task, samples)
        received = group(tensors, "start")
        if "w0" not in received or ("buffers" in received) != bool(len(self.task.buffers)):
            raise RejectedMessage("failed", "the server did not send the initial model")
        seed, algorithm = self.plan.experiment.schedule.seed, self.plan.experiment.algorithm
        start = replace(self.task.start(order.clients, order.samples, seed), w0=received.w0)
        state = with_engine_state(algorithm.init_client(start), self.task, samples, received.get("buffers"))
        privacy = self.plan.experiment.privacy
        first = None if privacy is None or privacy.of_samples else initial_upload_of(algorithm, start)
        return State(state, **{RELEASED + k: t for k, t in (first or State()).items()})
