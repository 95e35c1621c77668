"""Every seeded mistake is found, with its line or parameter, and nothing in correct programs."""

from __future__ import annotations

import importlib.util

import pytest

from check import correct, mistakes
from check.common import check, marked, run_plain
from gradwire.check import CHECKS

PROGRAMS = {
    "plain": mistakes.plain,
    "manual": mistakes.manual,
    "gpt": mistakes.gpt,
    "accelerate": mistakes.accelerated,
    "fabric": mistakes.fabric,
}
NEEDS = {"accelerate": "accelerate", "fabric": "lightning_fabric"}

CASES = {
    # check: {program: end of the line's mark, or the parameter}
    "same-batches": {"plain": "data shared", "gpt": None, "accelerate": "accelerate loader"},
    "shared-samples": {"plain": "data shared", "fabric": "fabric loader"},
    "same-order": {"plain": "data sampler", "fabric": "fabric order"},
    "sampler-seed": {"plain": "data sampler"},
    "around-wrapper": {p: f"{p} around-wrapper" for p in ("plain", "gpt", "accelerate", "fabric")},
    "gather-without-gradient": {
        p: f"{p} gather-without-gradient" for p in ("plain", "accelerate", "fabric")
    },
    "mean-of-means": {p: f"{p} backward" for p in ("plain", "gpt", "accelerate", "fabric")},
    "clipped-before-reduce": {
        p: f"{p} clipped-before-reduce" for p in ("manual", "gpt", "accelerate")
    },
    "scaled-by-world-size": {
        p: f"{p} scaled-by-world-size" for p in ("plain", "gpt", "accelerate")
    },
    "stale-optimizer": {
        "plain": "first.weight",
        "gpt": "embedding.weight",
        "accelerate": "first.weight",
    },
    "no-optimizer": {"plain": "scale", "gpt": "blocks.0.norm.weight", "accelerate": "scale"},
    "changed-after-wrapping": {"plain": "first.weight", "gpt": "head.weight"},
    "learning-rates": {"plain": "plain step", "gpt": "gpt step", "accelerate": None},
    "scheduler-on-one-rank": {"plain": "plain scheduler", "fabric": "fabric scheduler"},
    "optimizer-state": {"plain": "plain step"},
    "parameters-differ": {"plain": "head.bias", "gpt": "head.weight", "fabric": "head.bias"},
    "random-state": {"plain": None, "gpt": None, "accelerate": None, "fabric": None},
    "augmentation": {"plain": "plain draw"},
    "batch-norm": {"plain": "norm", "accelerate": "norm", "fabric": "norm"},
}
EACH = [(m, p, where) for m, programs in CASES.items() for p, where in programs.items()]
EACH_TIME = {"around-wrapper-gpt", "mean-of-means-plain"}
OTHER_NAMES = {
    "augmentation": "random-state",
    "around-wrapper": "local-gradients",
    "changed-after-wrapping": "local-gradients",
    "sampler-seed": "shared-samples",
    "scheduler-on-one-rank": "learning-rates",
    "stale-optimizer": "no-optimizer",
}


def name_of(case: tuple[str, str, str | None]) -> str:
    return f"{case[0]}-{case[1]}"


@pytest.mark.parametrize(
    ("mistake", "program", "where"),
    [
        pytest.param(*c, id=name_of(c), marks=() if name_of(c) in EACH_TIME else pytest.mark.wide)
        for c in EACH
    ],
)
def test_a_mistake_is_found(mistake: str, program: str, where: str | None) -> None:
    if program in NEEDS and importlib.util.find_spec(NEEDS[program]) is None:
        pytest.skip(f"{NEEDS[program]} is not installed")
    name = OTHER_NAMES.get(mistake, mistake)
    only = [c.name for c in CHECKS if c.on_request and c.name == name]
    findings, _, _ = check(PROGRAMS[program], mistake, only=only)
    assert [f.check for f in findings] == [name], findings
    found = findings[0]
    assert found.remedy
    if where is not None and " " in where:
        assert found.line == marked(PROGRAMS[program], where)
    elif where is not None:
        assert found.tensor.split(", ")[0].split(" and ")[0] == where
        assert found.line


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["torch", "gradwire"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_found_without_a_mistake(program: str, kind: str) -> None:
    if program in NEEDS and importlib.util.find_spec(NEEDS[program]) is None:
        pytest.skip(f"{NEEDS[program]} is not installed")
    if kind == "gradwire" and program not in ("plain", "gpt"):
        pytest.skip("the program has one wrapper")
    findings, results, _ = check(PROGRAMS[program], "", kind)
    assert findings == []
    assert results == run_plain(PROGRAMS[program], "", kind)


@pytest.mark.wide
@pytest.mark.parametrize("mistake", ["same-batches", "mean-of-means"])
def test_a_mistake_is_found_in_gradwire_s_wrapper(mistake: str) -> None:
    """Not a forward around it, which it reduces."""
    findings, results, _ = check(mistakes.plain, mistake, "gradwire")
    assert [f.check for f in findings] == [OTHER_NAMES.get(mistake, mistake)], findings
    assert results == run_plain(mistakes.plain, mistake, "gradwire")


@pytest.mark.narrow({"name": "weights"})
@pytest.mark.parametrize("name", correct.PROGRAMS)
def test_nothing_is_found_and_nothing_changes(name: str) -> None:
    ranks = correct.RANKS.get(name, 2)
    findings, observed, _ = check(correct.PROGRAMS[name], ranks=ranks)
    assert findings == []
    assert observed == run_plain(correct.PROGRAMS[name], ranks=ranks)
