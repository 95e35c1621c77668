"""Comparison with the twin: differences, failures and report."""

from __future__ import annotations

import dataclasses
import io
import math

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from gradwire import hooks
from gradwire.cli.demo import train as demo_train
from gradwire.cli.demo.options import DemoOptions
from gradwire.cli.demo.rank import Result
from gradwire.cli.demo.train import (
    TOLERANCE,
    TRAIN_IMAGES,
    Difference,
    Epoch,
    batches,
    build_model,
    largest_difference,
    load_digits,
    train,
)
from gradwire.cli.demo.view import failures, show_result
from gradwire.cli.launch import RankEnv
from gradwire.testing import run_ranks

CPU = torch.device("cpu")
TIMES = {"compute": 0.002, "gradwire": 0.003, "torch's DDP": 0.004}
RIGHT = Result(Epoch(1, 0.5, 300, Difference(1e-7, 2e-7)), True, TIMES)


def with_difference(relative: float) -> Result:
    last = dataclasses.replace(RIGHT.last, difference=Difference(1.0, relative))
    return dataclasses.replace(RIGHT, last=last)


def printed(result: Result, options: DemoOptions) -> str:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show_result(console, result, options)
    return console.file.getvalue()


@pytest.mark.wide
@pytest.mark.parametrize("lost_in_step", [3, 44])
def test_lost_half_bucket_in_one_step_exceeds_rounding(lost_in_step):
    def main():
        calls = []

        def lose(group, bucket):
            calls.append(bucket.index())
            if calls.count(1) == lost_in_step and bucket.index() == 1:
                bucket.buffer().mul_(0.5)
            return hooks.all_reduce(group, bucket)

        demo_train.HOOKS["lose"] = demo_train.Hook(lose, lose, lossy=False)
        env = RankEnv(dist.get_rank(), 2, dist.get_rank(), 2)
        options = DemoOptions(epochs=2, hook="lose")
        _, last = train(options, env, dist.group.WORLD, load_digits(0, CPU), lambda epoch: None)
        return last and last.difference

    difference, _ = run_ranks(main, world_size=2)
    assert difference.relative > 10 * TOLERANCE
    assert not difference.is_rounding


def test_largest_difference_with_nan_exceeds_rounding():
    model, twin = build_model(0, CPU), build_model(0, CPU)
    assert largest_difference(model, twin) == Difference(0.0, 0.0)
    with torch.no_grad():
        model[8].bias[3] += 0.25
    found = largest_difference(model, twin)
    assert found.absolute == pytest.approx(0.25)
    assert found.relative == pytest.approx(0.25 / twin[8].bias.norm().item())
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = math.nan
    assert math.isnan(largest_difference(model, twin).absolute)
    assert not largest_difference(model, twin).is_rounding


def test_failures_of_a_result():
    options = DemoOptions()
    assert failures(RIGHT, options) == []
    assert failures(with_difference(TOLERANCE), options) == []
    for relative in (2 * TOLERANCE, math.nan):
        (said,) = failures(with_difference(relative), options)
        assert "more than rounding" in said
        assert failures(with_difference(relative), DemoOptions(hook="fp16")) == []
    (said,) = failures(dataclasses.replace(RIGHT, same_bits=False), DemoOptions(hook="fp16"))
    assert "different parameters" in said


def test_result_tables():
    lines = [line.split() for line in printed(RIGHT, DemoOptions()).splitlines()]
    assert ["gradwire", "3.00", "ms", "2.00", "ms", "1.00", "ms"] in lines
    assert ["torch's", "DDP", "4.00", "ms", "2.00", "ms", "2.00", "ms"] in lines
    assert ["test", "accuracy", "83.3%", "300", "of", "360", "digits", "recognized"] in lines
    wrong = printed(with_difference(0.5), DemoOptions())
    assert "FAILED: the difference to one process (5.0e-01) is more than rounding" in wrong


def test_batches_depend_only_on_seed_and_epoch():
    first, again, second = (list(batches(0, epoch, 100)) for epoch in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])
    seen = torch.cat(first)
    assert len(seen) == len(seen.unique()) == TRAIN_IMAGES // 100 * 100


@pytest.mark.wide
def test_split_has_every_digit_once():
    digits = load_digits(0, CPU)
    other = load_digits(1, CPU)
    assert digits.train_images.shape == (TRAIN_IMAGES, 1, 8, 8)
    assert -1 <= digits.train_images.min() < digits.train_images.max() <= 1
    assert not torch.equal(digits.test_labels, other.test_labels)
    whole = torch.cat([digits.train_labels, digits.test_labels]).bincount()
    assert torch.equal(whole, torch.cat([other.train_labels, other.test_labels]).bincount())
