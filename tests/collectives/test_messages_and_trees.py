"""Point-to-point messages, halos, coalesced trees, objects and the barrier."""

from __future__ import annotations

from collections import UserDict, deque
from dataclasses import dataclass
from enum import Enum

import pytest
import torch
import torch.distributed as dist
from ddp.common import on_ranks
from torch.utils import _pytree

from gradwire import collectives as C
from gradwire.errors import ArgumentError, ArgumentTypeError, MismatchError
from gradwire.testing import gradcheck, run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


@on_ranks(2)
def test_messages_both_ways_have_all_derivatives():
    def ping_pong(x):
        """Rank 0 sends x², gets back its product with rank 1's x, and so on.

        The tokens begin with x, because torch.autograd.grad goes only where its inputs are.
        """
        if dist.get_rank() == 0:
            token = C.send(x * x, 1, token=0 * x.sum())
            y, token = C.recv(torch.empty(2, dtype=x.dtype), 1, token=token)
            token = C.send(y + x, 1, token=token)
            return C.tie(y * 1, token)
        y, token = C.recv(torch.empty(2, dtype=x.dtype), 0, token=0 * x.sum())
        token = C.send(y * x, 0, token=token)
        z, token = C.recv(torch.empty(2, dtype=x.dtype), 0, token=token)
        return C.tie(z * z * x, token)

    x = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(ping_pong, x)


@on_ranks(1)
def test_messages_to_oneself_and_to_nobody_are_refused():
    x = torch.ones(1)
    for move in (C.send, C.recv):
        with pytest.raises(ArgumentError, match="this rank itself"):
            move(x, 0)
        with pytest.raises(ArgumentError, match="no root"):
            move(x)
    with pytest.raises(ArgumentError, match="global rank 5"):
        C.send_recv(x, 5)


def tree():
    """Several dtypes, shapes and containers; 4 rows each."""
    base = torch.arange(24.0).view(4, 6) + dist.get_rank()
    return {
        "a": [base.requires_grad_(), (base.detach() * 2).bfloat16()],
        "b": (base.detach()[:, :0], base.detach().long()),
    }


@pytest.mark.parametrize(
    ("coalesced", "single"),
    [
        (lambda t: C.all_reduce_coalesced(t), C.all_reduce),
        (lambda t: C.all_reduce_coalesced(t, "max"), lambda x: C.all_reduce(x, "max")),
        (lambda t: C.all_gather_coalesced(t), C.all_gather),
        (lambda t: C.reduce_scatter_coalesced(t), C.reduce_scatter),
    ],
)
@on_ranks(2)
def test_coalesced_matches_each_leaf(coalesced, single):
    given = tree()
    result = coalesced(given)
    flat = [*result["a"], *result["b"]]
    assert isinstance(result["b"], tuple)
    for have, x in zip(flat, [*given["a"], *given["b"]], strict=True):
        assert torch.equal(have, single(x))
        assert have.dtype == x.dtype
        have.add_(1)  # each has memory of its own
    leaf = given["a"][0]
    flat[0].sum().backward()
    twin = leaf.detach().clone().requires_grad_()
    single(twin).sum().backward()
    assert torch.equal(leaf.grad, twin.grad)


COALESCED = (C.all_reduce_coalesced, C.all_gather_coalesced, C.reduce_scatter_coalesced)


class Keyed(dict):
    """Registered with pytrees with its keys as the context."""


class Named(dict):
    """Registered with the paths of its values."""


class Opaque:
    """Registered with a context that only says which child is which."""

    def __init__(self, held):
        self.held = held


@dataclass
class Holder:
    held: object


_pytree.register_pytree_node(
    Keyed,
    lambda x: (list(x.values()), list(x)),
    lambda leaves, keys: Keyed(zip(keys, leaves, strict=True)),
)
_pytree.register_pytree_node(
    Named,
    lambda x: (list(x.values()), tuple(x)),
    lambda leaves, keys: Named(zip(keys, leaves, strict=True)),
    flatten_with_keys_fn=lambda x: ([(_pytree.MappingKey(k), v) for k, v in x.items()], tuple(x)),
)
_pytree.register_pytree_node(
    Opaque,
    lambda x: (list(x.held.values()), {"order": list(x.held)}),
    lambda leaves, context: Opaque(dict(zip(context["order"], leaves, strict=True))),
)
AROUND = {
    "deque": (lambda d: deque([d]), lambda t: t[0]),
    "dataclass": (Holder, lambda t: t.held),
    "UserDict": (UserDict, dict),
    "dict subclass": (type("Sub", (dict,), {}), dict),
    "registered": (Keyed, dict),
    "registered with paths": (Named, dict),
    "nested": (lambda d: [Keyed(x=deque([Holder(UserDict(d))]))], lambda t: t[0]["x"][0].held),
}


def test_dicts_in_different_order_inside_other_containers():
    def main(check):
        values = {"a": torch.ones(2), "b": torch.ones(2) * 10, 1: torch.ones(2) * 100}
        keys = ["a", "b", 1] if dist.get_rank() else ["b", 1, "a"]
        for name, (wrap, unwrap) in AROUND.items():
            for coalesced in COALESCED:
                result = coalesced(wrap({key: values[key] for key in keys}), check=check)
                want = coalesced(values)
                assert type(result) is type(wrap(values)), name
                assert list(unwrap(result)) == keys, name
                for key in keys:
                    assert torch.equal(unwrap(result)[key], want[key]), name
        return True

    assert run_ranks(main, 2, args=(False,)) == [True] * 2
    assert run_ranks(main, 2, backend="shm", args=(True,)) == [True] * 2


@on_ranks(2)
def test_containers_without_keys_are_compared_by_context():
    values = {"a": torch.ones(2), "b": torch.ones(2) * 10}
    result = C.all_reduce_coalesced(Opaque(values), check=False)
    for coalesced in COALESCED:
        keys = ["a", "b"] if dist.get_rank() else ["b", "a"]
        with pytest.raises(MismatchError, match=r"rank 0: .*'b', 'a'.*; rank 1: .*'a', 'b'"):
            coalesced([Opaque({key: values[key] for key in keys})], check=False)
    assert result.held["b"].tolist() == [20.0, 20.0]


def test_different_trees_of_equal_size_are_refused():
    def main(check):
        short, long = torch.ones(2), torch.ones(4)
        for first, second in (([short, long], [long, short]), ({"a": short}, {"b": short})):
            for coalesced in COALESCED:
                with pytest.raises(MismatchError) as caught:
                    coalesced(second if dist.get_rank() else first, check=check)
                assert "ranks disagree on detail: rank 0: " in str(caught.value)
        return C.all_reduce_coalesced([short])[0].tolist()

    assert run_ranks(main, 2, args=(True,)) == [[2.0, 2.0]] * 2
    assert run_ranks(main, 2, backend="shm", args=(None,)) == [[2.0, 2.0]] * 2


class Colour(Enum):
    RED = 1
    BLUE = 2


def test_keys_whose_text_or_order_depends_on_the_process():
    def main(check):
        rank = dist.get_rank()
        # sorted by their values, these would come in another order on each rank
        weights = [torch.nn.Parameter(torch.tensor([1.0 - 2 * rank])) for _ in range(2)]
        weights[1].data.zero_()
        other = [object(), len, torch.nn.Linear(1, 1), torch.device("cpu", rank), (rank < 0, None)]
        keys = [*weights, torch.nn.Parameter(torch.ones(2)), *other]
        colours = list(Colour)
        mixed = [frozenset("abc"), 1, "a", torch.float32, 2.5, (1, Colour.RED)]
        for some, back in ((keys, False), (colours, True), (mixed, True)):
            pairs = [(key, torch.full((2,), 10.0**i)) for i, key in enumerate(some)]
            tree = dict(reversed(pairs) if back and rank else pairs)
            result = C.all_reduce_coalesced(tree, check=check)
            for key, x in tree.items():
                assert torch.equal(result[key], 2 * x)
        return True

    assert run_ranks(main, 2, args=(True,)) == [True] * 2
    assert run_ranks(main, 2, backend="shm", args=(None,)) == [True] * 2


def test_trees_with_dtypes_at_different_leaves_are_refused():
    def main(check):
        x, n = torch.ones(2), torch.ones(2, dtype=torch.int64)
        tree = {"a": x, "b": n, "c": x} if dist.get_rank() else {"a": x, "b": x, "c": n}
        with pytest.raises(MismatchError, match=r"'b'\] \(2,\); rank 1: .*'c'"):
            C.all_reduce_coalesced(tree, check=check)
        long = {f"leaf{i}": torch.ones(i + 1) for i in range(10, 99)}
        long["leaf77"] = torch.ones(3 + dist.get_rank())
        long["leaf78"] = torch.ones(4 - dist.get_rank())
        with pytest.raises(MismatchError) as caught:
            C.all_reduce_coalesced(long, check=check)
        assert "['leaf77'] (3,)" in str(caught.value)
        assert "['leaf77'] (4,)" in str(caught.value)
        return len(str(caught.value)) < 800

    assert run_ranks(main, 2, args=(True,)) == [True] * 2
    assert run_ranks(main, 2, backend="shm", args=(None,)) == [True] * 2


@on_ranks(2)
def test_leaves_without_a_cotangent_have_zeros():
    xs = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    C.all_reduce_coalesced(xs)[1].sum().backward()
    with pytest.raises(ArgumentTypeError, match="leaf 1"):
        C.all_reduce_coalesced([xs[0], 3])
    assert [x.grad.tolist() for x in xs] == [[0.0] * 2, [2.0] * 3]


def test_objects_and_a_barrier_with_an_edge():
    def main():
        rank = dist.get_rank()
        sub = dist.new_group([1, 2])
        everything = C.all_gather_object({"rank": rank, "long": "x" * rank * 1000})
        some = C.all_gather_object(rank, group=sub) if rank else None
        assert C.barrier() is None
        x = torch.ones(1, requires_grad=True)
        C.barrier(x).mul(3).sum().backward()
        return [len(one["long"]) for one in everything], some, x.grad.item()

    lengths = [0, 1000, 2000]
    assert run_ranks(main, 3) == [
        (lengths, None, 3.0),
        (lengths, [1, 2], 3.0),
        (lengths, [1, 2], 3.0),
    ]


def test_halos_wider_than_one_slab_are_refused_on_all_ranks():
    def main():
        x = torch.ones(3 if dist.get_rank() == 0 else 1)
        with pytest.raises(ArgumentError, match="widths is 2: x has size 1 in dim 0 on rank 1"):
            C.halo_exchange(x, 2, check=True)
        return C.halo_exchange(x, 1, check=True).tolist()

    assert run_ranks(main, 2) == [[0.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
