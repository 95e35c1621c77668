"""Names that compat replaces: in every module that holds one, with PyTorch's signature."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import pytest
import torch

from gradwire import compat
from gradwire.compat import collectives, ddp, devices, replacements

TABLE = [*collectives.TABLE, *ddp.TABLE, *devices.TABLE]
for _module in {module for entry in TABLE for module in entry.modules}:
    importlib.import_module(_module)


def held(entry: replacements.Replacement, module: int = 0) -> Any:
    return getattr(importlib.import_module(entry.modules[module]), entry.name)


ORIGINALS = {(entry.name, entry.modules[0]): held(entry) for entry in TABLE}
each_entry = pytest.mark.parametrize("entry", TABLE, ids=lambda e: f"{e.modules[0]}.{e.name}")


def modules_holding(value: object) -> set[tuple[str, str]]:
    """Return the modules of torch that hold an object, with its name there."""
    return {
        (m, name)
        for m, module in list(sys.modules.items())
        if m.split(".")[0] == "torch"
        for name, found in list(vars(module).items())
        if found is value
    }


@each_entry
def test_all_modules_are_replaced_and_restored(entry: replacements.Replacement) -> None:
    import torch.distributed._composable.replicate  # holds the class for its own use
    import torch.distributed.checkpoint.state_dict  # noqa: F401  holds it under another name

    theirs = ORIGINALS[entry.name, entry.modules[0]]
    before = modules_holding(theirs)
    assert before >= {(module, entry.name) for module in entry.modules}
    with compat.installed():
        assert not modules_holding(theirs)
        assert all(held(entry, i) is entry.value for i in range(len(entry.modules)))
    assert modules_holding(theirs) == before


@each_entry
def test_signatures_are_pytorchs(entry: replacements.Replacement) -> None:
    theirs, ours = ORIGINALS[entry.name, entry.modules[0]], entry.value
    if inspect.isbuiltin(theirs):  # C++: the signature is in the docstring
        names = list(inspect.signature(ours).parameters)  # type: ignore[arg-type]
        signature = theirs.__doc__.split("->")[0]
        positions = [signature.index(f"{name}: ") for name in names]
        assert positions == sorted(positions)
        assert signature.count(": ") >= len(names)
        return
    of_function = inspect.isclass(ours) and hasattr(ours, "apply")
    if of_function and not issubclass(ours, torch.nn.Module):
        given = list(inspect.signature(theirs.forward).parameters.values())[1:]
        found = inspect.signature(ours.apply)
    else:
        given = list(inspect.signature(theirs).parameters.values())
        found = inspect.signature(ours)  # type: ignore[arg-type]
    assert [(p.name, p.kind, p.default) for p in found.parameters.values()] == [
        (p.name, p.kind, p.default) for p in given
    ]


def test_modules_imported_while_installed_are_restored() -> None:
    name = "torch.distributed._composable.replicate"
    sys.modules.pop(name, None)
    with compat.installed():
        module = importlib.import_module(name)
        assert module.DistributedDataParallel is ddp.DistributedDataParallel
    assert module.DistributedDataParallel is torch.nn.parallel.DistributedDataParallel


def test_uninstall_restores_everything() -> None:
    compat.install()
    compat.install()
    compat.uninstall()
    for entry in TABLE:
        assert held(entry) is ORIGINALS[entry.name, entry.modules[0]]
    compat.uninstall()
    with compat.installed(), compat.installed():
        pass
    assert not replacements.is_installed()


def test_a_missing_name_changes_nothing() -> None:
    table = [*TABLE, replacements.Replacement(1, "no_such_name", ("torch.nn.parallel",))]
    with pytest.raises(AttributeError):
        replacements.replace(table)
    assert not replacements.is_installed()
    assert held(TABLE[0]) is ORIGINALS[TABLE[0].name, TABLE[0].modules[0]]
