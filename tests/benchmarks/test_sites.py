"""The benchmark `sites` runs on tiny sizes, and its ledger finds what was counted wrongly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import sites

from gradwire.testing.hosts import why_no_hosts


def events(*shards: list[int]) -> sites.Events:
    """Return the log of two sites that commit two outer steps; in the second, with these shards."""
    found = sites.Events(Path())
    for step, of_sites in enumerate(([[0], [1]], shards)):
        for site, counted in enumerate(of_sites):
            line: dict[str, Any] = {"event": "reduced", "site": site, "step": step, "generation": 1}
            found.lines.append({**line, "shards": counted})
            times = {"began": float(step), "computed": step + 0.75 + site / 8, "time": step + 1.0}
            line |= {"event": "committed", "size": 2, "samples": 10 * (step + 1), **times}
            found.lines.append(line)
    found.lines.append({"event": "end", "loss": 2.0, "digest": "a"})
    return found


@pytest.mark.parametrize(
    ("shards", "wrong"), [([[0], [1]], 0), ([[0], [0]], 1), ([[0], []], 1), ([[0], [0, 1]], 1)]
)
def test_a_shard_is_counted_once(shards: list[list[int]], wrong: int) -> None:
    found = sites.outcome(events(*shards), sites=2, shards=2)
    assert found.wrong == wrong
    assert found.rate == 10.0
    assert found.exposed == 0.125
    assert found.samples == 20


@pytest.mark.wide
@pytest.mark.timeout(200)
@pytest.mark.skipif(why_no_hosts() != "", reason=f"no hosts: {why_no_hosts()}")
def test_two_sites_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sites, "SECONDS", 6.0)
    monkeypatch.setattr(sites, "BETWEEN_FAULTS", 2.0)
    monkeypatch.setattr(sites, "CUT_SECONDS", 1.0)
    monkeypatch.setattr(sites, "DDP_SEEDS", range(1))
    data = tmp_path / "data.pt"
    sites.make_data(data)
    case = replace(sites.CASES[0], name="tiny")
    measures = {m.name: m for m in sites.measure_case(data, case, [sites.OURS]).measures}
    assert 5 < measures["goodput"].contenders[sites.OURS].median < 130
    assert measures["faults"].contenders[sites.OURS].median >= 2
    assert {*measures["loss at the end"].contenders} == {sites.OURS, sites.DDP}
