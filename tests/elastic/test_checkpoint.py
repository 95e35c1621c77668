"""Checkpoints hold the whole state; a kill while saving leaves the old or the new one."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from elastic.kills import CONTEXT
from gradwire.elastic import snapshot
from gradwire.errors import ArgumentError, CheckpointError

MOMENTS = {  # where it is killed, and the checkpoint that is there then
    "before it writes": (dcp.FileSystemWriter, "write_data", False, 1),
    "its data are written": (dcp.FileSystemWriter, "write_data", True, 1),
    "before its table of contents": (dcp.FileSystemWriter, "finish", False, 1),
    "all is written": (dcp.FileSystemWriter, "finish", True, 1),
    "it is renamed": (Path, "rename", True, 2),
}


def kept(value: float) -> dict[str, Any]:
    net = nn.Linear(2, 1)
    nn.init.constant_(net.weight, value)
    return {"model": net}


def save_and_die(folder: Path, moment: str) -> None:
    owner, name, after, _ = MOMENTS[moment]
    function: Callable[..., Any] = getattr(owner, name)

    def killing(*args: Any, **kwargs: Any) -> Any:
        # the table of contents is renamed, too: by the format, before all is there
        last = owner is not Path or Path(args[1]).name.startswith(snapshot.PREFIX)
        if after or not last:
            result = function(*args, **kwargs)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, killing)
    snapshot.save(kept(2.0), 2, folder)


@pytest.mark.wide
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_it_saves(moment: str, tmp_path: Path) -> None:
    snapshot.save(kept(1.0), 1, tmp_path)
    process = CONTEXT.Process(target=save_and_die, args=(tmp_path, moment))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    expected = MOMENTS[moment][-1]
    found = snapshot.latest(tmp_path)
    assert found is not None
    state = kept(0.0)
    assert snapshot.load(state, found) == (expected, {})
    assert state["model"].weight.tolist() == [[expected, expected]]
    snapshot.save(kept(3.0), 3, tmp_path)  # which removes what the dead process has left
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"step-{version:09d}" for version in ([1, 3] if expected == 1 else [1, 2, 3])]


def test_what_another_process_writes_is_left_alone(tmp_path: Path) -> None:
    for name in (".partial step-000000001 no%20process", f".partial step {os.getpid()}"):
        (tmp_path / name).mkdir()
    snapshot.save(kept(1.0), 1, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_checkpoint_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    """PyTorch raises an error that is no Exception."""
    large = {"model": nn.Linear(100, 100)}
    first = snapshot.save(large, 1, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step-000000002 could not be written"):
            snapshot.save(large, 2, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [first]
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        snapshot.save(large, 2, tmp_path / "file")
    snapshot.save(large, 2, tmp_path)


def test_interrupting_a_save_interrupts_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", interrupt)
    with pytest.raises(BaseException, match="KeyboardInterrupt") as raised:
        snapshot.save(kept(1.0), 1, tmp_path)
    assert not isinstance(raised.value, Exception)
    assert not list(tmp_path.iterdir())


def test_checkpoints_of_another_training_are_not_taken_for_this_one_s(tmp_path: Path) -> None:
    snapshot.save(kept(1.0), 2, tmp_path, lineage="a")
    snapshot.save(kept(1.5), 2, tmp_path, lineage="a")  # a member that was lost has written it
    for version in (1, 2):
        with pytest.raises(ArgumentError, match=r"has step-000000002 of another training"):
            snapshot.save(kept(2.0), version, tmp_path, lineage="b")
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000002"]
    path = snapshot.save(kept(3.0), 3, tmp_path, lineage="b")
    assert (snapshot.lineage_of(path), snapshot.latest(tmp_path)) == ("b", path)


def test_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    snapshot.save(kept(0.0), 1, tmp_path, lineage="other")
    for version in range(2, 7):
        snapshot.save(kept(1.0), version, tmp_path, lineage="mine", keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000000001", "step-000000005", "step-000000006"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage", [flip, lambda path: os.truncate(path, path.stat().st_size // 2), Path.unlink]
)
def test_damaged_checkpoints_name_the_one_to_use(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    first, _ = (snapshot.save(kept(1.0), n, tmp_path, lineage="mine") for n in (1, 2))
    files = sorted(path.name for path in first.iterdir())
    for name in files:
        latest = snapshot.save(kept(3.0), 3, tmp_path, lineage="mine")
        damage(latest / name)
        with pytest.raises(CheckpointError, match=r"; run\.load then uses step-0+2$") as raised:
            snapshot.load(kept(0.0), latest)
        assert name in str(raised.value)
        assert len(str(raised.value).splitlines()) == 1
        shutil.rmtree(latest)
    latest = tmp_path / "step-000000009"
    latest.mkdir()
    damage(tmp_path / "step-000000002" / ".metadata")
    with pytest.raises(CheckpointError, match=r"is not a checkpoint.* then uses step-0+1$"):
        snapshot.load(kept(0.0), latest)
    damage(first / ".metadata")
    with pytest.raises(CheckpointError, match="there is no other one to use"):
        snapshot.load(kept(0.0), latest)


class Keeps:
    """A state as it is."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    """Schedules in a list, one with steps as keys."""
    first = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 1)
    second = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [1])


def test_a_schedule_and_an_optimizer_without_a_state_are_resumed(tmp_path: Path) -> None:
    def built() -> dict[str, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scaler = torch.amp.GradScaler("cpu", enabled=False)  # whose state is an empty dict
        return {"optimizer": optimizer, "schedule": schedule(optimizer), "scaler": scaler}

    def rates(kept: dict[str, Any], steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            kept["optimizer"].step()
            kept["schedule"].step()
            found.append(kept["optimizer"].param_groups[0]["lr"])
        return found

    first, again = built(), built()
    rates(first, 2)
    snapshot.load(again, snapshot.save(first, 2, tmp_path))
    assert rates(again, 4) == rates(first, 4)
    assert again["optimizer"].param_groups[0]["lr"] < 0.1


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"a": {}, "b": [], "c": [{}], "d": None},
        {0: {"x": 2}, True: 3, None: 4, (1, 2): 5},
        {"number 3": 1, "number": 2, 3: 4},
        {"a": [{1: {2: "x"}}, Counter({5: 2})], "b": (1, {2: 3})},
        {"a": [{3: torch.ones(2), "3": torch.zeros(2)}, {}], None: torch.zeros(1)},
    ],
    ids=range(6),
)
def test_values_come_back_as_they_were(state: dict[Any, Any], tmp_path: Path) -> None:
    kept = {"model": nn.Linear(1, 1), "keeps": Keeps(state)}
    path = snapshot.save(kept, 1, tmp_path)
    kept["keeps"].load_state_dict({"other": 1})
    snapshot.load(kept, path)
    assert repr(kept["keeps"].state) == repr(state)


def test_tensors_are_by_their_names(tmp_path: Path) -> None:
    state = {"a": [torch.ones(1)], -7: {"x": torch.ones(3)}}
    path = snapshot.save({"keeps": Keeps(state)}, 1, tmp_path)
    assert "keeps.-7.x" in dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    other = {"keeps": {"a": [torch.zeros(1)]}}
    with pytest.warns(UserWarning, match="load in a single process"):
        dcp.load(other, checkpoint_id=path, no_dist=True)
    assert other["keeps"]["a"][0].item() == 1.0
