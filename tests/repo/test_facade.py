"""The facade: what `import gradwire` gives, and what it costs."""

from __future__ import annotations

import importlib
import importlib.metadata
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


@pytest.mark.wide
def test_the_packages_are_there_without_another_import() -> None:
    """As the facade's docstring says: `gradwire.hooks.fp16` after `import gradwire`."""
    code = "import gradwire as g; g.collectives.shift, g.hooks.fp16, g.ddp, g.devices, g.errors"
    subprocess.check_call([sys.executable, "-c", code], timeout=60)


@pytest.mark.wide
@pytest.mark.parametrize("first", ["", "import torch"])
def test_the_other_packages_are_imported_on_first_use(first: str) -> None:
    code = "import sys, gradwire as g; assert 'gradwire.elastic' not in sys.modules; "
    code += "g.elastic.join, g.local_sgd.diloco, g.compat.install, g.testing.run_ranks"
    subprocess.check_call([sys.executable, "-c", f"{first}\n{code}"], timeout=60)


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


@pytest.mark.wide
def test_names_are_imported_when_they_are_used(run: Run) -> None:
    assert run(LAZY).returncode == 0


@pytest.mark.wide
@pytest.mark.parametrize(
    ("first", "variables"),
    [
        ("import torch", {}),
        ("", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
        ("", {"GRADWIRE_COMPAT": "1"}),
        ("import gradwire.hooks", {"GRADWIRE_COMPAT": "1", "PYTHONWARNINGS": "error"}),
    ],
)
def test_they_are_imported_at_once_where_something_depends_on_it(
    run: Run, first: str, variables: dict[str, str]
) -> None:
    assert run(EAGER.format(first=first), **variables).returncode == 0


@pytest.mark.parametrize("name", MODULES)
def test_every_name_in_all_exists(name: str) -> None:
    module = importlib.import_module(name)
    missing = [public for public in getattr(module, "__all__", []) if not hasattr(module, public)]
    assert missing == []


def test_the_version_is_the_distribution_s() -> None:
    assert gradwire.__version__ == importlib.metadata.version("gradwire")


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
