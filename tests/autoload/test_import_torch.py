"""Effects of `import torch` if gradwire is installed."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path

import pytest

import gradwire_autoload

BARE = "import sys, torch; print([m for m in sys.modules if m.partition('.')[0] == 'gradwire'])"
SHM_GROUP = """
import torch, torch.distributed as dist
dist.init_process_group("shm")
x = torch.ones(3) * dist.get_rank()
dist.all_reduce(x)
assert x.tolist() == [1.0] * 3
print(dist.get_backend(), dist.group.WORLD.name() if dist.get_rank() == 0 else "")
dist.destroy_process_group()
"""


def test_it_has_no_import_of_the_package():
    tree = ast.parse(Path(gradwire_autoload.__file__).read_text())
    modules = {
        name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in [getattr(node, "module", None), *(alias.name for alias in node.names)]
    }
    assert not [name for name in modules if name and name.partition(".")[0] == "gradwire"]


def test_import_torch_registers_shm_without_importing_gradwire(run):
    ended = run(BARE + "\nassert 'shm' in torch.distributed.Backend.backend_list")
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "[]", "")


def test_unmodified_script_runs_on_shm(run):
    ended = run(SHM_GROUP, ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert "shm" in ended.stdout


CLASS = "\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nprint(DDP.__module__)"
OURS, THEIRS = "gradwire.compat.ddp\n", "torch.nn.parallel.distributed\n"
ON = {"GRADWIRE_COMPAT": "1"}
AFTERWARDS = """
import torch
plugin = torch.distributed.Backend._plugins["SHM"]
import gradwire.shm
gradwire.shm.register()
assert torch.distributed.Backend._plugins["SHM"] is plugin
assert torch.distributed.Backend.backend_list.count("shm") == 1
"""
WITHOUT_AUTOLOAD = """
import torch
assert "shm" not in torch.distributed.Backend.backend_list
import gradwire
assert "shm" in torch.distributed.Backend.backend_list
"""
COLLECTIVES = """
from torch.distributed.nn.functional import all_reduce
assert all_reduce.__module__ == "gradwire.compat.collectives"
"""
SCRIPTS = {
    "importing gradwire afterwards has no effect": (AFTERWARDS, {}, ""),
    "import gradwire registers shm without autoload": (
        WITHOUT_AUTOLOAD, ON | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, ""
    ),
    "import torch installs compat": (CLASS, ON, OURS),
    "gradwire first": ("import gradwire" + CLASS + COLLECTIVES, ON, OURS),
    "a module of it first": ("import gradwire.shm.register" + CLASS + COLLECTIVES, ON, OURS),
    "compat is off by default": (CLASS, {}, THEIRS),
    "compat is 0": (CLASS, {"GRADWIRE_COMPAT": "0"}, THEIRS),
    "compat is empty": (CLASS, {"GRADWIRE_COMPAT": ""}, THEIRS),
}  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("name", SCRIPTS)
def test_effects_of_imports(run, name):
    script, variables, printed = SCRIPTS[name]
    ended = run(script, **variables)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, printed, "")


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["cpu:gloo", "cpu:gloo,meta:fake", "gloo"])
def test_groups_without_shm_are_unchanged(run, backend):
    """Before 2.14, a group of pairs gets no default backend once any plugin is listed."""
    told = """
import torch, torch.distributed as dist
if "fake" in "BACKEND":
    from torch.testing._internal.distributed import fake_pg
dist.init_process_group("BACKEND", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
try:
    print(group.name(), group._get_sequence_number_for_group(), dist.get_backend_config())
except RuntimeError as error:
    print(error)
dist.destroy_process_group()
""".replace("BACKEND", backend)
    with_ours, without = (run(told, TORCH_DEVICE_BACKEND_AUTOLOAD=on) for on in "10")
    assert without.returncode == 0, without.stderr
    assert with_ours.stdout == without.stdout
    assert ("No backend" in with_ours.stderr) == ("No backend" in without.stderr)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variable", "value", "values"),
    [("GRADWIRE_COMPAT", "yes", "1 or 0"), ("GRADWIRE_BACKEND", "shmm", "shm or gloo")],
)
def test_unknown_value_is_an_error(run, variable, value, values):
    ended = run("import torch", **{variable: value})
    assert ended.returncode == 1
    assert f"ValueError: {variable} is {value!r}: set it to {values}, or unset it" in ended.stderr


BROKEN = {
    "not Python": "def (",
    "another torch": "import torch\ntorch.no_such_name",
    "a package missing": "import no_such_package",
}


@pytest.mark.wide
@pytest.mark.parametrize("code", BROKEN.values(), ids=BROKEN)
def test_broken_gradwire_does_not_break_import_torch(run, tmp_path: Path, code):
    (tmp_path / "gradwire").mkdir()
    (tmp_path / "gradwire" / "__init__.py").write_text(code)
    ended = run(
        "import torch, torch.distributed as dist\n"
        "print(torch.ones(1).item())\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n",
        tmp_path,
        GRADWIRE_COMPAT="1",
        GRADWIRE_BACKEND="shm",
        PYTHONWARNINGS="error",
    )
    assert ended.stdout == "1.0\n"
    assert "GRADWIRE_COMPAT=1 has no effect" in ended.stderr
    assert ended.returncode == 1, "a group that should be on shm was made without it"


def test_installed_package_has_the_entry_points():
    try:
        files = importlib.metadata.distribution("gradwire")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gradwire is on the path here, not installed")
    points = {(point.group, point.name, point.value) for point in files.entry_points}
    ours = ("torch.backends", "gradwire", "gradwire_autoload:load")
    assert ours in points, "installed before the entry point was there: pip install -e . again"
