"""Verdicts on twelve accidents of rank 1 among three ranks, on shm and on Gloo.

torch's analyzer is the reference for the dumps: it reads all of them, and the missing or differing
ranks that it finds must agree with the verdict.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.flight_recorder.components import builder, config_manager, loader

from gradwire.recorder.verdict import Kind, explain

pytestmark = pytest.mark.timeout(600)  # the first test of a backend stages all of its accidents
PROGRAM = Path(__file__).parent / "programs" / "accidents.py"
BACKENDS = ("gloo", "shm")
IN_NETWORK = ["unshare", "--map-root-user", "--net"]
EXPECTED = {
    "skip": {Kind.SKIPPED},
    "order": {Kind.MISMATCH},
    "shape": {Kind.MISMATCH},
    "endless_loop": {Kind.MISSING},
    "sigstop": {Kind.STOPPED},
    "sigkill": {Kind.DIED},
    "out_of_memory": {Kind.ERROR},
    "swallowed": {Kind.SKIPPED},
    "unused": {Kind.ERROR},
    "deadlock": {Kind.DEADLOCK},
    "slow_rank": {Kind.SLOW_RANK},
    "slow_link": {Kind.SLOW_TRANSFER},
}
WORDS = {
    "skip": "skipped the all_gather",
    "order": "where ranks 0 and 2 called broadcast",
    "shape": "[[20]] instead of [[8]]",
    "endless_loop": "in load_batch",
    "sigstop": "stopped",
    "sigkill": "killed",
    "out_of_memory": "allocate",
    "swallowed": "skipped the all_reduce of [8]",
    "unused": "second.weight",
    "deadlock": "wait for each other",
    "slow_rank": "was slow",
    "slow_link": "the transfers with rank 1 were slow",
}
NOT_SEEN_BY_TORCH = {"slow_rank", "slow_link"}
"""Accidents without missing ranks."""


def can_have_a_network() -> bool:
    if not all(shutil.which(name) for name in ("unshare", "nsenter", "ip", "tc")):
        return False
    script = (
        "ip link add link0 type veth peer name link1 && "
        "tc qdisc add dev link0 root tbf rate 300mbit burst 64kb latency 200ms"
    )
    command = [*IN_NETWORK, "sh", "-c", script]
    return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0


@pytest.fixture(scope="module", params=BACKENDS)
def staged(request, tmp_path_factory):
    """A backend, and the directory with all of its accidents."""
    backend, place = request.param, tmp_path_factory.mktemp(request.param)
    alone = ["slow_link"] if backend == "gloo" else []
    runs = [([], [name for name in EXPECTED if name not in alone])]
    if alone and can_have_a_network():
        runs.append((IN_NETWORK, alone))
    for before, names in runs:
        command = [*before, sys.executable, str(PROGRAM), backend, str(place), *names]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
        assert ended.returncode == 0, ended.stderr
    return backend, place


def marked_line(name: str) -> str:
    """Return the line of the program with a comment of this name."""
    for number, line in enumerate(PROGRAM.read_text().splitlines(), 1):
        if line.endswith(f"# here: {name}"):
            return f"{PROGRAM}:{number}"
    return ""


@pytest.mark.wide
@pytest.mark.parametrize("name", EXPECTED)
def test_verdict_names_rank_and_cause(staged, name):
    _, place = staged
    if not (place / name).is_dir():
        pytest.skip("no network namespaces here, in which a link can be slowed")
    verdict = explain(place / name)
    finding = verdict.findings[0]
    assert finding.kind in EXPECTED[name], verdict
    assert 1 in finding.ranks, verdict
    assert finding.ranks == ((0, 1) if name == "deadlock" else (1,)), verdict
    assert WORDS[name] in finding.summary, verdict
    if marked_line(name) and name != "slow_link":
        assert marked_line(name) in finding.places, verdict
    if name == "swallowed":
        assert "`except`" in finding.details[0]
        assert "swallowed" in finding.remedy
    if name == "unused":
        assert set(finding.parameters) == {"second.weight", "second.bias"}
    assert verdict.healthy == (name in NOT_SEEN_BY_TORCH)
    json.dumps(verdict.as_dict())


@pytest.mark.wide
@pytest.mark.parametrize("name", EXPECTED)
def test_torchs_analyzer_agrees_on_the_same_dumps(staged, name, caplog):
    _, place = staged
    if not (place / name).is_dir():
        pytest.skip("no network namespaces here, in which a link can be slowed")
    caplog.set_level(logging.INFO)
    arguments = config_manager.JobConfig().parse_args(
        [str(place / name), "--prefix", "rank_", "--allow-incomplete-ranks"]
    )
    details, version = loader.read_dir(arguments)
    collectives = builder.build_db(details, arguments, version).collectives
    assert collectives
    culprits = {
        rank
        for collective in collectives
        for rank in {*(collective.missing_ranks or ()), *(collective.mismatch_collectives or ())}
    }
    if name in NOT_SEEN_BY_TORCH:
        assert not culprits
    # the analyzer reports ranks without a dump as missing
    lacking = {0, 1, 2} - set(map(int, (dump["rank"] for dump in details.values())))
    seen = culprits | lacking
    assert not seen or 1 in seen or name == "unused", (culprits, lacking)
