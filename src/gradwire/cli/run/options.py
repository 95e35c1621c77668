"""The options of `gradwire run`: torchrun's, and ours in a group of their own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch.distributed.run import get_args_parser

__all__ = ["parse_options"]

_DESCRIPTION = """\
Run a training program in several processes, as torchrun does, and put gradwire behind its names,
without an edit. The options are torchrun's, and gradwire's own below."""
_EXAMPLES = """\
examples:
  gradwire run --nproc-per-node 2 --backend shm --compat train.py --epochs 3
      DistributedDataParallel and Gloo are gradwire's, in a program that names PyTorch's
  gradwire run --nproc-per-node 2 --recorder dumps train.py
      if a rank fails, dies or hangs: gradwire explain dumps
  gradwire run --nproc-per-node 2 --compat --timeline run.json train.py
      where the time goes: gradwire timeline run.json
  gradwire run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:29400 train.py
      on two hosts; the command is the same on both

Other launchers (Ray, Slurm, Lightning's) take the same from the environment: GRADWIRE_COMPAT=1,
GRADWIRE_BACKEND=shm, GRADWIRE_RECORDER=DIRECTORY, GRADWIRE_TIMELINE=FILE."""


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; ends the interpreter where it is wrong, as argparse does."""
    parser = get_args_parser()
    parser.prog = "gradwire run"
    parser.usage = "gradwire run [OPTIONS] PROGRAM [ARGUMENTS...]"
    parser.description = _DESCRIPTION
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False  # --rec would be another option when torchrun gets one
    ours = parser.add_argument_group("gradwire")
    ours.add_argument(
        "--backend", choices=["shm"], help="put shm in Gloo's place, for the ranks of one host"
    )
    ours.add_argument("--compat", action="store_true", help="put gradwire behind PyTorch's names")
    ours.add_argument(
        "--recorder",
        metavar="DIRECTORY",
        help="where all ranks write what they did, when one fails, hangs or ends",
    )
    ours.add_argument(
        "--timeline", metavar="FILE", help="write a trace of all ranks to this file, as JSON"
    )
    return parser.parse_args(list(arguments))
