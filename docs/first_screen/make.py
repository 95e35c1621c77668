"""Outputs and the timeline on the first screen: `python docs/first_screen/make.py` writes them.

Each program is run as `train.py`. In a page, `<!-- output: NAME -->` and `<!-- /output -->`, each
on its own line, mark the place of an output; `tests/repo/test_readme.py` runs the programs again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "howto" / "check.md",
    ROOT / "docs" / "howto" / "hang.md",
]
PLACE = re.compile(r"(<!-- output: (\w+) -->\n).*?(\n<!-- /output -->)", re.DOTALL)
SECONDS = 90.0
STATE_COLORS = {
    "forward": "#4c9f70",
    "backward": "#3b73b9",
    "exposed communication": "#e0a030",
    "between steps": "#c8c8c8",
}


def gradwire(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a command as a reader does, in a folder and in a session of its own."""
    variables = {"COLUMNS": "100", "OMP_NUM_THREADS": "1", "GRADWIRE_QUIET": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "gradwire", *arguments],
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def printed(process: subprocess.Popen[str]) -> str:
    """Return what a command prints."""
    try:
        return process.communicate(timeout=SECONDS)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def in_a_folder(program: str, make: Callable[[Path], str]) -> str:
    """Return the output of a program, without parts that differ from run to run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        shutil.copy(HERE / program, folder / "train.py")
        text = make(folder).replace(f"{folder}/", "")
    text = re.sub(r"pid \d+ on [^)\s]+", "pid 5317 on node-1", text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def check() -> str:
    """Return what `gradwire check` prints on a loss that is a mean over tokens."""

    def checked(folder: Path) -> str:
        return printed(gradwire(folder, "check", "train.py"))

    return in_a_folder("tokens.py", checked)


def hang() -> str:
    """Return what `gradwire explain --live` prints while a program hangs."""

    def explained(folder: Path) -> str:
        arguments = ("--standalone", "--nproc-per-node", "3", "--recorder", "dumps", "train.py")
        job = gradwire(folder, "run", *arguments)
        try:
            end, said = time.monotonic() + SECONDS, ""
            while "mismatch" not in said:  # a rank has to have waited for a second
                if time.monotonic() > end:
                    raise TimeoutError(f"no verdict in {SECONDS} s: {said}")
                time.sleep(1)
                said = printed(gradwire(folder, "explain", "--live", "dumps"))
        finally:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
        return said.partition("\n")[2]  # without the folder

    return in_a_folder("hang.py", explained)


def timeline() -> str:
    """Return the timeline of three steps as an SVG: a lane of steps and one of waits per rank."""

    def drawn(folder: Path) -> str:
        options = "--standalone --nproc-per-node 2 --backend shm --compat --timeline run.json"
        printed(gradwire(folder, "run", *options.split(), "train.py"))
        events = json.loads((folder / "run.json").read_text())["traceEvents"]
        return picture([event for event in events if event["ph"] == "X"])

    return in_a_folder("slow.py", drawn)


def picture(events: list[dict]) -> str:
    """Draw the steps, and the waits for other ranks, of two ranks."""
    steps = [e for e in events if e["name"] == "between steps" and e["pid"] == 0]
    start, end = steps[10]["ts"], steps[13]["ts"]
    width, left, scale = 840, 90, 740 / (end - start)
    drawn = []
    for event in events:
        place, stop = max(event["ts"], start), min(event["ts"] + event["dur"], end)
        waits = event["tid"] == 3 and event["name"] == f"rank {1 - event['pid']}"
        color = "#c0504d" if waits else STATE_COLORS.get(event["name"])
        x, wide = left + (place - start) * scale, (stop - place) * scale
        if wide < 0.1 or color is None:
            continue
        y = 20 + 70 * event["pid"] + 26 * waits
        text = event["name"] if not waits else f"waits for {event['name']}"
        drawn.append(
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="22" fill="{color}">'
            f"<title>{text}: {event['dur'] / 1000:.1f} ms</title></rect>"
        )
    labels = [f'<text x="10" y="{36 + 70 * rank}">rank {rank}</text>' for rank in (0, 1)]
    labels += [f'<text x="10" y="{62 + 70 * rank}" fill="#777">waits</text>' for rank in (0, 1)]
    for ms in range(0, int((end - start) / 1000) + 1, 50):
        x = left + 1000 * ms * scale
        labels.append(f'<path d="M{x:.1f} 140v5" stroke="#777"/>')
        labels.append(f'<text x="{x:.1f}" y="158" fill="#777" text-anchor="middle">{ms}</text>')
    labels.append('<text x="10" y="158" fill="#777">time, ms</text>')
    legend = [*STATE_COLORS.items(), ("waits for the other rank", "#c0504d")]
    x = left
    for text, color in legend:
        labels.append(f'<rect x="{x}" y="178" width="12" height="12" fill="{color}"/>')
        labels.append(f'<text x="{x + 17}" y="189">{text}</text>')
        x += 40 + 7 * len(text)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 200" font-size="13" '
        'font-family="sans-serif" role="img"><title>Three steps of two ranks: rank 1 waits for '
        'rank 0, whose data takes longer</title><rect width="840" height="200" fill="#fff"/>'
        f"{''.join(drawn)}{''.join(labels)}</svg>\n"
    )


OUTPUTS = {"check": check, "hang": hang}


def short(page: Path, name: str, output: str) -> str:
    """Return an output as a page shows it: README has the four lines of a verdict alone."""
    lines = output.splitlines()
    return "\n".join(lines[:4] if (page.name, name) == ("README.md", "hang") else lines)


def shown(page: Path) -> dict[str, str]:
    """Return the outputs that a page shows, by name, without prompts and fences."""
    found = {}
    for place in PLACE.finditer(page.read_text(encoding="utf-8")):
        lines = place[0].splitlines()[2:-2]
        found[place[2]] = "\n".join(line for line in lines if not line.startswith("$ "))
    return found


def filled(page: Path, made: dict[str, str]) -> str:
    """Return a page with the outputs in their places."""

    def fill(place: re.Match[str]) -> str:
        prompts = [line for line in place[0].splitlines() if line.startswith("$ ")]
        body = "\n".join([*prompts, short(page, place[2], made[place[2]])])
        return f"{place[1]}```console\n{body}\n```{place[3]}"

    return PLACE.sub(fill, page.read_text(encoding="utf-8"))


def main() -> None:
    """Write the outputs into the pages, and the timeline beside them."""
    made = {name: make() for name, make in OUTPUTS.items()}
    for page in PAGES:
        page.write_text(filled(page, made), encoding="utf-8")
    (ROOT / "docs" / "timeline.svg").write_text(timeline(), encoding="utf-8")


if __name__ == "__main__":
    main()
