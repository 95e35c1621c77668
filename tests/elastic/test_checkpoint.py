"""A process is killed while it saves: there is the old checkpoint or the new one, never half."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch import nn

from elastic.kills import CONTEXT
from gradwire.elastic import checkpoint

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
        last = owner is not Path or Path(args[1]).name.startswith(checkpoint.PREFIX)
        if after or not last:
            result = function(*args, **kwargs)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, killing)
    checkpoint.save(kept(2.0), 2, folder)


@pytest.mark.wide
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_it_saves(moment: str, tmp_path: Path) -> None:
    checkpoint.save(kept(1.0), 1, tmp_path)
    process = CONTEXT.Process(target=save_and_die, args=(tmp_path, moment))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    expected = MOMENTS[moment][-1]
    found = checkpoint.latest(tmp_path)
    assert found is not None
    state = kept(0.0)
    assert checkpoint.load(state, found) == expected
    assert state["model"].weight.tolist() == [[expected, expected]]
    checkpoint.save(kept(3.0), 3, tmp_path)  # which removes what the dead process has left
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"step-{version:09d}" for version in ([1, 3] if expected == 1 else [1, 2, 3])]


def test_what_another_process_writes_is_left_alone(tmp_path: Path) -> None:
    for name in (".partial step-000000001 no%20process", f".partial step {os.getpid()}"):
        (tmp_path / name).mkdir()
    checkpoint.save(kept(1.0), 1, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
