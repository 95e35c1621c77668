"""The mean over ranks in 8 or 4 bits per element, with error feedback.

With error feedback (Seide et al. 2014; Karimireddy et al., arXiv 1901.09847), a step adds the error
of earlier steps to each gradient, sends an approximation of the sum, and keeps the difference as
the new error. So all of a gradient arrives eventually.

Every rank encodes its gradients and sends one share of the codes to each rank (all_to_all). Each
rank decodes the codes of its share, sums them in rank order in floating point, encodes the mean and
sends it to all ranks (all_gather). Codes are never added to codes, so nothing overflows, and each
element is encoded twice for any number of ranks. All ranks decode the same bytes to the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire._groups import check_group, default_group
from gradwire.errors import ArgumentError
from gradwire.hooks.averaging import all_reduce
from gradwire.hooks.bucket import GradBucket, as_real
from gradwire.hooks.interface import HookReturn, PicklesGroups, StatefulHook, after, chain

CACHED = 1 << 18
"""Number of elements that are encoded or decoded at a time, so that they stay in a core's cache.

With 6 million elements at once, a step of int8 takes 1.5 times as long.
"""
LARGEST = {8: 127, 4: 7}
"""Largest integer of a code, by its number of bits. The smallest is its negative."""


class BlockQuantization(StatefulHook["QuantizationState"]):
    """Average in 8 or 4 bits per element, quantized in blocks with one scale each.

    A block's largest magnitude is encoded as the largest integer. Ranks exchange codes by
    all_to_all, sum in float32, encode again, and all_gather. The rounding error is kept for the
    next step. A NaN or an infinity makes its whole block NaN or infinite on every rank; the errors
    of that step are then not kept.

    Integer and sparse gradients are averaged without compression; complex gradients are reduced as
    pairs of reals. On one rank gradients do not change. The error is kept in float32 for float16
    and bfloat16 gradients, one float for each element of a parameter.

    Args:
        bits: Number of bits, 8 or 4.
        block: Number of elements that share a scale, a multiple of 8.
        stochastic: True for unbiased stochastic rounding, False for rounding to nearest.
        seed: Seed from which the random numbers of each rank, step and bucket are derived.
        group: Process group; None for the group of the module that the hook is registered for.
        start: Number of first steps without compression.

    Raises:
        ArgumentError: `bits` is not 8 or 4, `block` is not a multiple of 8, or `start` is negative.

    Example:
        >>> from gradwire.ddp import DistributedDataParallel
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     net = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ...     net.register_comm_hook(None, BlockQuantization(8))
        ...     net(torch.tensor([[1.0 + dist.get_rank()]])).sum().backward()
        ...     return net.module.weight.grad.item()
        >>> run_ranks(main, world_size=2)  # (1 + 2) / 2
        [1.5, 1.5]

    Source:
        qgZ of ZeRO++, G. Wang et al., arXiv 2306.10209; stochastic rounding of QSGD, D. Alistarh et
        al., arXiv 1610.02132.
    """

    averages = True

    def __init__(
        self,
        bits: int = 8,
        *,
        block: int = 256,
        stochastic: bool = False,
        seed: int = 0,
        group: ProcessGroup | None = None,
        start: int = 0,
    ) -> None:
        if bits not in LARGEST:
            raise ArgumentError(f"bits is {bits}: pass 8 or 4")
        if block < 8 or block % 8:
            raise ArgumentError(f"block is {block}: pass a multiple of 8, such as 256")
        if start < 0:
            raise ArgumentError(f"start is {start}: pass a number of steps, at least 0")
        super().__init__(QuantizationState(None if group is None else check_group(group)))
        self.bits, self.block, self.start = bits, block, start
        self.stochastic, self.seed = stochastic, seed

    def run_hook(self, bucket: GradBucket) -> HookReturn:
        """Encode, all_to_all, average, encode, all_gather."""
        group = self.state.process_group or default_group("group")
        buffer = bucket.buffer()
        if group.size() == 1:
            return buffer
        dense = buffer.layout == torch.strided and len(buffer) > 0
        if (
            self.state.step < self.start
            or not dense
            or not (buffer.is_floating_point() or buffer.is_complex())
        ):
            return all_reduce(group, bucket)
        state, real, rank, size = self.state, as_real(bucket), group.rank(), group.size()
        result, block = real.buffer(), self.block
        # The sum of gradient and error: the tensor that is approximated, and becomes the error.
        dtype = torch.float64 if result.dtype == torch.float64 else torch.float32
        sent = state.errors.plus(real, dtype)
        share = -(-sent.numel() // (size * block))  # number of blocks
        generator = self.generator(rank, state.step, bucket.index())
        code = torch.cat(
            [
                self._encode_part(sent[lo * block : hi * block], hi - lo, generator)
                for lo, hi in self._parts(share * size, sent)
            ]
        )

        def mean_of_share(received: Tensor) -> torch._C.Future[Tensor]:
            rows, first, own = received.view(size, share, -1), rank * share, []
            for lo, hi in self._parts(share, sent):
                mean = self.decode(rows[0, lo:hi], dtype)
                for row in rows[1:]:
                    mean += self.decode(row[lo:hi], dtype)
                own.append(self.encode(mean.div_(size), generator))
                # This rank adds the rounding error of the encoded mean, times the number of ranks,
                # to its own error, so that it arrives in the next mean.
                error = sent[(first + lo) * block : (first + hi) * block]
                error.add_(mean.view(-1)[: len(error)], alpha=size)
            return _all_gather(torch.cat(own), group)

        def finish(shares: Tensor) -> Tensor:
            rows = shares.view(size * share, -1)
            for lo, hi in self._parts(size * share, sent):
                error = sent[lo * block : hi * block]
                mean = self.decode(rows[lo:hi], dtype).view(-1)[: len(error)]
                into = result[lo * block : lo * block + len(error)]
                into.copy_(mean)
                if into.dtype != dtype:  # on every rank, the rounding error of the bucket's dtype
                    error += mean - into
            # A result that is not finite is so on all ranks. Such a step is usually skipped, and a
            # NaN in the error would never leave it.
            if _is_finite(result):
                state.errors.put(real, sent)
            return buffer

        return chain(sent.device, _all_to_all(code.view(size, -1), group), mean_of_share, finish)

    def committed(self) -> None:
        """Count the step."""
        self.state.step += 1

    def generator(self, rank: int, step: int, bucket: int) -> torch.Generator | None:
        """Return a generator seeded by the arguments only, so that a resumed run rounds alike."""
        if not self.stochastic:
            return None
        mixed = hashlib.blake2b(f"{self.seed} {rank} {step} {bucket}".encode(), digest_size=7)
        return torch.Generator().manual_seed(int.from_bytes(mixed.digest(), "little"))

    def encode(self, blocks: Tensor, generator: torch.Generator | None) -> Tensor:
        """Encode blocks as integers, followed by their scale; leave the rounding error in them."""
        largest = LARGEST[self.bits]
        # faster than one reduction of magnitudes, which would be written to memory first
        highest, lowest = blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True)
        scales = torch.maximum(highest, lowest.neg_()).div_(largest)
        # avoids division by zero for a block of zeros; NaN stays NaN
        scales.clamp_min_(torch.finfo(blocks.dtype).tiny)
        integers = blocks / scales
        if generator is None:
            integers.round_()
        else:
            noise = torch.rand(blocks.shape, dtype=blocks.dtype, generator=generator)
            # the quotient may exceed the largest integer by a rounding error
            integers.add_(noise.to(blocks.device)).floor_().clamp_(-largest, largest)
        blocks.addcmul_(integers, scales, value=-1)
        # the integer for NaN is undefined, but the block's scale is then NaN, too
        codes = integers.to(torch.int8)
        if self.bits == 4:  # two integers from -7 to 7 in each byte, the first in the lower half
            pairs = (codes + 8).view(torch.int16)
            codes = pairs | (pairs >> 4)
        packed = codes.view(torch.uint8) if self.bits == 8 else codes.to(torch.uint8)
        return torch.cat((packed, scales.view(torch.uint8)), 1)

    def decode(self, code: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode (n, b) bytes as (n, block) integers times their block's scale."""
        split = self.block * self.bits // 8
        scales = _values_in(code[:, split:], dtype)
        if self.bits == 8:
            return _values_in(code[:, :split], torch.int8).to(dtype).mul_(scales)
        byte = torch.arange(256, dtype=torch.int64, device=code.device)
        pairs = torch.stack(((byte & 15) - 8, (byte >> 4) - 8), 1).to(dtype)
        return _looked_up(pairs, code[:, :split]).mul_(scales)

    def _parts(self, blocks: int, like: Tensor) -> list[tuple[int, int]]:
        """Divide blocks into ranges that stay in a core's cache from one op to the next."""
        step = max(1, CACHED // self.block) if like.device.type == "cpu" else blocks
        return [(lo, min(lo + step, blocks)) for lo in range(0, blocks, step)]

    def _encode_part(self, part: Tensor, blocks: int, generator: torch.Generator | None) -> Tensor:
        """Encode a part, padded with zeros to whole blocks, and leave the rounding error in it."""
        if len(part) == blocks * self.block:
            return self.encode(part.view(blocks, -1), generator)
        filled = part.new_zeros(blocks, self.block)
        filled.view(-1)[: len(part)] = part
        code = self.encode(filled, generator)
        part.copy_(filled.view(-1)[: len(part)])
        return code


class QuantizationState(PicklesGroups):
    """State of a hook of one module, on this rank: the errors differ between ranks."""

    depends_on_buckets = True
    """True: the bits of later steps depend on which parameters share a bucket. Loading the state
    therefore restores the buckets of the saved run, so that a resumed run repeats an uninterrupted
    one."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.process_group = group
        self.step = 0  # number of reduced backward passes
        self.errors = ParameterMemory()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "errors": self.errors.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        if saved.keys() != {"step", "errors"}:
            raise ArgumentError(
                f"the saved state has {', '.join(sorted(saved))}, BlockQuantization's has errors "
                "and step: register the hook that was saved"
            )
        self.step = saved["step"]
        self.errors.load_state_dict(saved["errors"])


class ParameterMemory:
    """Tensors by parameter, kept flat in the order of the buckets that use them."""

    def __init__(self) -> None:
        # By the parameters' names, so that tensors follow their parameters to other buckets:
        # buckets are assigned again after the first backward pass, and when the model changes.
        self._parts: dict[str, Tensor] = {}
        self._flats: dict[tuple[str, ...], Tensor] = {}
        self._spares: dict[tuple[str, ...], Tensor] = {}

    def flat(self, bucket: GradBucket, dtype: torch.dtype) -> Tensor:
        """Return the kept tensor of a bucket's parameters, not a copy; zero where none is kept."""
        buffer, names = bucket.buffer(), tuple(bucket.names())
        kept = self._flats.get(names)
        if kept is not None and _is_like(kept, buffer, dtype):
            return kept
        made = buffer.new_zeros(buffer.numel(), dtype=dtype)
        at = 0
        for name, parameter in zip(names, bucket.parameters(), strict=True):
            part, count = self._parts.get(name), parameter.numel()
            if part is not None and part.numel() == count:
                made[at : at + count] = part
            at += count
        self.put(bucket, made)
        return made

    def plus(self, bucket: GradBucket, dtype: torch.dtype) -> Tensor:
        """Return the kept tensor plus the bucket's buffer, in memory that may go to `put`."""
        kept = self.flat(bucket, dtype)
        # the page faults of new memory take as long as three sums
        spare = self._spares.pop(tuple(bucket.names()), None)
        if spare is None or not _is_like(spare, bucket.buffer(), dtype):
            spare = torch.empty_like(kept)
        return torch.add(kept, bucket.buffer(), out=spare)

    def put(self, bucket: GradBucket, flat: Tensor) -> None:
        """Keep a tensor for a bucket's parameters, without a copy: ownership is transferred."""
        names = tuple(bucket.names())
        if names not in self._flats:
            stale = [key for key in self._flats if not set(names).isdisjoint(key)]
            for key in stale:
                del self._flats[key]
                self._spares.pop(key, None)
        elif self._flats[names] is not flat:
            self._spares[names] = self._flats[names]
        self._flats[names] = flat
        sizes = [p.numel() for p in bucket.parameters()]
        parts = flat[: sum(sizes)].split(sizes)
        self._parts.update(zip(names, parts, strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        return {name: part.clone() for name, part in self._parts.items()}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        self._flats.clear()
        self._spares.clear()
        self._parts = {name: part.clone().view(-1) for name, part in saved.items()}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_spares": {}}


def _is_like(kept: Tensor, buffer: Tensor, dtype: torch.dtype) -> bool:
    return (kept.numel(), kept.dtype, kept.device) == (buffer.numel(), dtype, buffer.device)


def _is_finite(tensor: Tensor) -> bool:
    """Return True if all elements are finite, in one pass: a twentieth of isfinite's time."""
    total = tensor.sum(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    # the sum of finite elements may overflow
    return bool(total.isfinite()) or all(bool(t.isfinite()) for t in tensor.aminmax())


def _all_to_all(rows: Tensor, group: ProcessGroup) -> torch._C.Future[Tensor]:
    """Send row i to rank i; return a future of the received rows, in rank order."""
    received = torch.empty_like(rows)
    work = dist.all_to_all_single(received, rows, group=group, async_op=True)
    return after(work, lambda: received, received.device)


def _all_gather(own: Tensor, group: ProcessGroup) -> torch._C.Future[Tensor]:
    """Return a future of all ranks' tensors, of shape (W, *own.shape)."""
    received = own.new_empty(group.size(), *own.shape)
    work = dist.all_gather(list(received.unbind()), own, group=group, async_op=True)
    return after(work, lambda: received, received.device)


def _values_in(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret (n, b) bytes, columns of a larger tensor, in a dtype: (n, b / itemsize)."""
    # always a copy: a single row is contiguous even if its offset is not aligned to the dtype
    return columns.clone(memory_format=torch.contiguous_format).view(dtype)


def _looked_up(table: Tensor, columns: Tensor) -> Tensor:
    """Replace each of (n, b) bytes by its row of a table of 256: (n, b * row length)."""
    index = columns.reshape(-1).int()
    if table[0].nbytes == 8:  # as one int64: half the time of selecting rows of two
        found = table.view(torch.int64).view(-1).index_select(0, index).view(table.dtype)
    else:
        found = table.index_select(0, index)
    return found.view(len(columns), -1)
