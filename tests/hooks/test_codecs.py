"""Parts of compressing hooks in one process: codes, memories, chains of futures."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.hooks import BlockQuantization, all_reduce, compress
from gradwire.hooks.interface import chain
from gradwire.hooks.quantization import ParameterMemory
from gradwire.testing import FakeBucket

CPU = torch.device("cpu")
floats = st.floats(-1e6, 1e6, width=32)
CODECS = [
    BlockQuantization(8, block=16),
    BlockQuantization(4, block=16),
    BlockQuantization(4, block=16, stochastic=True),
]


def coded(hook, blocks):
    rest = blocks.clone()
    code = hook.encode(rest, hook.generator(0, 0, 0))
    assert code.dtype == torch.uint8
    found = hook.decode(code, blocks.dtype)
    finite = found.isfinite().all(1)
    torch.testing.assert_close((found + rest)[finite], blocks[finite])
    return found


@given(st.lists(st.lists(floats, min_size=16, max_size=16), min_size=1, max_size=3))
@settings(deadline=None, max_examples=30)
def test_integer_rounding_error_is_at_most_half_a_scale(rows):
    blocks = torch.tensor(rows)
    for hook in CODECS:
        scale = blocks.abs().amax(1, keepdim=True) / (127 if hook.bits == 8 else 7)
        off = (coded(hook, blocks) - blocks).abs()
        assert (off <= scale * (1.0 if hook.stochastic else 0.5) * 1.001 + 1e-37).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hook", CODECS)
def test_codes_of_zeros_tiny_and_not_finite_blocks(hook, dtype):
    blocks = torch.ones(5, 16, dtype=dtype)
    blocks[0] = 0
    blocks[1] = 1e-42
    blocks[2, 3] = float("nan")
    blocks[3, 3] = -float("inf")
    found = coded(hook, blocks)
    assert (found[0] == 0).all()
    assert found[1].abs().max() <= 1e-37
    assert not found[2:4].isfinite().any()
    torch.testing.assert_close(found[4], blocks[4])


def test_stochastic_rounding_is_unbiased_and_reproducible():
    hook = BlockQuantization(4, block=8, stochastic=True, seed=3)
    block = torch.tensor([[7.0, 0.3, -0.3, 2.5, 0, 1, -6.9, 0.01]])

    def rounded(step):
        code = hook.encode(block.clone(), hook.generator(0, step, 0))
        return hook.decode(code, torch.float32)

    found = torch.stack([rounded(step) for step in range(1000)])
    assert (found.mean(0) - block).abs().max() < 4 * 0.5 / 1000**0.5
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[1], rounded(1))
    assert hook.generator(0, 1, 2).initial_seed() != hook.generator(1, 0, 2).initial_seed()


@given(st.data())
@settings(deadline=None, max_examples=30)
def test_memories_follow_parameters_to_other_buckets(data):
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    names = [f"p{i}" for i in range(len(sizes))]
    memory, want = ParameterMemory(), {}
    for round_ in range(3):
        order = data.draw(st.permutations(range(len(sizes))))
        cut = data.draw(st.integers(0, len(sizes)))
        for part in (order[:cut], order[cut:]):
            if not part:
                continue
            bucket = FakeBucket(
                *[torch.zeros(sizes[i]) for i in part], names=[names[i] for i in part]
            )
            flat = memory.flat(bucket, torch.float32)
            for i, piece in zip(part, flat.split([sizes[i] for i in part]), strict=True):
                assert piece.tolist() == want.get(i, [0.0] * sizes[i])
            new = torch.rand(len(flat))
            memory.put(bucket, new)
            pieces = new.split([sizes[i] for i in part])
            want.update({i: p.tolist() for i, p in zip(part, pieces, strict=True)})
        if round_ == 1:
            again = ParameterMemory()
            again.load_state_dict(memory.state_dict())
            memory = again


def test_a_failed_chain_keeps_the_steps_that_have_not_run():
    first, held, alive = torch.futures.Future(), lambda value: value, []
    reference = weakref.ref(held)
    end = chain(CPU, first, held)
    del held

    def fail():
        first.set_exception(KeyError("out of luck"))
        alive.append(reference() is not None)

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert alive == [True]
    with pytest.raises(KeyError, match="out of luck"):
        end.wait()
    assert chain(CPU, 1).wait() == 1
    assert reference() is None


@pytest.mark.parametrize("fails", [False, True])
def test_a_finished_chain_holds_no_step(fails):
    """A backend's thread must not drop the last reference to a process group."""

    class Held:
        pass

    first, held, alive = torch.futures.Future(), Held(), []
    reference = weakref.ref(held)

    def step(value, held=held):
        return value

    def last(value, held=held):
        if fails:
            raise KeyError("out of luck")
        return value

    end = chain(CPU, first, step, last)
    end.add_done_callback(lambda done: alive.append(reference() is not None))
    del held, step, last
    assert reference() is not None
    first.set_result(1)
    assert alive == [False]
    if fails:
        with pytest.raises(KeyError, match="out of luck") as caught:
            end.wait()
        assert "in last" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: BlockQuantization(5), "bits is 5"),
        (lambda: BlockQuantization(block=12), "block is 12"),
        (lambda: BlockQuantization(block=0), "block is 0"),
        (lambda: BlockQuantization(start=-1), "start is -1"),
        (lambda: BlockQuantization(group=3), "group is 3"),
        (lambda: BlockQuantization().state.load_state_dict({"kept": 1}), "kept"),
        (lambda: compress(all_reduce, torch.int32), "int32"),
        (lambda: compress(3, torch.float16), "hook is 3"),
        (lambda: FakeBucket(torch.zeros(1), torch.zeros(1), names=["p"]), "names has 1 entries"),
    ],
)
def test_invalid_arguments(make, said):
    with pytest.raises((ValueError, TypeError), match=said):
        make()
