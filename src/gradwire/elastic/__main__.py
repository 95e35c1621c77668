"""`python -m gradwire.elastic --nproc-per-node N script.py args`: an elastic run on this host."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from gradwire.elastic.supervise import serve_store, supervise

__all__ = ["main"]


def main(arguments: Sequence[str], prog: str = "python -m gradwire.elastic") -> int:
    """Run a command line.

    Args:
        arguments: Without the program's name.
        prog: The program's name in the help.

    Returns:
        The exit code.
    """
    about = "Run processes on this host that train on when any of them dies."
    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.add_argument("--nproc-per-node", type=int, default=1, help="processes on this host")
    parser.add_argument("--max-restarts", type=int, default=3, help="of members that died, in all")
    parser.add_argument("--store", help="host:port of a store that is served elsewhere")
    parser.add_argument("--members", type=int, help="that the first epoch waits for, on all hosts")
    parser.add_argument("--serve", metavar="HOST:PORT", help="serve a store, and start nothing")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    parser.add_argument("script", nargs="?", help="a Python file, and its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.serve:
        return _serve(options.serve)
    if options.script is None:
        parser.error("give a script, or --serve HOST:PORT")
    module = ["-m"] if options.module else []
    return supervise(
        [sys.executable, "-u", *module, options.script, *options.arguments],
        nproc=options.nproc_per_node,
        max_restarts=options.max_restarts,
        store=options.store,
        members=options.members,
    )


def _serve(address: str) -> int:
    host, _, port = address.rpartition(":")
    store = serve_store(host or "0.0.0.0", int(port))
    print(f"store at {host}:{store.port}", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
