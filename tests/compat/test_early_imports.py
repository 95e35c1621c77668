"""Modules that imported PyTorch's names before install() are listed in a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from gradwire import compat
from gradwire.compat import replacements
from gradwire.errors import BoundEarlyWarning

THEIRS = (torch.nn.parallel.DistributedDataParallel,)  # not a name that holds the class
PIECES = "fake_framework.wrapping"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    # other test modules import what they compare, more of them than a warning names
    others = {name.partition(".")[0] for name in replacements.modules_holding(THEIRS)}
    monkeypatch.setattr(replacements, "OWN", replacements.OWN | others)
    made = ModuleType(PIECES)
    sys.modules[PIECES] = made
    yield made
    del sys.modules[PIECES]


def test_early_imports_are_named_in_a_warning(module: ModuleType) -> None:
    module.DDP = THEIRS[0]
    with pytest.warns(BoundEarlyWarning, match=r"fake_framework\.wrapping \(DDP\)") as caught:
        compat.install()
    compat.uninstall()
    assert caught[0].filename == __file__
    with pytest.warns(BoundEarlyWarning) as caught, compat.installed():
        assert module.DDP is THEIRS[0]
    assert caught[0].filename == __file__


@pytest.mark.parametrize("value", [torch, torch.nn.parallel, torch.nn, compat, sys, 1])
def test_later_imports_are_not_named(module: ModuleType, value: object) -> None:
    module.held = value
    module.names = ["DistributedDataParallel"]
    assert PIECES not in replacements.modules_holding(THEIRS)


def test_a_long_list_is_cut(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(20):
        other = ModuleType(f"fake_framework.part{i}")
        other.DDP = THEIRS[0]
        monkeypatch.setitem(sys.modules, other.__name__, other)
    with pytest.warns(BoundEarlyWarning, match=r"part1 .* and \d+ more\. Call install"):
        replacements.warn_of_early_imports(THEIRS, stacklevel=1)


def test_modules_of_pytorch_take_collectives_whenever_they_are_imported() -> None:
    from torch.distributed._shard.sharded_tensor import reshard

    before = reshard.all_to_all
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BoundEarlyWarning)  # of other test modules
        with compat.installed():
            assert reshard.all_to_all.__module__ == "gradwire.compat.collectives"
    assert reshard.all_to_all is before
