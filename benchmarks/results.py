"""Results of a benchmark's run, as stored in its JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.alternate import OURS
from benchmarks.host import Host, this_host
from benchmarks.options import Options
from benchmarks.stats import Estimate, Spread, geometric_mean, ratio, spread

__all__ = ["CaseResult", "Measure", "Result", "Summary"]


@dataclass(frozen=True)
class Measure:
    """One thing measured in a case: each contender's samples, and ours over each peer's."""

    name: str
    unit: str
    contenders: Mapping[str, Spread]
    ratios: Mapping[str, Estimate]

    @classmethod
    def of(
        cls,
        name: str,
        unit: str,
        samples: Mapping[str, Sequence[float]],
        *,
        peers: Iterable[str] | None = None,
    ) -> Measure:
        """The measure of all contenders' samples, one for each round.

        Args:
            name: Name of the measure.
            unit: Unit of the samples.
            samples: Samples by contender; `OURS` is one of them.
            peers: Contenders that `OURS` is compared with; all others if None.
        """
        peers = [name for name in samples if name != OURS] if peers is None else peers
        return cls(
            name,
            unit,
            {name: spread(taken) for name, taken in samples.items()},
            {peer: ratio(samples[OURS], samples[peer]) for peer in peers},
        )


@dataclass(frozen=True)
class CaseResult:
    """A case: what was expected of it, by counting, and what was measured."""

    name: str
    prediction: str
    rounds: int
    measures: Sequence[Measure]


@dataclass(frozen=True)
class Summary:
    """One measure's ratio to one peer over all cases; no mean where a ratio is not positive."""

    measure: str
    peer: str
    geometric_mean: float | None
    largest: float


@dataclass(frozen=True)
class Result:
    """A whole run."""

    benchmark: str
    date: str
    host: Host
    options: Options
    cases: Sequence[CaseResult]
    summary: Sequence[Summary]

    @classmethod
    def of(cls, benchmark: str, options: Options, cases: Sequence[CaseResult]) -> Result:
        """The result of a run that ends now, on this host."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(benchmark, date, this_host(), options, cases, _summary(cases))

    def write(self, path: Path) -> None:
        """Writes the JSON file."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read a file that `write` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            benchmark=data["benchmark"],
            date=data["date"],
            host=Host(**data["host"]),
            options=Options(**data["options"]),
            cases=[_case(case) for case in data["cases"]],
            summary=[Summary(**summary) for summary in data["summary"]],
        )


def _case(data: Mapping[str, Any]) -> CaseResult:
    measures = [
        Measure(
            measure["name"],
            measure["unit"],
            {name: Spread(**spread) for name, spread in measure["contenders"].items()},
            {peer: Estimate(**estimate) for peer, estimate in measure["ratios"].items()},
        )
        for measure in data["measures"]
    ]
    return CaseResult(data["name"], data["prediction"], data["rounds"], measures)


def _summary(cases: Sequence[CaseResult]) -> list[Summary]:
    ratios: dict[tuple[str, str], list[float]] = {}
    for case in cases:
        for measure in case.measures:
            for peer, estimate in measure.ratios.items():
                ratios.setdefault((measure.name, peer), []).append(estimate.value)
    return [
        Summary(
            measure,
            peer,
            geometric_mean(values) if min(values) > 0 else None,
            max(values),
        )
        for (measure, peer), values in ratios.items()
    ]
