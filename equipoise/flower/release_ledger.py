"""What has left a client under privacy, so that no server can make it release more than its own settings allow.

There is one ledger per state folder, whatever run an order names: one secret, from which all noise is drawn, and one
list of releases. The state files beside it record how long the list was, so that a ledger that was removed, shortened
or replaced by an older one is noticed.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from equipoise.errors import EquipoiseError
from equipoise.flower.client_state import STATE_FILE
from equipoise.flower.codec import RejectedMessage
from equipoise.flower.release_plan import Budget, ReleasePlan
from equipoise.flower.release_records import (
    ReleaseRecords,
    as_digest,
    count_of_earlier_version,
    message_digest,
    recorded_evidence,
)
from equipoise.privacy.mechanisms import Noise, secure_noise
from equipoise.state import State
from equipoise.storage import atomic_files

LEDGER = "releases.json"
"""Name of the ledger in a client's state folder; version 0.1 had one of this name in the folder of every run."""
_RUN = re.compile("[0-9a-f]{32}")  # name of the folder of a run
_NEW_FOLDER = "give the client another, empty state folder; what it released before is then not counted there"


class ReleaseLedger:
    """The file with the questions that a client has answered, and with the secret from which its noise is drawn.

    A question that is asked again, in whichever run, gets the same answer, which reveals nothing new and does not count
    again. With fresh noise for every request, a server could average the noise away. Every other question counts, also
    if its answer without noise is one that was given before: otherwise a server would learn, for nothing and without
    noise, which questions have the same answer. It counts before the client looks at its data, so that a client whose
    budget is used up answers alike whatever its data are.
    """

    def __init__(self, folder: Path, plan: ReleasePlan, budget: Budget):
        """Prepare the ledger of a state folder; nothing is read yet.

        Args:
            folder: the client's state folder.
            plan: what the client's experiment releases.
            budget: what the client's settings allow.
        """
        self.folder, self.path, self.plan, self.budget = folder, folder / LEDGER, plan, budget
        self.lock = folder / "releases.lock"

    def check(self, run: str) -> str:
        """Raise an error if nothing can be released in a run; return how much is left, for the client's log.

        Args:
            run: the run that the server names.
        """
        # A client that only looks creates no files; before its first order there is nobody to wait for.
        with self._locked() if self.lock.exists() else nullcontext():
            records = self._read() if self.folder.exists() else ReleaseRecords()
        self._check(records, run)
        most, limit = self._most(records), self.budget.epsilon
        limits = [f"{most:,} messages"] if most is not None else []
        limits += [f"epsilon {limit:g}"] if limit is not None else []
        return f"{records.count:,} messages were released from {self.folder}; at most {', '.join(limits)} may be"

    def admit(self, run: str) -> str:
        """Check that a run may go on, and begin a ledger if the state folder is new.

        Args:
            run: the run that the server names.

        Returns:
            What state files record of the ledger.
        """
        with self._locked():
            records = self._read()
            if not self.path.exists() or records.earlier != self._parsed().earlier:
                self._write(records)
        self._check(records, run)
        return records.evidence()

    def open(self, run: str, question: str) -> None:
        """Count a question, before it is answered; refuse it if the budget is used up.

        Args:
            run: the run that it is asked in.
            question: digest of all that the answer depends on besides the client's data.
        """
        with self._locked():
            records = self._current(run)
            self._count(records, run, question)

    def noise(self, run: str, question: str, message: State) -> tuple[Noise, str]:
        """Return the noise of the answer to a question that was opened.

        The noise belongs to the question and to the difference that is released: if one noise were added to two
        different ones, their difference would be free of noise. If the client's data have changed since the question
        was answered, its answer counts again.

        Args:
            run: the run that the message is sent in.
            question: the question.
            message: what will be released, clipped, without noise.

        Returns:
            Its noise, and what state files record of the ledger.
        """
        with self._locked():
            records = self._current(run)
            answer = as_digest(bytes.fromhex(question + message_digest(message)))
            known = records.answers.setdefault(as_digest(bytes.fromhex(self.plan.digest + question)), answer)
            if known != answer:
                self._count(records, run, answer)
            self._write(records)
        key = bytes.fromhex(records.secret + self.plan.digest + answer)
        return secure_noise(key), records.evidence()

    def _current(self, run: str) -> ReleaseRecords:
        """Return the records as they are on disk, for a run that may go on."""
        if not self.path.exists():
            raise EquipoiseError(f"{self.path} has disappeared, so nothing is released")
        records = self._parsed()
        self._check(records, run)
        return records

    def _count(self, records: ReleaseRecords, run: str, digest: str) -> None:
        """Record a release unless it is there already; refuse it if the budget is used up."""
        plan = self.plan
        number = list(records.experiments).index(plan.digest) if plan.digest in records.experiments else None
        if number is not None and (number, digest) in records.sent:
            return
        self._check_left(records)
        if number is None:
            number = len(records.experiments)
            unit = {} if plan.local is None else {"samples": 1}
            records.experiments[plan.digest] = {"planned": plan.planned, "z": plan.z, "delta": plan.delta, **unit}
        records.sent.append((number, digest))
        records.runs += [run] if run not in records.runs else []
        self._write(records)

    def _most(self, records: ReleaseRecords) -> int | None:
        """Return the largest number of messages; None if only epsilon is limited."""
        if self.budget.releases is not None:
            return self.budget.releases
        if self.budget.epsilon is not None:
            return None
        first = next(iter(records.experiments.values()), None)
        return self.plan.planned if first is None else int(first["planned"])

    def _check(self, records: ReleaseRecords, run: str) -> None:
        """Raise an error if this experiment, or a run that released nothing yet, is beyond the budget."""
        budget, plan = self.budget, self.plan
        if budget.epsilon is not None and plan.z <= 0:
            raise _refused(
                "max_epsilon is set, but in this experiment the client adds no noise (privacy.where = 'central', or "
                "sigma = 0), so it cannot keep to it; remove max_epsilon, or do not take part"
            )
        if budget.epsilon is not None and records.earlier:
            raise _refused(
                "max_epsilon is set, but version 0.1 did not record the noise of what it released from "
                f"{self.folder}; use max_releases, or {_NEW_FOLDER}"
            )
        first = next(iter(records.experiments.values()), None)
        if plan.digest not in records.experiments and first is not None and not budget.granted:
            raise _refused(
                f"{records.count} messages of another experiment were released from {self.folder}; for a new or "
                "changed experiment set max_releases or max_epsilon in the client's settings"
            )
        if first is not None and plan.local is not None and not first.get("samples"):
            raise _refused(
                f"this experiment hides single samples only (privacy.unit = 'sample'), and {self.folder} began with "
                f"one that hides all of the client's data; {_NEW_FOLDER}"
            )
        if first is not None and budget.epsilon is None and plan.z < first["z"] * (1 - 1e-9):
            raise _refused(
                f"this experiment adds less noise (noise multiplier {plan.z:.4g}) than the one that {self.folder} "
                f"began with ({first['z']:.4g}); set max_epsilon in the client's settings to limit them together"
            )
        if run not in records.runs and run not in records.earlier:
            self._check_left(records)

    def _check_left(self, records: ReleaseRecords) -> None:
        """Raise an error if one more message would be beyond the budget."""
        most, limit = self._most(records), self.budget.epsilon
        if most is not None and records.count >= most:
            why = "max_releases in the client's settings" if self.budget.releases is not None else "one run as planned"
            raise _refused(
                f"{records.count} messages were released already, and {most} are allowed ({why}); set max_releases "
                "or max_epsilon in the client's settings to allow more"
            )
        if limit is not None and (epsilon := records.epsilon(self.plan)) > limit:
            raise _refused(
                f"one more message would make the epsilon of all {records.count + 1} together {epsilon:.4g}, and "
                f"max_epsilon = {limit:g} in the client's settings"
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold a lock, because orders of two runs may be in progress at once."""
        atomic_files.make_folder(self.folder)
        with self.lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read(self) -> ReleaseRecords:
        """Return the records, checked against the files of runs beside them; without any, those of a new folder."""
        used = None if self.path.exists() else self._used_folder()
        if self.path.exists():
            records = self._parsed()
        elif used is not None:
            raise EquipoiseError(
                f"{self.path} is missing, but {used} has files of an earlier run; restore the list of releases, or "
                f"{_NEW_FOLDER}"
            )
        else:
            records = ReleaseRecords()
        self._check_evidence(records)
        records.earlier = self._earlier(records)
        return records

    def _parsed(self) -> ReleaseRecords:
        try:
            return ReleaseRecords.parse(json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError) as error:
            raise EquipoiseError(
                f"the list of releases in {self.path} cannot be read ({error}), so nothing is released; restore it, or "
                f"{_NEW_FOLDER}"
            ) from None

    def _used_folder(self) -> Path | None:
        """Return the folder of a run that left files, but no list of releases as version 0.1 wrote them."""
        for folder in sorted(path for path in self.folder.iterdir() if path.is_dir() and _RUN.fullmatch(path.name)):
            names = {path.name for path in folder.iterdir()} - {"lock"}
            if names and LEDGER not in names:
                return folder
        return None

    def _check_evidence(self, records: ReleaseRecords) -> None:
        """Raise an error if a state file was written beside a longer ledger, or beside another one."""
        chain = records.chain()
        for file in sorted(self.folder.glob(f"*/{STATE_FILE}")):
            count, link = recorded_evidence(file) or (0, chain[0])
            if not 0 <= count < len(chain) or chain[count] != link:
                raise EquipoiseError(
                    f"{self.path} is not the file that {file} was written beside: it was shortened, or is older or "
                    f"another one ({len(chain) - 1} messages here, {count} then); restore it, or {_NEW_FOLDER}"
                )

    def _earlier(self, records: ReleaseRecords) -> dict[str, int]:
        """Return how many messages version 0.1 released, by run."""
        found = dict(records.earlier)
        for file in sorted(self.folder.glob(f"*/{LEDGER}")):
            try:
                count = count_of_earlier_version(file.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError) as error:
                raise EquipoiseError(
                    f"the list of releases in {file}, of version 0.1, cannot be read ({error}), so nothing is "
                    f"released; restore it, or {_NEW_FOLDER}"
                ) from None
            if count:
                found[file.parent.name] = max(count, found.get(file.parent.name, 0))
        return found

    def _write(self, records: ReleaseRecords) -> None:
        with atomic_files.atomic_write(self.path) as temporary:
            temporary.unlink(missing_ok=True)
            temporary.touch(mode=0o600)
            temporary.write_text(json.dumps(records.table()), encoding="utf-8")
        # The new name must be on the disk before the message leaves.
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_without_privacy(folder: Path, budget: Budget) -> None:
    """Raise an error if a client whose messages are to be private is asked to take part without privacy.

    Args:
        folder: the client's state folder.
        budget: what the client's settings allow.
    """
    if budget.granted:
        raise _refused(
            "max_releases or max_epsilon is set in the client's settings, but the experiment has no section [privacy]"
        )
    if (folder / LEDGER).exists() or any(folder.glob(f"*/{LEDGER}")):
        raise _refused(
            f"messages were released under privacy from {folder}, and this experiment has no section [privacy]; "
            f"{_NEW_FOLDER}"
        )


def _refused(text: str) -> RejectedMessage:
    return RejectedMessage("no-budget", text)
