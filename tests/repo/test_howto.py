"""The how-to pages, followed as a reader does: save the file, run the commands, in an empty folder.

A command of a page that names `train.py` without a script to save is run with the tutorial's.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradwire.testing.hosts import Hosts, why_no_hosts

DOCS = Path(__file__).parents[2] / "docs"
SAVED = re.compile(r"[Ss]ave this script as `([\w.]+)`:\n\n```python\n(.*?)^```$", re.M | re.S)
TITLED = re.compile(r'^```python title="([\w.]+)"\n(.*?)^```$', re.M | re.S)
SHOWN = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)
OTHERS = re.compile(
    r"""
    ^(kill|eval|pip|export)\b  # ids and shells of the reader
    | --nnodes | 10\.0\.0\.1 | nccl_trace  # several hosts, GPUs
    | once\ per\ member
    | examples/ | benchmarks | demo\ --mode  # in a clone of the repository; tested elsewhere
    | \bdoctor\b
    | --live  # needs a job that runs; tests/cli/test_live.py
    """,
    re.X,
)
DIGEST = "[0-9a-f]{64}"
"""Two processes may print theirs in one line."""
LIMIT = 150.0


def commands(page: str) -> list[str]:
    """Return the page's commands that a reader can run on one machine."""
    found: list[str] = []
    for block in SHOWN.findall((DOCS / page).read_text(encoding="utf-8")):
        joined = re.sub(r"\\\n\s*", "", block)
        found += [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
    return [command for command in found if not OTHERS.search(command)]


def save_files(page: str, folder: Path) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    tutorial = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    for name, script in SAVED.findall(text) or TITLED.findall(tutorial):
        (folder / name).write_text(script, encoding="utf-8")


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    kept = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    return subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env={"PATH": path, "HOME": str(folder), **kept},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> str:
    """Return the rest of the output of a command that must succeed."""
    try:
        out, _ = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out
    return out


PAGES = [f"howto/{name}.md" for name in ("compat", "debug", "integrate", "shm", "train")]


def test_the_pages_have_commands() -> None:
    assert all(commands(page) for page in [*PAGES, "howto/elastic.md"])


@pytest.mark.wide
@pytest.mark.timeout(4 * LIMIT)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_s_commands_run_in_an_empty_folder(page: str, tmp_path: Path) -> None:
    save_files(page, tmp_path)
    for command in commands(page):
        end(start(command, tmp_path))


@pytest.mark.wide
@pytest.mark.timeout(4 * LIMIT)
def test_an_elastic_run_outlives_a_killed_member(tmp_path: Path) -> None:
    save_files("howto/elastic.md", tmp_path)
    with_kill, alone = commands("howto/elastic.md")[:2]
    began = time.monotonic()
    running = start(with_kill, tmp_path)
    assert running.stdout is not None
    for line in running.stdout:
        if shown := re.match(r"step \d+: process (\d+), 3 members", line):
            break
    else:
        pytest.fail("no step was shown")
    os.kill(int(shown[1]), signal.SIGKILL)
    out = end(running)
    assert f"process {shown[1]} (member" in out or f"process {shown[1]} was killed" in out
    assert "was killed by SIGKILL; started process" in out
    digests = set(re.findall(DIGEST, out))
    assert digests == set(re.findall(DIGEST, end(start(alone, tmp_path))))
    assert len(digests) == 1
    assert time.monotonic() - began > 3  # long enough to kill a process by hand


@pytest.mark.wide
@pytest.mark.timeout(4 * LIMIT)
@pytest.mark.skipif(why_no_hosts() != "", reason=f"no hosts: {why_no_hosts()}")
def test_two_sites_have_the_bits_of_two_processes(tmp_path: Path) -> None:
    save_files("howto/elastic.md", tmp_path)
    text = (DOCS / "howto/elastic.md").read_text(encoding="utf-8")
    section = text[text.index("## Fewer exchanges") :]
    together, apart = (block.replace("$ ", "") for block in SHOWN.findall(section)[:2])
    with Hosts([1, 1], rate="10mbit") as hosts:
        serve, join = apart.replace("10.0.0.1", hosts.address(0)).splitlines()
        inside = [f"GLOO_SOCKET_IFNAME=cable {shlex.join(hosts.command(host))} " for host in (0, 1)]
        store = start(inside[0] + serve, tmp_path)
        try:
            sites = [start(prefix + join, tmp_path) for prefix in inside]
            assert sites[1].stdout is not None
            pid = 0
            for line in sites[1].stdout:
                if shown := re.match(r"gradwire: started process (\d+)", line):
                    pid = int(shown[1])
                if re.match(r"step \d+: member \d+ of 2", line):
                    break
            os.kill(pid, signal.SIGKILL)
            out = "".join(end(site) for site in sites)
        finally:
            os.killpg(store.pid, signal.SIGKILL)
            store.communicate()
    assert "was killed by SIGKILL; started process" in out
    digests = re.findall(DIGEST, out + end(start(together, tmp_path)))
    assert len(digests) == 4, out
    assert len(set(digests)) == 1
