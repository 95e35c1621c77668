"""Options and their errors, without starting any process."""

from __future__ import annotations

import io
import sys

import pytest
from click.testing import CliRunner

import gradwire.cli
from gradwire.cli.app import app


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
