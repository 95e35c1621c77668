from __future__ import annotations

import pytest
import torch

from gradwire.devices.placement import as_destination, as_device, as_devices, own_place
from gradwire.errors import ArgumentError, ArgumentTypeError

CPU = torch.device("cpu")


def test_the_host_has_one_device() -> None:
    assert as_devices(["cpu", "cpu:0", "cpu:3", CPU]) == (CPU,) * 4


def test_own_place_is_the_first_entry_of_the_device() -> None:
    places = as_devices(["meta", "cpu", "cpu"])
    assert own_place(CPU, places) == 1
    assert own_place(torch.device("meta"), places) == 0
    assert own_place(CPU, as_devices(["meta"])) is None


def test_minus_one_is_the_host_as_a_destination_only() -> None:
    assert as_destination(-1, torch.device("meta")) == CPU
    with pytest.raises(ArgumentError, match=r"devices\[1\] is -1"):
        as_devices(["cpu", -1])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_an_index_without_an_accelerator_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"destination is 0, this machine has 0 accelerators"):
        as_device(0, "destination")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
@pytest.mark.parametrize("value", ["cuda", "cuda:0", "xpu:1", "mps"])
def test_an_accelerator_that_is_not_there_is_refused(value: str) -> None:
    with pytest.raises(ArgumentError, match=f"devices\\[1\\] is '{value}', this machine has 0"):
        as_devices(["cpu", value])


@pytest.mark.parametrize("value", [True, 1.5, None])
def test_invalid_devices_are_refused(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"devices\[0\]"):
        as_devices([value])  # type: ignore[list-item]


def test_bad_lists_are_refused() -> None:
    with pytest.raises(ArgumentError, match="devices is empty"):
        as_devices([])
    with pytest.raises(ArgumentTypeError, match="give a list of devices"):
        as_devices("cpu")
    with pytest.raises(ArgumentError, match=r"devices\[0\] is 'toaster'"):
        as_devices(["toaster"])
