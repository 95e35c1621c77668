"""Command group of `gradwire`; each command has its own module or package."""

from __future__ import annotations

from typing import Any

import click

from gradwire._version import __version__
from gradwire.cli.check import check
from gradwire.cli.demo import demo
from gradwire.cli.doctor import doctor
from gradwire.cli.explain import explain
from gradwire.cli.run import run
from gradwire.cli.timeline import timeline
from gradwire.errors import printable


class _App(click.Group):
    """Group whose errors show control characters as escapes."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            vars(error)["message"] = "\n".join(map(printable, error.message.splitlines()))
            raise


@click.group(cls=_App, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="gradwire %(version)s")
def app() -> None:
    """The communication layer of data-parallel PyTorch training."""


for _command in (demo, doctor, explain, run, check, timeline):
    app.add_command(_command)
