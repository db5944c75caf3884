"""Devices: which one is chosen, the error for one that cannot be used, and settings that are restored."""

import os
import warnings

import pytest
import torch

from equipoise import torch_device
from equipoise.errors import EquipoiseError
from equipoise.torch_device import (
    CPU,
    choose_device,
    deterministic_kernels,
    forked_random,
    has_room,
    random_generator,
    wide_dtype,
    widened,
)


def no_accelerator(check_available: bool = False) -> None:
    return None


def test_auto_is_the_cpu_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", no_accelerator)
    assert choose_device("auto") == choose_device("cpu") == CPU


def test_auto_takes_an_accelerator_if_there_is_one(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("auto") == CPU  # the stand-in is not available to those who look for an accelerator
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(stand_in))
    assert choose_device("auto") == torch.device(stand_in, 0)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gpu", "engine.device = 'gpu' is not a device of PyTorch; it must be 'auto', 'cpu', 'cuda'"),
        ("", "engine.device = '' is not a device of PyTorch"),
        ("meta", "engine.device = 'meta' is not available here"),
        ("xpu", "engine.device = 'xpu' is not available here"),
    ],
)
def test_a_device_that_cannot_be_used_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(EquipoiseError, match=sentence) as raised:
        choose_device(name)
    assert "\n" not in str(raised.value)


def test_a_device_without_float64_is_not_taken_for_float64(monkeypatch: pytest.MonkeyPatch, stand_in: str) -> None:
    monkeypatch.setattr(torch_device, "_NO_FLOAT64", frozenset({stand_in}))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(stand_in))
    assert choose_device("auto", torch.float64) == CPU
    assert choose_device("auto", torch.float32).type == stand_in
    with pytest.raises(EquipoiseError, match=r"does not compute in float64; use engine\.precision = 'float32'"):
        choose_device(stand_in, torch.float64)
    assert widened(torch.ones(2, device=stand_in)).dtype == wide_dtype(torch.device(stand_in)) == torch.float32
    assert widened(torch.ones(2)).dtype == torch.float64


def test_processes_on_one_machine_take_turns_with_its_devices(monkeypatch: pytest.MonkeyPatch, stand_in: str) -> None:
    monkeypatch.setattr(torch.get_device_module(stand_in), "device_count", lambda: 1)
    assert [choose_device(stand_in, process=k).index for k in range(3)] == [0, 0, 0]


def settings() -> tuple[object, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


def test_deterministic_kernels_are_chosen_on_an_accelerator_only_and_restored(stand_in: str) -> None:
    before, device = settings(), torch.device(stand_in)
    for where, wanted in ((CPU, True), (device, False)):
        with deterministic_kernels(where, wanted):
            assert settings() == before
    with deterministic_kernels(device, True):
        assert settings() == (True, True, True, False, False, before[5] or ":4096:8")
        with warnings.catch_warnings(record=True):  # an operator without a deterministic kernel warns, and works
            warnings.simplefilter("always")
            torch.ones(3).put_(torch.tensor([0]), torch.ones(1), accumulate=True)
    assert settings() == before


def test_a_device_without_a_generator_of_its_own_uses_one_of_the_cpu(stand_in: str) -> None:
    assert random_generator(CPU).device == random_generator(torch.device(stand_in)).device == CPU


def test_random_streams_are_left_as_they_were(stand_in: str) -> None:
    before = torch.random.get_rng_state()
    for device in (CPU, torch.device(stand_in)):
        with forked_random(device):
            torch.rand(3)
        assert torch.equal(torch.random.get_rng_state(), before)


def test_data_fit_if_they_leave_room_or_if_nothing_is_known(monkeypatch: pytest.MonkeyPatch, stand_in: str) -> None:
    device = torch.device(stand_in)
    assert has_room(device, 1 << 60)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (1000, 2000))
    assert has_room(device, 500)
    assert not has_room(device, 501)


def test_tensors_of_the_stand_in_and_of_the_cpu_do_not_mix(stand_in: str) -> None:
    there, here = torch.ones(3, 3, device=stand_in), torch.ones(3, 3)
    for mixed in (lambda: there + here, lambda: there @ here, lambda: torch.cat([there, here])):
        with pytest.raises(RuntimeError, match="device"):
            mixed()
    with pytest.raises(TypeError):
        there.numpy()
