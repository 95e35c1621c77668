"""README's commands can be taken from it, its links lead somewhere, and the pins cover what it
installs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from gradwire._torch import NEWEST_TESTED

ROOT = Path(__file__).parents[2]
BLOCK = "```sh\n{}\n```\n"
HEADING = "## Developing gradwire\n"


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


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# gradwire\n" + BLOCK.format("one") + BLOCK.format("two"), "no section"),
        (
            HEADING + BLOCK.format("one") + "## Next\n" + BLOCK.format("two"),
            "found 1",
        ),
        (HEADING + 3 * BLOCK.format("one"), "found 3"),
        (
            HEADING + BLOCK.format("one") + BLOCK.format(" "),
            "each with a command",
        ),
    ],
)
def test_a_readme_without_exactly_two_commands_is_refused(
    tmp_path: Path, text: str, complaint: str
) -> None:
    (tmp_path / "README.md").write_text(text)
    result = command(tmp_path / "README.md", 1)
    assert result.returncode != 0
    assert result.stdout == ""
    assert complaint in result.stderr


def test_a_command_may_have_several_lines_and_text_around_it(tmp_path: Path) -> None:
    blocks = BLOCK.format("a &&") + "Then:\n" + BLOCK.format("b \\\n  c")
    text = f"{HEADING}First:\n{blocks}## Next\n"
    (tmp_path / "README.md").write_text(text)
    assert command(tmp_path / "README.md", 2).stdout == "b \\\n  c\n"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    local = [target for target in targets if not target.startswith("https://")]
    assert [target for target in local if not (ROOT / target).exists()] == []


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
    assert int(said.split()[0]) <= 30_000, said
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "design").glob("*.md")))
def test_design_notes_say_decision_and_reason_briefly(page: Path) -> None:
    _, *notes = page.read_text(encoding="utf-8").split("\n## ")
    assert [note for note in notes if len(note.split()) > 150] == []
    lacking = [note for note in notes if "**Decision.**" not in note or "**Why.**" not in note]
    assert [note.splitlines()[0] for note in lacking] == []
