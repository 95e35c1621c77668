"""`gradwire plan`: predictions of models built by user code."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from gradwire.cli.app import app
from gradwire.testing import run_ranks
from gradwire.tuning.candidates import PLAIN, Computing, candidate
from gradwire.tuning.cost_model import Cluster, Link
from gradwire.tuning.plan.predict import Speeds, predict, predict_here, profile_here
from gradwire.tuning.plan.profile import given, load_factory, profile
from gradwire.tuning.plan.report import milliseconds, rate, taken

MODULE = """
import torch
from torch import nn

def build():
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    return net, (torch.randn(8, 64),)

def bare():
    return build()[0]

def number():
    return 3

def frozen():
    return build()[0].requires_grad_(False)

class Dict(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = bare()
    def forward(self, x):
        return {"out": self.net(x), "other": None}

def dictionary():
    return Dict(), torch.randn(8, 64)

class Nested(Dict):
    def forward(self, x):
        return {"layers": [None, (self.net(x) * 1j,)]}

def nested():
    return Nested(), torch.randn(8, 64)

def several_times_a_step():
    net, inputs = build()
    return net, inputs, torch.optim.LBFGS(net.parameters())

def lazy():
    return nn.LazyLinear(4), torch.ones(1, 4)

def of_nothing():
    return nn.ParameterList([torch.empty(0)]), torch.ones(1)

def meta():
    return nn.Linear(4, 4, device="meta"), torch.ones(1, 4)

def named():
    return bare(), {"input": torch.ones(8, 64)}
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "planned_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("file", ["plan.txt", "plan", "none/plan.svg"])
def test_an_unwritable_plot_is_refused_before_measuring(file):
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(app, ["plan", "no_module:build", "--plot", file])
    assert result.exit_code == 2
    assert f"--plot is '{file}'" in result.output


@pytest.mark.wide  # matplotlib takes a second to load
def test_a_table_and_a_plot(here):
    pytest.importorskip("matplotlib")
    output = run(
        *("planned_models:build", "--ranks", "2", "--ranks", "4096", "--plot", "plan.svg"),
        *("--mbit", "10", "--mbit", "100000", "--hook", "bf16", "--hook", "low_rank"),
    )
    for text in ("10 Mbit/s", "100 Gbit/s", "4,096", "bf16", "low rank", "plan.svg written"):
        assert text in output
    assert "int8" not in output
    assert "<svg" in (here / "plan.svg").read_text()


def test_times_as_options():
    output = run(
        *("planned_models:bare", "--backward-ms", "20", "--forward-ms", "10"),
        *("--ranks", "2", "--mbit", "1000", "--hook", "int8"),
    )
    assert "forward 10, backward 20" in output
    assert "hooks that gain 5% of a step" in output  # the same threshold as auto


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("planned_models", "has no colon"),
        ("planned_models:none_such", "cannot be loaded"),
        ("none_such_module:build", "cannot be loaded"),
        ("planned_models:number", "returned int"),
        ("math:sqrt", "cannot be called without arguments"),
        ("math:pi", "is a float: pass a function"),
        ("planned_models:frozen", "without trainable parameters"),
        ("planned_models:of_nothing", "without trainable parameters"),
        ("planned_models:lazy", "uninitialized parameters: run a forward first"),
        ("planned_models:meta", "on the meta device"),
        ("planned_models:named", "inputs that are dict: return a tuple"),
        ("planned_models:several_times_a_step", "LBFGS runs forward and backward several times"),
        ("planned_models:bare", "returns no inputs"),
    ],
)
def test_invalid_factories(factory, said):
    assert said in run(factory, code=2)


def test_nested_and_complex_outputs():
    model, inputs, _ = load_factory("planned_models:nested")
    assert profile(model, inputs).ready[-1] > 0


def test_a_profile_s_buckets_are_ready_in_order_and_the_last_at_the_end():
    model, inputs, _ = load_factory("planned_models:dictionary")
    found = profile(model, inputs)
    assert found.numel == sum(p.numel() for p in model.parameters())
    assert list(found.ready) == sorted(found.ready)
    assert found.forward > 0
    assert found.buckets[0][0].shape == model.net[2].bias.shape
    assert given(model, 1.0, 2.0).ready[-1] == 2.0


def test_hooks_gain_on_a_slow_link_only():
    found = given(load_factory("planned_models:bare")[0], 0.0, 0.01)
    candidates = [candidate(PLAIN), candidate("int8")]
    speeds = Speeds({(c.name, 2): [(1, Computing(1e-3, 1e-3))] for c in candidates})
    slow, fast = (
        predict(found, candidates, speeds, Cluster(2, Link(0.0, m * 125e3)), m) for m in (1, 1e6)
    )
    assert (taken(slow), taken(fast)) == ("int8", "nothing")
    assert slow.seconds["int8"] < slow.seconds[PLAIN] / 3
    assert fast.chosen_seconds == fast.seconds[PLAIN]


def predicted_here():
    import torch
    import torch.distributed as dist
    from torch import nn

    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    before = [p.clone() for p in net.parameters()]
    optimizer = torch.optim.AdamW(net.parameters())
    group = dist.group.WORLD
    found = profile_here(group, net, (torch.randn(8, 64),), optimizer)
    row = predict_here(group, found, [candidate(PLAIN), candidate("int8")])
    assert all(map(torch.equal, before, net.parameters()))
    assert not optimizer.state
    assert found.update > 0
    return found.ready, row


@pytest.mark.wide  # some seconds of measuring
def test_all_ranks_predict_the_same_for_their_link():
    first, second = run_ranks(predicted_here, 2)
    assert first == second
    assert first[1].mbit is None
    assert all(seconds > 0 for seconds in first[1].seconds.values())


def test_here_needs_ranks(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert "start each with gradwire run" in run("planned_models:build", "--here", code=2)


def test_number_formats():
    assert [rate(m) for m in (10, 1000, 2500)] == ["10 Mbit/s", "1 Gbit/s", "2.5 Gbit/s"]
    assert [milliseconds(s) for s in (0.0012345, 0.5, 12.0)] == ["1.23", "500", "12,000"]
