"""What cannot be sent is refused before anything is, by name and with the remedy."""

from __future__ import annotations

import os

import pytest
import torch

from gradwire import collectives as C
from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.testing import run_ranks

OPS = {
    "all_reduce": C.all_reduce,
    "all_gather": C.all_gather,
    "all_to_all": C.all_to_all,
    "gather": lambda x: C.gather(x, 0),
    "reduce": lambda x: C.reduce(x, 0),
    "reduce_scatter": C.reduce_scatter,
    "scan": C.scan,
}


@pytest.mark.parametrize("name", [name for name in OPS if "_to_" not in name and "_sc" not in name])
def test_what_is_no_tensor(name):
    def main():
        with pytest.raises(ArgumentTypeError, match="x is a float: give a tensor"):
            OPS[name](1.0)

    run_ranks(main)


@pytest.mark.parametrize("name", OPS)
def test_sparse_tensors(name):
    def main():
        with pytest.raises(ArgumentError, match=r"layout torch.sparse_coo: give dense"):
            OPS[name](torch.eye(2).to_sparse())

    run_ranks(main)


def test_the_environment_s_word_for_checks():
    def main():
        os.environ["GRADWIRE_CHECKS"] = "yes"
        with pytest.raises(ArgumentError, match="GRADWIRE_CHECKS is 'yes': give 0 or 1"):
            C.all_reduce(torch.ones(1))
        os.environ["GRADWIRE_CHECKS"] = "1"
        C.all_reduce(torch.ones(1))

    run_ranks(main)
