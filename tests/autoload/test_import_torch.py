"""Effects of `import torch` if gradwire is installed; GRADWIRE_BACKEND=shm in programs of Gloo."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path

import pytest

BARE = "import sys, torch; print([m for m in sys.modules if m.partition('.')[0] == 'gradwire'])"


def test_import_torch_registers_shm_without_importing_gradwire(run):
    ended = run(BARE + "\nassert 'shm' in torch.distributed.Backend.backend_list")
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "[]", "")


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
COLLECTIVES = """
from torch.distributed.nn.functional import all_reduce
assert all_reduce.__module__ == "gradwire.compat.collectives"
"""
SCRIPTS = {
    "importing gradwire afterwards has no effect": (AFTERWARDS, {}, ""),
    "import torch installs compat": (CLASS, ON, OURS),
    "gradwire first": ("import gradwire" + CLASS + COLLECTIVES, ON, OURS),
    "compat is off by default": (CLASS, {}, THEIRS),
    "compat is 0": (CLASS, {"GRADWIRE_COMPAT": "0"}, THEIRS),
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


# -- gloo replacement -----------------------------------------------------------------------------


register = importlib.import_module("gradwire.shm.register")  # the package has such a function
ON_SHM = {"GRADWIRE_BACKEND": "shm"}
GROUPS = """
import os
from datetime import timedelta
import torch, torch.distributed as dist

def told(group=None):
    x = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [3.0] * 3
    objects = [None, None]
    dist.all_gather_object(objects, dist.get_rank(), group=group)
    assert objects == [0, 1]
    dist.barrier(group)
    return dist.get_backend(group), dist.get_backend_config(group)

seen = []
rank = int(os.environ["RANK"])
for i, name in enumerate(["gloo", "GLOO", None, "cpu:gloo", "cpu:gloo,cuda:gloo"]):
    store = dist.FileStore(f"{os.environ['STORES']}/{i}", 2)
    options = {"store": store, "rank": rank, "world_size": 2}
    dist.init_process_group(name, timeout=timedelta(seconds=60), **options)
    seen.append(told())
    if name == "gloo":
        seen += [told(dist.new_group()), told(dist.new_group(backend="gloo"))]
        alone = [dist.new_group([rank]) for rank in (0, 1)]
        assert alone[1 - dist.get_rank()] is dist.GroupMember.NON_GROUP_MEMBER
        assert alone[dist.get_rank()].size() == 1
    dist.destroy_process_group()
if rank == 0:
    print(seen)
"""


@pytest.mark.wide
def test_groups_report_gloo(run, tmp_path):
    def with_variables(stores: str, **variables: str):
        (tmp_path / stores).mkdir()
        ended = run(GROUPS, ranks=2, STORES=str(tmp_path / stores), **variables)
        assert ended.returncode == 0, ended.stderr
        return ended

    on, off = with_variables("on", **ON_SHM), with_variables("off")
    line = "gradwire: 2 ranks use shm in place of Gloo, because GRADWIRE_BACKEND is shm"
    assert on.stderr.count(line) == 1
    assert line not in off.stderr
    assert line not in with_variables("quiet", **ON_SHM, GRADWIRE_QUIET="1").stderr
    assert on.stdout == off.stdout
    assert "('gloo', 'cpu:gloo,cuda:gloo')" in on.stdout


INSTEAD = {
    **dict.fromkeys(["gloo", "undefined", "cpu:gloo", "cpu:gloo,cuda:gloo"], "shm"),
    "cpu:gloo,cuda:nccl": "cpu:shm,cuda:nccl",
    "cpu:gloo,meta:fake": "cpu:shm,meta:fake",
    **{name: name for name in ("cuda:gloo", "nccl", "shm", "cpu:mpi,cuda:gloo")},
}


@pytest.mark.parametrize(("asked", "instead"), INSTEAD.items())
def test_backend_without_accelerators(monkeypatch, asked, instead):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda *a, **k: None)
    monkeypatch.setattr("torch._C._get_accelerator", lambda: __import__("torch").device("cpu"))
    monkeypatch.setattr(register, "PYTHON_BACKENDS", True)
    assert register.with_shm(asked) == instead


@pytest.mark.parametrize("asked", ["gloo", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("routed", [True, False])
def test_backend_with_a_gpu(monkeypatch, asked, routed):
    """Gloo groups carry CUDA tensors as well, unlike groups of shm alone."""
    import torch

    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr(
        "torch.accelerator.current_accelerator", lambda *a, **k: torch.device("cuda")
    )
    monkeypatch.setattr(register, "PYTHON_BACKENDS", routed)
    if routed:
        second = asked.partition("cuda:")[2] or "gloo"
        assert register.with_shm(asked) == f"cpu:shm,cuda:{second}"
    else:
        with pytest.warns(UserWarning, match="is unchanged"):
            assert register.with_shm(asked) == asked
