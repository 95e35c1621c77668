"""Gradient-related names of torch.distributed, implemented by gradwire."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks as torch_hooks
from ddp.common import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradwire.hooks
from gradwire import compat
from gradwire.compat.ddp import DistributedDataParallel
from gradwire.ddp import DistributedDataParallel as Ours
from gradwire.errors import ArgumentError, HookError, ReductionError
from gradwire.testing import run_ranks

THEIRS = nn.parallel.DistributedDataParallel


@pytest.fixture
def installed() -> Iterator[None]:
    with compat.installed():
        yield


def test_class_has_the_methods_that_scripts_call() -> None:
    public = {n for n in vars(THEIRS) if not n.startswith("_") and n != "T_destination"}
    for_devices_of_old = {"scatter", "gather", "to_kwargs"}
    set_by_the_constructor = {"broadcast_buffers"}
    ours = set(dir(DistributedDataParallel)) | set_by_the_constructor
    assert public - for_devices_of_old <= ours


# -- buckets ---------------------------------------------------------------------------------


def tensors(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.empty(n, dtype=dtype) for n in sizes]


@pytest.mark.usefixtures("installed")
def test_bucket_assignment_rejects_wrong_input() -> None:
    assign = dist._compute_bucket_assignment_by_size
    with pytest.raises(RuntimeError, match=r"tensor 0 is torch\.sparse_coo.*No support for sparse"):
        assign([torch.zeros(3).to_sparse()], [400])
    with pytest.raises(ArgumentError, match="caps is"):  # PyTorch's dies here
        assign(tensors(1), [])
    with pytest.raises(ArgumentError, match="indices has 1"):  # PyTorch's reads beyond them
        assign(tensors(1, 1), [4], [], [0])


BUCKETS: dict[str, tuple[Any, type[Exception]]] = {
    "no tensors": (([], [100]), RuntimeError),
    "no limits": (([torch.ones(1)], []), RuntimeError),
    "too few": (([torch.ones(1)] * 2, [100], [True]), RuntimeError),
    "too many": (([torch.ones(1)], [100], [True, False]), RuntimeError),
    "negative limit": (([torch.ones(1)], [-1]), TypeError),
    "fraction": (([torch.ones(1)], [1.5]), TypeError),
    "one limit": (([torch.ones(1)], 100), TypeError),
    "no tensor": (([3], [100]), TypeError),
    "no list": ((None, [100]), TypeError),
    "index": (([torch.ones(1)], [100], [], [0.5]), TypeError),
}


@pytest.mark.parametrize("name", BUCKETS)
def test_bucket_assignment_refuses_what_pytorch_refuses(name: str) -> None:
    args, kind = BUCKETS[name]
    theirs = dist._compute_bucket_assignment_by_size
    if name != "no limits":  # PyTorch's crashes
        with pytest.raises(kind):
            theirs(*args)
    with compat.installed(), pytest.raises(kind):
        dist._compute_bucket_assignment_by_size(*args)


def test_a_limit_of_0_gives_one_tensor_per_bucket() -> None:
    args = ([torch.ones(3), torch.ones(0), torch.ones(1)], [0])
    want = dist._compute_bucket_assignment_by_size(*args)
    with compat.installed():
        assert dist._compute_bucket_assignment_by_size(*args) == want


@on_ranks(1, backend="gloo")
def test_broadcast_coalesced_refuses_what_pytorch_refuses() -> None:
    group, x = dist.group.WORLD, torch.ones(3)
    refused: list[tuple[Any, type[Exception]]] = [
        ((group, [], 10), RuntimeError),
        ((group, [x], 10, 1), RuntimeError),
        ((group, [x.reshape(1, 3).to_sparse()], 10), RuntimeError),
        ((group, [x], -1), TypeError),
        ((group, [x], 1.5), TypeError),
        ((group, x, 10), TypeError),
    ]
    for installed in (False, True):
        with compat.installed() if installed else nullcontext():
            for args, kind in refused:
                with pytest.raises(kind):
                    dist._broadcast_coalesced(*args)
            dist._broadcast_coalesced(group, [x], 0)


def test_broadcast_coalesced_takes_a_rank_of_the_group() -> None:
    def main() -> list[float]:
        with compat.installed():
            group = dist.new_group([1, 2])
            x = [torch.full((3,), float(dist.get_rank())), torch.ones(2, dtype=torch.int64)]
            if dist.get_rank() > 0:
                dist._broadcast_coalesced(group, x, 16, 1)
            return x[0].tolist()

    assert run_ranks(main, 3) == [[0.0] * 3, [2.0] * 3, [2.0] * 3]


# -- hooks -----------------------------------------------------------------------------------


def test_hooks_by_pytorchs_registration() -> None:
    def main() -> float:
        with compat.installed():
            model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
            kind = torch_hooks.DDPCommHookType.FP16_COMPRESS
            torch_hooks.register_ddp_comm_hook(kind, model, dist.group.WORLD)
            model(torch.tensor([[1.0 + dist.get_rank()]])).sum().backward()
            return model.module.weight.grad.item()

    assert run_ranks(main, 2) == [1.5, 1.5]


# -- the class -------------------------------------------------------------------------------


@on_ranks(2)
def test_names_of_the_class() -> None:
    with compat.installed():
        net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        wrapper = nn.parallel.DistributedDataParallel
        wrapper._set_params_and_buffers_to_ignore_for_model(net, ["0.bias"])
        model = wrapper(net, bucket_cap_mb=2)
        assert isinstance(model, Ours)
        assert model.device_ids is None
        assert model.device_type == "cpu"
        assert model.bucket_bytes_cap == 2 << 20
        assert model.will_sync_module_buffers()
        assert len(model.modules_buffers) == 3
        named = dict(wrapper._get_data_parallel_params(net, named_params=True))
        assert "0.weight" in named
        assert "0.bias" not in named
        model._set_static_graph()
        model(torch.randn(4, 2)).sum().backward()
        data = model._get_ddp_logging_data()
        assert data["world_size"] == 2
        assert data["num_parameter_tensors"] == 3
        assert data["static_graph"] == 1
        assert "error" not in data
        copied = copy.deepcopy(model)  # as after `refit` and `_set_static_graph`
        assert all(m.reducer.reword is not None for m in (model, copied))


def test_authoritative_rank_after_join() -> None:
    def main() -> tuple[int, int, int]:
        with compat.installed():
            model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
            before = model._authoritative_rank
            with model.join():
                for _ in range(1 + dist.get_rank()):
                    model(torch.randn(4, 2)).sum().backward()
            joined = model._get_ddp_logging_data()["join_uneven_inputs"]
            return before, model._authoritative_rank, joined

    assert run_ranks(main, 2) == [(-1, 1, 1)] * 2


@on_ranks(2)
def test_errors_have_pytorchs_classes_and_phrases() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    with compat.installed():
        wrapper = nn.parallel.DistributedDataParallel
        with pytest.raises(RuntimeError, match="no parameter that requires a gradient"):
            wrapper(nn.ReLU())
        model = wrapper(Half())
        with pytest.raises(TypeError, match="must be callable"):
            model.register_comm_hook(None, 3)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ReductionError, match=r"unused\.weight") as caught:
            model(torch.ones(1, 2))
        assert "Expected to have finished reduction in the prior iteration" in str(caught.value)
        assert f"did not receive grad for rank {dist.get_rank()}: 1)" in str(caught.value)
        assert model._get_ddp_logging_data()["error"] == str(caught.value)


@on_ranks(2)
def test_hook_exceptions_keep_their_class() -> None:
    class Own(Exception):
        def __init__(self, code: int, text: str) -> None:
            super().__init__(code, text)
            self.code = code

    for raised in (KeyError("left"), OSError(5, "disk"), Own(3, "own"), TypeError("peer")):

        def hook(state: Any, bucket: Any) -> Any:
            raise raised  # noqa: B023

        with compat.installed():
            model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
            model.register_comm_hook(None, hook)
            with pytest.raises(type(raised)) as caught:
                model(torch.ones(1, 1)).sum().backward()
            assert isinstance(caught.value, HookError)
            assert caught.value.args == raised.args
            assert str(raised) in str(caught.value)
            if isinstance(raised, OSError):
                assert caught.value.errno == 5
            if isinstance(raised, Own):
                assert caught.value.code == 3


class Doubling:
    """A hook that is an object, with a single collective."""

    single_collective = True

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future


@on_ranks(2)
def test_hook_registration_follows_pytorch() -> None:
    def wrong_bucket(state: Any, bucket: int) -> Any: ...

    def wrong_result(state: Any, bucket: dist.GradBucket) -> int: ...

    with compat.installed():
        model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
        for hook, words in (
            (wrong_bucket, "bucket annotation should be dist.GradBucket"),
            (wrong_result, "return annotation should be torch.futures.Future"),
        ):
            with pytest.raises(ValueError, match=words):
                model.register_comm_hook(None, hook)
        model.register_comm_hook(None, Doubling())
        model = cloudpickle.loads(cloudpickle.dumps(model))  # its hook is of this file
        assert model.reducer.comm_hook.single_collective
        model(torch.ones(1, 1)).sum().backward()
        assert model.module.weight.grad.item() == 2.0
        with pytest.raises(RuntimeError, match="can only be called once"):
            model.register_comm_hook(None, Doubling())
        model.register_comm_hook(None, None)
        for hook in (*vars(gradwire.hooks).values(), torch_hooks.powerSGD_hook.powerSGD_hook):
            if hook in (gradwire.hooks.all_reduce, gradwire.hooks.fp16):
                model.register_comm_hook(None, hook)
                model.register_comm_hook(None, None)


@on_ranks(2)
def test_uninitialized_parameters_have_pytorchs_phrase() -> None:
    with compat.installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="Modules with uninitialized parameters"):
            nn.parallel.DistributedDataParallel(nn.LazyLinear(2))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.second(self.first(x)) if both else self.first(x)


class Twice(nn.Module):
    """One layer in two reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, _: bool) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def message_of(wrapper: Any, case: str) -> str:
    """Return the message of a failing step."""
    twice = case == "twice"
    net = wrapper(Twice() if twice else Branches(), static_graph=not twice)

    def train() -> None:
        for both in (False, True) if case == "more" else (True, False, True):
            net(torch.ones(1, 1), both).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError) as caught:
            train()
    assert wrapper is THEIRS or net._get_ddp_logging_data()["has_error"]
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "phrase"),
    [
        ("twice", "Expected to mark a variable ready only once."),
        ("more", "Your training graph has changed in this iteration"),
        ("less", "your training graph has changed in this iteration"),
    ],
)
@on_ranks(1)
def test_phrases_that_programs_look_for_in_backward(case: str, phrase: str) -> None:
    for wrapper in (THEIRS, DistributedDataParallel):
        assert phrase in message_of(wrapper, case)


@on_ranks(2, backend="gloo")
def test_deprecated_arguments_warn() -> None:
    categories = []
    for wrapper in (THEIRS, DistributedDataParallel):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapper(nn.Linear(1, 1), broadcast_buffers=True)
        categories.append([w.category for w in caught if "forward_sync_buffers" in str(w.message)])
    assert categories[0] == categories[1]


@on_ranks(2)
def test_arguments_unknown_to_this_pytorch_are_refused() -> None:
    theirs = set(inspect.signature(THEIRS).parameters)
    newer = {"batched_grad_copy", "forward_sync_buffers", "lazy_bucket_allocation"} - theirs
    for name in [*newer, "check_replicas"]:
        with pytest.raises(TypeError, match=name):
            DistributedDataParallel(nn.Linear(1, 1), **{name: True})
    with pytest.raises(TypeError, match="arguments"):
        DistributedDataParallel(nn.Linear(1, 1), *[None] * len(theirs))
    for name in newer:  # ours has them with every version
        assert Ours(nn.Linear(1, 1), **{name: True})


def test_replicate_and_state_dicts() -> None:
    """PyTorch's function API over the class, and state dicts without the wrapper's prefix."""

    def train() -> tuple[list[float], list[str]]:
        from torch.distributed._composable.replicate import replicate
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        keys = sorted(get_model_state_dict(nn.parallel.DistributedDataParallel(nn.Linear(1, 1))))
        replicate(net, bucket_cap_mb=1)
        for step in range(3):
            net.zero_grad()
            net.set_requires_gradient_sync(step != 1)
            torch.manual_seed(10 * step + dist.get_rank())
            net(torch.randn(3, 4)).square().sum().backward()
        assert net.weight.grad is not None
        return net.weight.grad.flatten().tolist(), keys

    def main() -> list[tuple[list[float], list[str]]]:
        theirs = train()
        with compat.installed():
            return [theirs, train()]

    for (theirs, _), (ours, keys) in run_ranks(main, 2, backend="gloo"):
        torch.testing.assert_close(ours, theirs)
        assert keys == ["bias", "weight"]
