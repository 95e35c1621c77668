"""Options and their errors, without starting any process."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from click.testing import CliRunner

import gradwire.cli
from gradwire._version import __version__
from gradwire.cli.app import app
from gradwire.cli.launch import RankEnv

TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--nproc 0", "'--nproc': 0 is not in the range x>=1"),
        ("--nproc many", "'many' is not a valid integer"),
        ("--epochs 0", "'--epochs': 0 is not in the range x>=1"),
        ("--epochs -3", "'--epochs': -3 is not in the range x>=1"),
        ("--hook none_such", "'none_such' is not one of 'none', 'all_reduce', 'fp16', 'bf16'"),
        ("--backend none_such", "--backend is 'none_such', which torch.distributed does not know"),
        ("--backend undefined", "--backend is 'undefined', which torch.distributed does not know"),
        ("--batch-size 1", "--batch-size is 1: pass at least --nproc (2)"),
        ("--batch-size 1438", "--batch-size is 1438: pass at least --nproc (2)"),
        ("--batch-size 4 --nproc 5", "--batch-size is 4: pass at least --nproc (5)"),
        ("--seed -1", "-1 is not in the range"),
    ],
)
@pytest.mark.usefixtures("no_launcher")
def test_wrong_options_are_reported_with_their_values(arguments, said):
    assert said in refusal(*arguments.split())


@pytest.mark.usefixtures("no_launcher")
def test_unknown_backend_lists_usable_ones():
    assert "pass one of gloo" in refusal("--backend", "none_such")


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="this machine has GPUs for nccl")
@pytest.mark.usefixtures("no_launcher")
def test_nccl_needs_gpus():
    found = torch.cuda.device_count()
    said = f"needs one GPU per process: 2 processes, {found} GPUs"
    assert said in refusal("--backend", "nccl")


def test_nproc_different_from_torchruns_is_rejected_by_rank_0(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert "--nproc is 3, but WORLD_SIZE is 2" in refusal("--nproc", "3")
    monkeypatch.setenv("RANK", "1")
    assert refusal("--nproc", "3") == ""


def test_partial_torchrun_environment_is_rejected(monkeypatch):
    assert RankEnv.from_environment({"WORLD_SIZE": "8"}) is None
    assert RankEnv.from_environment(TORCHRUN) == RankEnv(0, 2, 0, 2)
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    assert "RANK=0 is set without WORLD_SIZE" in refusal()
    for name, value in (TORCHRUN | {"WORLD_SIZE": "two"}).items():
        monkeypatch.setenv(name, value)
    assert "must be whole numbers (invalid literal for int() with base 10: 'two')" in refusal()


def test_version():
    assert CliRunner().invoke(app, ["--version"]).stdout == f"gradwire {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "missing", "extra"),
    [(["demo"], "rich, sklearn", "demo"), (["run"], "rich", "cli"), ([], "rich", "cli")],
)
def test_missing_extra_is_reported_with_the_command_to_install_it(
    monkeypatch, arguments, missing, extra
):
    here = {"click": object(), "numpy": object()}
    monkeypatch.setattr(gradwire.cli, "find_spec", here.get)
    monkeypatch.setattr(sys, "argv", ["gradwire", *arguments])
    with pytest.raises(SystemExit) as exit_:
        gradwire.cli.main()
    assert f"needs {missing}, which are not installed" in str(exit_.value)
    assert f'pip install "gradwire[{extra}]"' in str(exit_.value)


HELP = """
import sys
from contextlib import suppress
from gradwire.cli import main
for line in ("--help", "demo --help", "doctor -h", "explain --help", "run --help",
             "timeline --help", "--version", "run", "demo --nproc 0", "nosuch"):
    sys.argv = ["gradwire", *line.split()]
    with suppress(SystemExit):
        main()
    loaded = {"torch", "rich", "sklearn"} & sys.modules.keys()
    assert not loaded, (line, loaded)
"""


def test_help_and_usage_errors_do_not_import_pytorch(run):
    assert run(HELP).returncode == 0


def test_invalid_variable_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gradwire", "doctor"])
    monkeypatch.setenv("GRADWIRE_COMPAT", "yes")
    with pytest.raises(SystemExit) as exit_:
        gradwire.cli.main()
    assert str(exit_.value) == "gradwire: GRADWIRE_COMPAT is 'yes': set it to 1 or 0, or unset it"


@pytest.mark.parametrize("arguments", [["run", "a\x1b[31m.py"], ["no\x1b[31m"]])
def test_control_characters_in_errors_are_escaped(arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "\\x1b[31m" in result.output
    assert "\x1b" not in result.output


def test_unencodable_characters_are_replaced(monkeypatch):
    def show(prog_name):
        print("15 µs ─ …")

    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "iso-8859-1"))
    monkeypatch.setattr(sys, "argv", ["gradwire", "doctor"])
    monkeypatch.setattr("gradwire.cli.app.app", show)
    gradwire.cli.main()
    sys.stdout.flush()
    assert written.getvalue() == b"15 \xb5s ? ?\n"


def test_commands_have_shell_completion_and_examples():
    words = {"COMP_WORDS": "gradwire ", "COMP_CWORD": "1", "_GRADWIRE_COMPLETE": "bash_complete"}
    result = CliRunner().invoke(app, prog_name="gradwire", env=words)
    offered = {line.partition(",")[2] for line in result.stdout.splitlines()}
    assert offered >= {"demo", "doctor", "explain", "run", "timeline"}
    for name in ("doctor", "explain", "run", "timeline"):
        assert "examples:" in CliRunner().invoke(app, [name, "--help"]).stdout.lower()
