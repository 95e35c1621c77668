"""The facade: what `import gradwire` gives, and what it costs."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Callable

import pytest

import gradwire
from gradwire import _torch

Run = Callable[..., "subprocess.CompletedProcess[str]"]
MODULES = ["gradwire"] + [
    module.name
    for module in pkgutil.walk_packages(gradwire.__path__, "gradwire.")
    if not module.name.endswith("__main__")
]


def test_the_facade_has_what_most_scripts_need() -> None:
    assert gradwire.__all__ == [
        "DataParallel",
        "DistributedDataParallel",
        "GradBucket",
        "GradwireError",
        "__version__",
        "all_gather",
        "all_reduce",
        "shm",
        "timeline",
    ]


LAZY = """
import sys
import gradwire
assert "torch" not in sys.modules
assert set(gradwire.__all__) | {"hooks", "errors"} <= set(dir(gradwire))
try:
    gradwire.nosuch
except AttributeError as error:
    assert "module 'gradwire' has no attribute 'nosuch'" in str(error)
assert issubclass(gradwire.GradwireError, Exception) and "torch" not in sys.modules
from gradwire import *
import pickle, torch
assert pickle.loads(pickle.dumps(DistributedDataParallel)) is gradwire.ddp.DistributedDataParallel
assert "shm" in torch.distributed.Backend.backend_list
"""
EAGER = """
import sys
{first}
import gradwire
assert "gradwire.ddp.reducer" in sys.modules
assert "shm" in sys.modules["torch"].distributed.Backend.backend_list
"""


PACKAGES = """
import sys, gradwire as g
assert "gradwire.elastic" not in sys.modules
g.collectives.shift, g.hooks.fp16, g.ddp, g.devices, g.errors
g.elastic.join, g.local_sgd.diloco, g.compat.install, g.testing.run_ranks
"""


@pytest.mark.wide
@pytest.mark.parametrize(
    ("script", "variables"),
    [
        (LAZY, {}),
        (PACKAGES, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
        ("import torch" + PACKAGES, {}),
        (EAGER.format(first="import torch"), {}),
        (EAGER.format(first=""), {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
        (EAGER.format(first=""), {"GRADWIRE_COMPAT": "1"}),
        (
            EAGER.format(first="import gradwire.hooks"),
            {"GRADWIRE_COMPAT": "1", "PYTHONWARNINGS": "error"},
        ),
    ],
)
def test_names_are_imported_on_first_use_or_at_once_where_something_depends_on_it(
    run: Run, script: str, variables: dict[str, str]
) -> None:
    ended = run(script, **variables)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", MODULES)
def test_every_name_in_all_exists(name: str) -> None:
    module = importlib.import_module(name)
    missing = [public for public in getattr(module, "__all__", []) if not hasattr(module, public)]
    assert missing == []


def undocumented(package: str) -> list[str]:
    """Return the exported functions and classes, and their public methods, without a docstring."""
    module = importlib.import_module(package)
    found = []
    for name in getattr(module, "__all__", []):
        value = getattr(module, name)
        members = vars(value).items() if isinstance(value, type) else ()
        methods = [(f"{name}.{m}", v) for m, v in members if m[0] != "_" and inspect.isfunction(v)]
        named = [(name, value)] if callable(value) else []
        found += [label for label, each in named + methods if not (each.__doc__ or "").strip()]
    return found


@pytest.mark.parametrize("package", [name for name in MODULES if name.count(".") == 1])
def test_exported_names_have_docstrings(package: str) -> None:
    fields = {"Options.engine"}  # of shm, a field whose default is a function
    assert [name for name in undocumented(package) if name not in fields] == []


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("has_gil", [False, True])
def test_what_was_not_tested_warns(
    new: bool, has_gil: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: has_gil, raising=False)
    if new:
        monkeypatch.setattr(_torch, "NEWEST_TESTED", (2, 0))
    _torch.warn_if_untested()
    remedies = [str(w.message).rpartition(": ")[2] for w in recwarn]
    assert ("if something fails, upgrade gradwire" in remedies) == new
    assert ("set PYTHON_GIL=1" in remedies) == (not has_gil)


def test_importing_gradwire_needs_nothing_but_torch() -> None:
    extras = ["click", "rich", "sklearn", "cloudpickle", "hypothesis", "pytest"]
    code = f"import sys, torch, gradwire; print([name for name in {extras} if name in sys.modules])"
    output = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert output.strip() == "[]"
