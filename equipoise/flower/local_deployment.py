"""A complete deployment on this machine: SuperLink, SuperNodes and the run, with TLS and registered keys only."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tomli_w

from equipoise.callbacks.base import Callback, RunContext
from equipoise.engine.assembly import check_back
from equipoise.engine.checkpoint import check_reach
from equipoise.errors import EquipoiseError, RunFailed
from equipoise.flower import own_user_only
from equipoise.flower.credentials import write_certificates, write_key
from equipoise.flower.local_apps import LocalApp
from equipoise.flower.processes import Processes, ended, free_ports, own_user_command
from equipoise.flower.warm import launch
from equipoise.storage import atomic_files
from equipoise.storage.run_folder import DEPLOYMENT, RunFolder

_HOST = "127.0.0.1"
_LINK = "deployment"
_POLL = 0.3  # seconds between two reads of what the server wrote
_STATUS_POLL = 60.0  # seconds between two requests to the SuperLink for the status of the run
_SERVER = "flwr-serverapp"  # the program that the SuperLink starts for the server's half of the app
_OPEN_PORTS = (
    "this machine cannot tell whose connections they are, so every user of it can reach the SuperLink's port and start "
    "runs, which run code as you: use `equipoise deploy local` only where you trust all users"
)


class LocalDeployment:
    """A deployment in the folder `deployment` of a run folder, which contains app, keys, clients and logs."""

    def __init__(
        self, local_app: LocalApp, out: Path, callback: Callback, *, warm: bool = True, fast_poll: bool = False
    ):
        """Create a deployment; nothing is written yet.

        Args:
            local_app: the app and its clients.
            out: the run folder.
            callback: gets the progress.
            warm: whether a resident process runs the clients' messages, where the system allows it.
            fast_poll: whether SuperNodes look for messages more often than Flower's do.
        """
        out = out.resolve()
        self.local_app, self.out, self.callback = local_app, RunFolder(out), callback
        self.folder = out / DEPLOYMENT
        self.keys, self.app = self.folder / "keys", self.folder / "app"
        self.registered: dict[str, int] = {}
        "numbers that Flower gave to the SuperNodes, by name"
        self.warm = launch.WarmFolder(self.folder / "warm") if warm and launch.available() else None
        self.supernode = launch.supernode_command(fast_poll)

    def prepare(self) -> None:
        """Write all files; the clients' states and keys of an earlier start are kept."""
        shutil.rmtree(self.app, ignore_errors=True)
        atomic_files.make_folder(self.folder)
        self.folder.chmod(0o700)  # private keys and all clients' data
        self.local_app.write_app(self.app, self.out.path)
        write_certificates(self.keys, [_HOST, "localhost"])
        for who in range(len(self.local_app.names)):
            if not (self.keys / self.node(who)).exists():
                write_key(self.keys / self.node(who))
            self.local_app.write_client(who, self.folder / "clients" / self.node(who))

    def node(self, who: int) -> str:
        """Return the name of a client's SuperNode, its key and its folder."""
        return f"client-{who:03d}"

    def run(self, resume: bool, back: int = 0) -> None:
        """Run the deployment to its end, and stop all its processes.

        Args:
            resume: whether to continue from a checkpoint.
            back: 0 for the newest checkpoint, N for the Nth complete round before it.
        """
        check_back(back, resume)
        self.out.admit(
            self.local_app.experiment.tables(), resume
        )  # what the server would refuse is refused before the start
        check_reach(self.out.checkpoint, back)
        self.prepare()
        environment = {
            "FLWR_HOME": str((self.folder / "flwr").resolve()),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "FLWR_INTERNAL_GRPC_CONTROL_API": "0",  # ports that nobody would guard
            "FLWR_INTERNAL_GRPC_FLEET_API": "0",
            "PYTHONUNBUFFERED": "1",
        }
        if not own_user_only.supported():
            self.callback.on_message(_OPEN_PORTS)
        with Processes(self.folder / "logs", environment) as processes:
            self._start(processes)
            follower = Follower(self.out, self.callback)
            command = ["flwr", "run", str(self.app), _LINK, "--format", "json"]
            command += ["--run-config", f"resume={str(resume).lower()} back={back}"]
            reply = json.loads(processes.call(command, cwd=self.folder))
            if not reply.get("success"):
                raise EquipoiseError(f"flwr run failed: {reply.get('error-message')}")
            self._watch(processes, follower, str(reply["run-id"]))

    def _start(self, processes: Processes) -> None:
        if self.warm is not None:
            self.warm.start(processes)
        link, *ports = free_ports(1 + len(self.local_app.names))
        flower_home = Path(processes.environment["FLWR_HOME"])
        atomic_files.make_folder(flower_home)
        address = f"{_HOST}:{link}"
        connection = {"address": address, "root-certificates": str((self.keys / "ca.crt").resolve())}
        atomic_files.write_text(
            flower_home / "config.toml", tomli_w.dumps({"superlink": {"default": _LINK, _LINK: connection}})
        )
        certificates = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
        certificates[1::2] = [str(self.keys / name) for name in certificates[1::2]]
        superlink = ["flower-superlink", "--host", _HOST, "--port", str(link), *certificates]
        superlink += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        processes.start("superlink", own_user_command(superlink))
        processes.await_port("superlink", link)

        def register(who: int) -> None:
            key = str(self.keys / f"{self.node(who)}.pub")
            name = self.local_app.names[who]
            command = ["flwr", "supernode", "register", key, _LINK, "--name", name, "--format", "json"]
            self.registered[self.node(who)] = json.loads(processes.call(command))["node-id"]

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(register, range(len(self.local_app.names))))
        for who, port in enumerate(ports):
            node = [*self.supernode, "--superlink", address, "--host", _HOST, "--port", str(port)]
            node += ["--root-certificates", str(self.keys / "ca.crt")]
            node += ["--auth-supernode-private-key", str(self.keys / self.node(who))]
            node += ["--node-config", str(self.folder / "clients" / self.node(who) / "client.toml")]
            processes.start(self.node(who), own_user_command(node))

    def _watch(self, processes: Processes, follower: "Follower", run: str) -> None:
        """Wait until the server reports its end; report every process that dies before that."""
        reported: set[str] = set()
        asked, status = time.monotonic(), ""
        server, gone = None, False
        while True:
            if (end := follower.look()) is not None:
                if end["event"] == "failed":
                    raise RunFailed(end["text"])
                return
            if gone or status.startswith("finished"):  # everything that it wrote has been read
                why = f" ({status})" if status.startswith("finished") else ""
                log = processes.logs / "superlink.log"
                raise RunFailed(f"the server ended{why} without reporting it; continue with --resume. Its log: {log}")
            if self.warm is not None and (reason := self.warm.cold_reason()):
                self.callback.on_message(f"a client ran cold, which is slower and gives the same results: {reason}")
            for name in sorted(set(processes.dead()) - reported):
                reported.add(name)
                self._report_end(processes, name)
            if server is None:
                server = processes.descendant("superlink", _SERVER)
            elif ended(server):
                gone = True
                continue
            if time.monotonic() - asked > _STATUS_POLL:
                asked = time.monotonic()
                state = json.loads(processes.call(["flwr", "list", _LINK, "--run-id", run, "--format", "json"]))
                status = state["runs"][0]["status"]
            time.sleep(_POLL)

    def _report_end(self, processes: Processes, name: str) -> None:
        """Report that a process has ended; the run fails if it cannot continue without it."""
        if name == "superlink":
            raise RunFailed(f"the SuperLink ended; continue with --resume. Its log ends with: {processes.tail(name)}")
        log = processes.logs / f"{name}.log"
        if name not in self.registered:
            self.callback.on_message(f"{name} ended. Its log: {log}")
            return
        left, needed = len(self.registered.keys() - processes.dead()), self.local_app.experiment.deploy.minimum
        if left < needed:
            raise RunFailed(
                f"{name} ended; {left} clients are left, and a round needs {needed}; continue with --resume. "
                f"Its log: {log}"
            )
        self.callback.on_message(f"{name} ended; the rounds continue without it. Its log: {log}")
        # Flower would let the server wait for its answer until it has missed its heartbeats for a minute.
        try:
            processes.call(["flwr", "supernode", "unregister", str(self.registered[name]), _LINK, "--format", "json"])
        except EquipoiseError as error:
            self.callback.on_message(f"a round may wait a minute for {name}: {error}")


class FollowedRun(RunContext):
    """What a callback may see of a run that another process does: how far it was when it began."""

    def __init__(self, rounds: int, done: int):
        self._rounds, self._done = rounds, done

    @property
    def rounds(self) -> int:
        return self._rounds

    @property
    def done(self) -> int:
        return self._done


class Follower:
    """Reads what the server writes to its run folder, and passes it to a callback."""

    def __init__(self, folder: RunFolder, callback: Callback):
        self.folder, self.callback = folder, callback
        self.read = {path: folder.length(path) for path in (folder.metrics, folder.events)}

    def look(self) -> dict[str, Any] | None:
        """Pass on what is new; return the event that ends the run, once it was written."""
        for line in self._new(self.folder.metrics):
            self.callback.on_round_end(line)
        for event in self._new(self.folder.events):
            if event["event"] in ("finished", "failed"):
                for line in self._new(self.folder.metrics):
                    self.callback.on_round_end(line)
                return event
            if event["event"] == "begin":
                self.read[self.folder.metrics] = self.folder.length(self.folder.metrics)
                self.callback.attach(FollowedRun(event["rounds"], event["round"]))
                self.callback.on_run_begin()
            elif event["event"] == "stopped":
                self.callback.on_stop(event["text"])
            else:
                self.callback.on_message(event["text"])
        return None

    def _new(self, path: Path) -> Iterator[dict[str, Any]]:
        if self.folder.length(path) < self.read[path]:  # cut back to the last checkpoint
            self.read[path] = self.folder.length(path)
        if self.folder.length(path) == self.read[path]:
            return
        with path.open("rb") as file:
            file.seek(self.read[path])
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.read[path] += len(line)
                yield json.loads(line)
