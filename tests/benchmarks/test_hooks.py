"""The benchmark of hooks runs from end to end."""

from __future__ import annotations

import pytest
from benchmarks import hooks, models
from benchmarks.options import Options


@pytest.mark.wide
def test_hooks_from_end_to_end() -> None:
    chosen = [case for case in hooks.CASES if case.name in ("int8", "bf16")]
    cases = hooks.measure(chosen, Options(rounds=1), layers=1)
    assert [case.name for case in cases] == ["bf16", "int8"]
    for case in cases:
        time, sent = case.measures
        assert set(time.contenders) == {"gradwire", hooks.NO_HOOK, *hooks.PEERS}
        nbytes = sum(p.nbytes for p in models.mlp(1).parameters())
        assert sent.contenders["torch"].median == pytest.approx(nbytes / 1e6)  # 2 (W - 1) / W = 1
        assert sent.contenders["torch, fp16"].median == pytest.approx(nbytes / 2e6)
    int8 = cases[1].measures[1].contenders["gradwire"].median
    assert int8 == pytest.approx(nbytes / 1e6 * 260 / 1024, rel=0.01)
