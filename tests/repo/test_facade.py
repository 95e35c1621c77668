"""The facade: what `import gradwire` gives, and what it costs."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys

import pytest

import gradwire
from gradwire import _torch

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
    code = "import gradwire as g; g.collectives.scan, g.hooks.fp16, g.ddp, g.devices, g.errors"
    subprocess.check_call([sys.executable, "-c", code], timeout=60)


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
    code = f"import sys, gradwire; print([name for name in {extras} if name in sys.modules])"
    output = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert output.strip() == "[]"
