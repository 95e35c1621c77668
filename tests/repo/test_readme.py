"""README's commands, links, pins and pages; the how-to pages, followed as a reader does."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmarks.hosts import Hosts, why_no_hosts
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from gradwire._torch import NEWEST_TESTED

ROOT = Path(__file__).parents[2]


def command(readme: Path, number: int) -> subprocess.CompletedProcess[str]:
    script = ROOT / ".ci" / "readme_commands.py"
    return subprocess.run(
        [sys.executable, script, readme, str(number)], capture_output=True, text=True, timeout=60
    )


def test_the_first_command_installs_and_shows_the_demo_the_second_tests() -> None:
    install, demo = command(ROOT / "README.md", 1).stdout.strip().split(" && ")
    assert install == 'python -m pip install -c constraints.txt -e ".[dev]"'
    assert demo == "gradwire demo"
    assert command(ROOT / "README.md", 2).stdout.strip() == "pytest -n 2"


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs and GitHub name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    """`mkdocs build --strict` takes longer for the same, and sees the pages in docs/ alone."""
    lost = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if link.startswith("https://") or (target.is_file() and not anchor):
                continue
            if target.suffix != ".md" or anchor not in anchors_of(target):
                lost.append(f"{page.relative_to(ROOT)}: {link}")
    assert lost == []


def pins_of(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins.items()}


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-newest.txt"])
def test_every_requirement_has_a_pin_that_satisfies_it(file: str) -> None:
    pins = pins_of(file)
    requirements = [Requirement(r) for r in importlib.metadata.requires("gradwire") or []]
    unmet = [
        str(requirement)
        for requirement in requirements
        if canonicalize_name(requirement.name) != "gradwire"
        and not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "0"))
    ]
    assert requirements
    assert unmet == []


def test_the_newest_torch_is_the_newest_that_counts_as_tested() -> None:
    version = Version(pins_of("constraints-newest.txt")["torch"])
    assert version > Version(pins_of("constraints.txt")["torch"])
    assert version.release[:2] == NEWEST_TESTED


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "reference").glob("*.md")))
def test_reference_pages_that_order_their_names_have_all(page: Path) -> None:
    """A function whose module has the same name needs a directive of its own."""
    text = page.read_text(encoding="utf-8")
    listed = set(re.findall(r"^        - (\w+)$", text, re.MULTILINE))
    if in_one_line := re.search(r"members: \[(.*)\]", text):
        listed |= set(in_one_line[1].split(", "))
    module = importlib.import_module(f"gradwire.{page.stem}")
    assert not listed - set(module.__all__)
    alone = set(re.findall(r"^::: gradwire\.[\w.]+\.(\w+)$", text, re.MULTILINE))
    for name in set(module.__all__) if listed else ():
        home = getattr(getattr(module, name), "__module__", "")
        is_hidden = home == f"{module.__name__}.{name}" or home.endswith(f".{name}.{name}")
        elsewhere = {"recorder": set(module.__all__)}
        known = listed | alone | elsewhere.get(page.stem, set()) | {"register_container"}
        assert name in (alone if is_hidden else known), name


def test_the_docs_can_be_read_in_an_evening() -> None:
    script = [sys.executable, str(ROOT / ".ci" / "count_docs.py")]
    said = subprocess.run(script, capture_output=True, text=True, check=True, timeout=60).stdout
    assert int(said.split()[0]) <= 25_000, said
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "design").glob("*.md")))
def test_design_notes_say_decision_and_reason_briefly(page: Path) -> None:
    _, *notes = page.read_text(encoding="utf-8").split("\n## ")
    assert [note for note in notes if len(note.split()) > 150] == []
    lacking = [note for note in notes if "**Decision.**" not in note or "**Why.**" not in note]
    assert [note.splitlines()[0] for note in lacking] == []


# -- the first screen -------------------------------------------------------------------------


def first_screen() -> ModuleType:
    path = ROOT / "docs" / "first_screen" / "make.py"
    spec = importlib.util.spec_from_file_location("first_screen", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["check", pytest.param("hang", marks=pytest.mark.wide)])
def test_pages_show_what_the_commands_print(name: str) -> None:
    """Numbers of collectives aside, which differ between versions of PyTorch."""
    make = first_screen()
    made = make.OUTPUTS[name]()
    pages = {page: make.shown(page) for page in make.PAGES}
    showing = [page for page, outputs in pages.items() if name in outputs]
    assert make.PAGES[0] in showing
    for page in showing:
        number = re.compile(r"number \d+")
        told = number.sub("", make.short(page, name, made))
        assert number.sub("", pages[page][name]) == told, page.name


UPSTREAM = ROOT / "docs" / "upstream"


@pytest.mark.wide
@pytest.mark.timeout(150)
@pytest.mark.parametrize("script", sorted(UPSTREAM.glob("*.py")), ids=lambda path: path.stem)
def test_faults_of_pytorch_are_seen(script: Path) -> None:
    """A script whose fault is gone leaves the page, or says with which versions it is seen."""
    assert f"`{script.name}`" in (UPSTREAM / "README.md").read_text(encoding="utf-8")
    if script.stem == "powersgd_buckets" and Version(torch.__version__).release < (2, 15):
        pytest.skip("seen with 2.15")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-W", "ignore", str(script)]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "seen " in ended.stdout, ended.stderr
    assert ended.returncode == 0, ended.stdout


# -- howto ----------------------------------------------------------------------------------------


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
    | --live  # needs a job that runs; tests/cli/test_explain.py
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
