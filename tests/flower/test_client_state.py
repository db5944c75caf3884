"""What a client keeps: it moves on only with what the server took, and is whole or not there."""

import errno
import fcntl
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from equipoise.errors import EquipoiseError
from equipoise.flower.client_state import ClientStateFile, StoredState
from equipoise.flower.codec import RejectedMessage
from equipoise.state import State
from equipoise.storage import tensor_files
from tests.support.commands import is_one_sentence
from tests.support.waiting import LIMIT, until

RUN = "0" * 32


def state(number: int) -> State:
    """Tensors of several kinds, one of them empty, one with numbers that are no numbers."""
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-310 * number], dtype=torch.float64)
    return State(
        w=torch.full((3,), float(number)),
        odd=odd,
        count=torch.tensor([number]),
        none=torch.empty(0),
        **{"a.b": odd + 1},
    )


def bits(kept: StoredState) -> Any:
    """All of it, to the last bit; None is not the same as a state without tensors."""

    def of(tensors: State | None) -> Any:
        if tensors is None:
            return None
        assert type(tensors) is State
        return {name: (t.dtype, tuple(t.shape), t.contiguous().numpy().tobytes()) for name, t in tensors.items()}

    return kept.accepted, of(kept.state), kept.trained, of(kept.pending), kept.newest


@pytest.fixture
def home(tmp_path: Path) -> ClientStateFile:
    return ClientStateFile(tmp_path / "state", RUN, "ward")


def of_round(number: int) -> State | None:
    return state(number) if number else None


@pytest.mark.parametrize(
    ("taken", "pending"), [p for p in itertools.product(range(4), repeat=2) if p[0] != p[1] or not p[0]]
)
@pytest.mark.parametrize("accepted", range(5))
def test_the_state_moves_on_only_with_what_the_server_took(taken: int, pending: int, accepted: int) -> None:
    kept = StoredState(taken, of_round(taken), pending, of_round(pending), newest=17)
    if accepted == pending and accepted:
        assert bits(kept.settled(accepted)) == bits(StoredState(pending, of_round(pending), newest=17))
    elif accepted == taken:
        assert bits(kept.settled(accepted)) == bits(StoredState(taken, of_round(taken), newest=17))
    else:
        with pytest.raises(RejectedMessage) as refused:
            kept.settled(accepted)
        assert refused.value.reason == "out-of-step"
        assert f"update to order {accepted}, but the state here is that after order {taken};" in str(refused.value)


def test_settling_twice_is_settling_once() -> None:
    kept = StoredState(3, state(3), 4, state(4), 9)
    for accepted in (3, 4):
        once = kept.settled(accepted)
        assert bits(once.settled(accepted)) == bits(once)
    with pytest.raises(RejectedMessage):
        kept.settled(3).settled(4)  # dropped is dropped


def test_a_server_that_went_back_finds_the_states_of_then() -> None:
    kept = StoredState(trained=1, pending=state(1))
    for number in range(1, 6):
        kept = kept.settled(number, keep=3).trained_on(number + 1, state(number + 1))
    assert [number for number, _ in kept.earlier] == [4, 3]
    for number in (6, 5, 4, 3):
        now = kept.settled(number, keep=3)
        assert now.accepted == number
        assert bits(now)[1] == bits(StoredState(number, state(number)))[1]
        assert all(earlier < number for earlier, _ in now.earlier)
    for gone in (0, 1, 2, 7):
        with pytest.raises(RejectedMessage):
            kept.settled(gone, keep=3)
    with pytest.raises(RejectedMessage):
        kept.settled(3, keep=3).settled(4, keep=3)  # what came after is dropped


def test_a_server_that_went_back_to_before_a_clients_first_update() -> None:
    kept = StoredState(trained=1, pending=state(1)).settled(1, keep=3).trained_on(2, state(2)).settled(2, keep=3)
    assert bits(kept.settled(0, keep=3)) == bits(StoredState(newest=2))


def test_earlier_states_are_read_back_exactly(home: ClientStateFile) -> None:
    kept = StoredState(3, state(3), 4, state(4), 5, earlier=((2, state(2)), (1, State()), (0, None)))
    home.write(kept)
    found = home.read()
    assert bits(found) == bits(kept)
    assert [(n, bits(StoredState(n, s))) for n, s in found.earlier] == [
        (n, bits(StoredState(n, s))) for n, s in kept.earlier
    ]


KEPT = {
    "nothing": StoredState(),
    "only an order": StoredState(newest=5),
    "the first update": StoredState(trained=1, pending=state(1), newest=1),
    "an update that was taken": StoredState(2, state(2), newest=3),
    "an update on top": StoredState(2, state(2), 3, state(3), 4),
    "states without tensors": StoredState(2, State(), 3, State(), 4),
    "a first state without tensors": StoredState(trained=1, pending=State()),
    "one with and one without": StoredState(2, State(), 3, state(3), 2**53),
    "views": StoredState(1, State(w=torch.arange(6.0).reshape(2, 3).T, v=torch.zeros(1).expand(4)), newest=1),
    "names like ours": StoredState(
        1, State({"state.w": torch.ones(1), "pending.w": torch.zeros(1)}), 2, State(state=torch.ones(2))
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_is_written_is_read_back_exactly(case: str, home: ClientStateFile) -> None:
    home.write(StoredState(8, state(8), 9, state(9), 10))
    home.write(KEPT[case])
    assert bits(home.read()) == bits(KEPT[case])
    assert bits(ClientStateFile(home.path.parent, RUN, "ward").read()) == bits(KEPT[case])
    assert [p.name for p in home.path.iterdir()] == ["state.safetensors"]


def test_a_new_state_takes_the_place_of_the_former_at_once(home: ClientStateFile) -> None:
    """It is renamed into place: who reads the former file meanwhile reads it to its end."""
    home.write(StoredState(2, state(2)))
    whole = home.file.read_bytes()
    with home.file.open("rb") as reader:
        home.write(StoredState(3, state(3)))
        assert reader.read() == whole
    assert home.read().accepted == 3


def test_one_tensor_may_be_in_both_states(home: ClientStateFile) -> None:
    """safetensors takes no two tensors of one memory."""
    shared = state(3)
    home.write(StoredState(3, shared, 4, State(shared, w=shared.w), 5))
    assert bits(home.read()) == bits(StoredState(3, state(3), 4, state(3), 5))


def test_a_new_home_has_nothing(tmp_path: Path) -> None:
    one, other = (
        ClientStateFile(tmp_path / "deep" / "state", RUN, "ward"),
        ClientStateFile(tmp_path / "deep" / "state", "1" * 32, "ward"),
    )
    assert bits(one.read()) == bits(StoredState())
    one.write(StoredState(1, state(1)))
    assert bits(other.read()) == bits(StoredState())
    assert one.path == tmp_path / "deep" / "state" / RUN


def test_a_folder_that_cannot_be_made_brings_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(EquipoiseError, match=r"cannot create the folder .*state"):
        ClientStateFile(tmp_path / "state", RUN, "ward")


def unreadable(home: ClientStateFile) -> None:
    with pytest.raises(EquipoiseError) as caught:
        home.read()
    assert is_one_sentence(caught.value).startswith(f"the client's state in {home.file} cannot be read: ")


def test_a_file_that_was_cut_cannot_be_read(home: ClientStateFile) -> None:
    home.write(StoredState(2, state(2), 3, state(3), 4))
    whole = home.file.read_bytes()
    for content in (*(whole[:n] for n in range(0, len(whole), 5)), whole + b"\0", b"rubbish" * 99, bytes(len(whole))):
        home.file.write_bytes(content)
        unreadable(home)
    home.file.write_bytes(whole)
    assert home.read().accepted == 2


def test_a_damaged_header_cannot_be_read(home: ClientStateFile) -> None:
    """A byte in the header that is no ASCII cannot be missed."""
    home.write(StoredState(2, state(2), 3, state(3), 4))
    whole = home.file.read_bytes()
    for at in range(8 + int.from_bytes(whole[:8], "little")):
        spoilt = bytearray(whole)
        spoilt[at] = 0xFF
        home.file.write_bytes(spoilt)
        unreadable(home)


@pytest.mark.parametrize("facts", [None, "", "{", "[]", "3", "null", "{}", '{"accepted": 1, "newest": 1}'])
def test_a_file_of_another_program_cannot_be_read(facts: str | None, home: ClientStateFile) -> None:
    save_file({"state.w": torch.ones(3)}, home.file, {"format": "pt"} if facts is None else {"kept": facts})
    unreadable(home)


def test_the_state_of_another_client_is_not_read(home: ClientStateFile) -> None:
    home.write(StoredState(1, state(1)))
    with pytest.raises(EquipoiseError) as caught:
        ClientStateFile(home.path.parent, RUN, "other").read()
    assert f"is the state of {home.name!r}, not of 'other'; every client needs a state folder" in str(caught.value)


def test_a_folder_in_place_of_the_file_cannot_be_read(home: ClientStateFile) -> None:
    home.file.mkdir()
    unreadable(home)


def halfway(error: Exception) -> Callable[..., None]:
    def save(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half of it")
        raise error

    return save


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (SafetensorError("I/O error: no space"), "I/O error: no space"),
    ],
)
def test_a_write_that_fails_leaves_the_former_state(
    error: Exception, words: str, home: ClientStateFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = StoredState(2, state(2), 3, state(3), 4)
    home.write(before)
    whole = home.file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(tensor_files, "save_file", halfway(error))
        with pytest.raises(EquipoiseError) as caught:
            home.write(StoredState(3, state(3), 4, state(4), 5))
    assert f"cannot write {home.file}: {words}" in str(caught.value)
    assert home.file.read_bytes() == whole
    assert bits(home.read()) == bits(before)
    assert [p.name for p in home.path.iterdir()] == ["state.safetensors"]


def test_a_write_that_is_interrupted_leaves_the_former_state(
    home: ClientStateFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = StoredState(2, state(2))
    home.write(before)

    def stop(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", stop)
        with pytest.raises(KeyboardInterrupt):
            home.write(StoredState(3, state(3)))
    assert bits(home.read()) == bits(before)
    (home.path / "state.safetensors.part").write_bytes(b"what a power cut leaves")
    assert bits(home.read()) == bits(before)
    home.write(StoredState(3, state(3)))
    assert bits(home.read()) == bits(StoredState(3, state(3)))


def test_the_first_write_that_fails_leaves_nothing(home: ClientStateFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "save_file", halfway(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(EquipoiseError, match="Input/output error"):
        home.write(StoredState(1, state(1)))
    assert bits(home.read()) == bits(StoredState())
    assert list(home.path.iterdir()) == []


# One at a time


class Waiting:
    """Somebody who wants the lock too, in a thread of its own."""

    def __init__(self, home: ClientStateFile):
        self.home, self.entered, self.leave = home, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self) -> None:
        with self.home.locked():
            self.entered.set()
            self.leave.wait(LIMIT)

    def end(self) -> None:
        self.leave.set()
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()


@pytest.fixture
def waiting() -> Iterator[list[Waiting]]:
    found: list[Waiting] = []
    yield found
    for one in found:
        one.end()


def is_free(home: ClientStateFile) -> bool:
    with (home.path / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_second_thread_waits(home: ClientStateFile, waiting: list[Waiting]) -> None:
    with home.locked():
        waiting += [Waiting(home), Waiting(ClientStateFile(home.path.parent, RUN, "ward"))]
        assert not any(one.entered.wait(0.1) for one in waiting)
        other = Waiting(ClientStateFile(home.path.parent, "1" * 32, "ward"))
        waiting.append(other)
        assert other.entered.wait(LIMIT), "another run is another matter"
    until(lambda: any(one.entered.is_set() for one in waiting[:2]))
    assert [one.entered.wait(0.1) for one in waiting[:2]].count(True) == 1
    for one in waiting[:2]:
        one.leave.set()
    assert all(one.entered.wait(LIMIT) for one in waiting[:2])


def test_a_second_process_is_waited_for_however_it_ends(home: ClientStateFile, waiting: list[Waiting]) -> None:
    holding = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-I", "-c", holding, str(home.path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            waiting.append(Waiting(home))
            assert not waiting[0].entered.wait(0.2)
        finally:
            process.kill()
    assert waiting[0].entered.wait(LIMIT)
    assert not is_free(home)
    waiting[0].end()
    assert is_free(home)


def test_the_lock_goes_when_the_work_fails(home: ClientStateFile) -> None:
    def work() -> None:
        with home.locked():
            assert not is_free(home)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert is_free(home)
