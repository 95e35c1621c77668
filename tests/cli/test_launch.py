"""The launcher: messages arrive, and the failure of one rank ends all."""

from __future__ import annotations

import sys
import textwrap

import pytest

from gradwire.cli.launch import RankEnv, RankFailure, launch

JOBS = """
import os, threading
from datetime import timedelta

import torch

from gradwire.cli.launch import join_group


def send_sum(env, send):
    join_group(env, "gloo", timedelta(seconds=30))
    total = torch.full((), env.rank + 1.0)
    torch.distributed.all_reduce(total)
    send((env, total.item()))


def one_raises(env, send):
    if env.rank == 1:
        raise ValueError("two\\nlines")
    threading.Event().wait()


def one_exits(env, send):
    if env.rank == 1:
        os._exit(3)
    threading.Event().wait()
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Module of jobs that new processes can import."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "gradwire_test_jobs.py").write_text(textwrap.dedent(JOBS))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield __import__("gradwire_test_jobs")
        del sys.modules["gradwire_test_jobs"]


def test_messages_of_ranks_arrive(jobs):
    received = []
    launch(jobs.send_sum, 2, received.append)
    envs = sorted((env for env, _ in received), key=lambda env: env.rank)
    port = envs[0].store_port
    assert envs == [RankEnv(0, 2, 0, 2, port), RankEnv(1, 2, 1, 2, port)]
    assert [total for _, total in received] == [3.0, 3.0]


@pytest.mark.wide
def test_rank_that_raises_ends_the_others(jobs):
    with pytest.raises(RankFailure, match=r"^rank 1 failed: ValueError: two\nlines$") as caught:
        launch(jobs.one_raises, 2, lambda message: None)
    assert "in one_raises" in caught.value.details


@pytest.mark.wide
def test_rank_that_exits_early_ends_the_others(jobs):
    with pytest.raises(RankFailure, match=r"^rank 1 ended with exit code 3 before its work"):
        launch(jobs.one_exits, 2, lambda message: None)


@pytest.mark.wide
def test_error_of_the_receiver_ends_the_ranks(jobs):
    def receive(message):
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        launch(jobs.send_sum, 2, receive)
