"""Run a script elastically: `python -m gradwire.elastic --nproc-per-node N script.py`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gradwire.elastic.membership import parse_address
from gradwire.elastic.supervisor import SHUTDOWN_SECONDS, serve_store, supervise
from gradwire.errors import ArgumentError, NotSupportedError


def main(
    arguments: Sequence[str],
    prog: str = "python -m gradwire.elastic",
    prepare: Callable[[Path], None] = lambda folder: os.makedirs(folder, exist_ok=True),
) -> int:
    """Run a command line.

    Args:
        arguments: Arguments without the program's name.
        prog: Name of the program in the help.
        prepare: Function that creates the directory of dumps.

    Returns:
        Exit code.
    """
    parser = _parser(prog)
    options = parser.parse_args(arguments)
    try:
        if options.serve:
            every = "0.0.0.0" if options.serve[0] == ":" else ""
            host, port = parse_address(every + options.serve, "--serve")
            store = serve_store(host, port)
            print(f"store at {host}:{store.port}", flush=True)
            while True:
                time.sleep(3600)
        if options.script is None:
            parser.error("PROGRAM is missing: pass a Python file, or -m and a module")
        if not (options.module or options.script == "-" or os.path.exists(options.script)):
            parser.error(f"PROGRAM is {options.script!r}, which does not exist in {os.getcwd()}")
        if options.recorder:
            prepare(Path(options.recorder))
            os.environ["GRADWIRE_RECORDER"] = os.path.abspath(options.recorder)
        return supervise(
            [sys.executable, "-u", *["-m"] * options.module, options.script, *options.arguments],
            nproc=options.nproc_per_node,
            max_restarts=options.max_restarts,
            store=options.store,
            members=options.members,
            grace=options.grace,
            shutdown_timeout=options.shutdown_timeout,
            log=lambda line: print(f"gradwire: {line}", file=sys.stderr, flush=True),
        )
    except (ArgumentError, NotSupportedError) as error:
        parser.error(str(error))


def _parser(prog: str) -> argparse.ArgumentParser:
    about = "Run processes on this host whose training continues when any of them dies."
    usage = f"{prog} [OPTIONS] PROGRAM [ARGUMENTS...]"
    parser = argparse.ArgumentParser(usage=usage, prog=prog, description=about)
    add = parser.add_argument
    add("--nproc-per-node", type=int, default=1, help="processes on this host")
    add("--recorder", metavar="DIRECTORY", help="directory of members' dumps, of failures and ends")
    add("--max-restarts", type=int, default=3, help="restarts of failed processes, in all")
    add("--store", help="host:port of a store that another process serves")
    add("--members", type=int, help="number of members, on all hosts, that the run begins with")
    ends = "end processes that still run this long after another is done (default: wait)"
    add("--grace", type=float, metavar="SECONDS", help=ends)
    until = f"time between a signal such as SIGTERM and SIGKILL (default: {SHUTDOWN_SECONDS:g})"
    add("--shutdown-timeout", type=float, metavar="SECONDS", default=SHUTDOWN_SECONDS, help=until)
    add("--serve", metavar="HOST:PORT", help="only serve a store")
    add("-m", dest="module", action="store_true", help="run PROGRAM as a module")
    add("script", metavar="PROGRAM", nargs="?", help="a Python file")
    add("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="arguments of PROGRAM")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
