"""Table and plot of a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from gradwire.tuning.candidates import PLAIN
from gradwire.tuning.plan.predict import Row
from gradwire.tuning.plan.profile import Profile
from gradwire.tuning.trial import MIN_GAIN


def rate(mbit: float | None) -> str:
    """Format a link's rate, such as "100 Mbit/s" or "10 Gbit/s"."""
    if mbit is None:
        return "this link"
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds with about three digits."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(rows: Sequence[Row], profile: Profile) -> Table:
    """Return a table with a row for each link and number of ranks, the fastest hook in bold."""
    names = list(rows[0].seconds)
    made = Table(
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        title=f"Predicted ms per step: forward {milliseconds(profile.forward)}, backward "
        f"{milliseconds(profile.ready[-1])}, update {milliseconds(profile.update)}, "
        f"{profile.numel:,} parameters in {len(profile.buckets)} buckets",
        caption=f"take: hooks that gain {MIN_GAIN:.0%} of a step; factor: speedup over plain",
    )
    for name in ("link", "ranks", *names):
        title = "plain" if name == PLAIN else name.replace("_", " ")
        made.add_column(title, justify="right", no_wrap=name not in names, min_width=5)
    made.add_column("take")
    made.add_column("factor", justify="right")
    for i, row in enumerate(rows):
        fastest = min(row.seconds.values())
        cells = [_cell(row.seconds[name], fastest) for name in names]
        last = i + 1 == len(rows) or rows[i + 1].mbit != row.mbit
        factor = f"{row.seconds[PLAIN] / row.chosen_seconds:.2f}" if row.pays else ""
        made.add_row(rate(row.mbit), f"{row.ranks:,}", *cells, taken(row), factor, end_section=last)
    return made


def _cell(seconds: float, fastest: float) -> str:
    text = milliseconds(seconds)
    return f"[bold]{text}[/bold]" if seconds == fastest else text


def taken(row: Row) -> str:
    """Format the recommended hooks."""
    if not row.pays:
        return "nothing"
    if len(row.chosen) == 1:
        return next(iter(row.chosen))
    named = sorted(row.chosen.items(), key=lambda item: -item[1])
    return ", ".join(f"{'plain' if n == PLAIN else n} x {count}" for n, count in named)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plot a step's time over the number of ranks, for each link, with a line for each hook."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rates = list(dict.fromkeys(row.mbit for row in rows))
    figure, axes = pyplot.subplots(
        1, len(rates), figsize=(3.2 * len(rates), 3.2), squeeze=False, layout="constrained"
    )
    for axis, mbit in zip(axes[0], rates, strict=True):
        chosen = [row for row in rows if row.mbit == mbit]
        ranks = [row.ranks for row in chosen]
        for name in chosen[0].seconds:
            label = "plain" if name == PLAIN else name
            axis.plot(ranks, [row.seconds[name] * 1e3 for row in chosen], marker=".", label=label)
        axis.plot(
            ranks, [row.chosen_seconds * 1e3 for row in chosen], "k:", linewidth=2, label="auto"
        )
        axis.set(title=rate(mbit), xscale="log", yscale="log", xlabel="ranks")
    axes[0][0].set_ylabel("predicted ms per step")
    axes[0][-1].legend(fontsize="small")
    figure.savefig(path)
    pyplot.close(figure)
