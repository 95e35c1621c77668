"""What `python -m build` made holds what it should: `python check_packages.py DIRECTORY`.

The wheel has every file of ``src``, the licence and the command, and nothing else. The sdist has
all that it takes to work on gradwire: tests, docs, examples, benchmarks and CI. Neither has caches.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Set
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", ".ci", ".github")
FILES = (
    *(".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md"),
    *("LICENSE", "README.md", "SECURITY.md", "constraints.txt", "constraints-newest.txt"),
    *("mkdocs.yml", "pyproject.toml"),
)
CACHES = ("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".venv")


def below(folder: Path) -> set[str]:
    """The files of a folder, by their paths in it, without caches."""
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {str(path) for path in found if not set(path.parts) & set(CACHES)}


def wheel_complaints(wheel: Path) -> list[str]:
    """What a wheel lacks, and what it should not have."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        commands = archive.read(f"{info}/entry_points.txt").decode()
    metadata = {name for name in names if name.startswith(f"{info}/")}
    wanted = below(ROOT / "src") | {"gradwire/py.typed"}
    complaints = differences(wheel, names - metadata, wanted)
    complaints += differences(wheel, metadata, {f"{info}/licenses/LICENSE"} | metadata)
    if "gradwire = gradwire.cli:main" not in commands:
        complaints.append(f"{wheel.name} has no command gradwire")
    return complaints


def sdist_complaints(sdist: Path) -> list[str]:
    """What an sdist lacks, and what it should not have."""
    with tarfile.open(sdist) as archive:
        members = [member.name for member in archive.getmembers() if member.isfile()]
    names = {name.partition("/")[2] for name in members}
    wanted = {f"{folder}/{path}" for folder in FOLDERS for path in below(ROOT / folder)}
    wanted |= set(FILES) | {"PKG-INFO"}
    return differences(sdist, names, wanted)


def differences(package: Path, have: Set[str], wanted: Set[str]) -> list[str]:
    """A line for each file too few or too many."""
    return [f"{package.name} lacks {name}" for name in sorted(wanted - have)] + [
        f"{package.name} should not have {name}" for name in sorted(have - wanted)
    ]


def main(directory: Path) -> None:
    """Complain about the packages in a directory, or say how large they are."""
    (wheel,), (sdist,) = directory.glob("*.whl"), directory.glob("*.tar.gz")
    complaints = wheel_complaints(wheel) + sdist_complaints(sdist)
    if complaints:
        raise SystemExit("\n".join(complaints))
    for package in (wheel, sdist):
        print(f"{package.name}: {package.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
