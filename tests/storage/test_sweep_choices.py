"""The choices of sweeps: several processes and machines write them at the same time."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from equipoise.storage.atomic_files import read_json
from equipoise.storage.sweep_choices import SWEEP, record_choices, rejected_runs


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    writers, each = 8, 5
    start = Barrier(writers)

    def write(number: int) -> None:
        start.wait()
        for k in range(each):
            record_choices(
                tmp_path, ["algorithm.lr"], "personal", {f"{number}-{k}-{good}": good for good in (True, False)}
            )

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(write, range(writers)))
    found = read_json(tmp_path / SWEEP)
    names = [(number, k) for number in range(writers) for k in range(each)]
    assert found["chosen"] == sorted(f"{number}-{k}-True" for number, k in names)
    assert rejected_runs(tmp_path) == {f"{number}-{k}-False" for number, k in names}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", SWEEP]
