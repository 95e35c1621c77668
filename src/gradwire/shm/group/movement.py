"""Operations of a group that move values: one to all, all to one, all to all."""

# torch's stubs give overloads and names that its own callers do not use on a backend
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)

from gradwire.shm.group.group import Group, check_root, kept
from gradwire.shm.group.record import UNOBSERVED
from gradwire.shm.memory.header import Call
from gradwire.shm.memory.tensors import (
    check_parts,
    check_results,
    check_transfer,
    checksum_of,
    equal_parts,
    flat_of,
    one_each,
    only,
    paired,
    row_counts,
    write_all_back,
)


class Movement:
    """Operations of a group that move values."""

    _group: Group

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions | None = None) -> Work:
        """Copy the root's tensors to every rank's, in one operation."""
        group, opts = self._group, opts or BroadcastOptions()
        root = check_root(opts.rootRank, group.size)
        check_results(tensors)  # on the root as well: a mistake on all ranks is an error on all
        filled = kept(tensors, opts)

        def job() -> None:
            flats = [flat_of(tensor) for tensor in filled]
            if len(flats) == 1:
                call = Call("broadcast", flats[0].dtype, flats[0].numel(), -1, root)
                group.state.broadcast(call, flats[0])
            else:
                group.state.broadcast_list(flats, root)
            if root != group.rank:
                write_all_back(filled, flats)

        observed = ("broadcast_", root, 0, [tensors])
        return group.submit(job, tensors, opts, observed, op="broadcast")

    def allgather(
        self,
        output_lists: list[list[Tensor]],
        inputs: list[Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        """Fill every rank's list with all ranks' tensors, whose sizes may differ.

        Several lists, with as many inputs, are gathered in one operation.
        """
        group, opts = self._group, opts or AllgatherOptions()
        for outputs, source in paired(output_lists, inputs):
            check_transfer([source], one_each(outputs, group.size, "tensor_list"))
        filled = [kept(outputs, opts) for outputs in output_lists]
        read = kept(inputs, opts)

        def job() -> None:
            for outputs, source in zip(filled, read, strict=True):
                flat, into = flat_of(source), [flat_of(output) for output in outputs]
                group.state.exchange_blocks("all_gather", [flat], into, base=flat, shared=True)
                write_all_back(outputs, into)

        everything = [output for outputs in output_lists for output in outputs]
        observed = ("allgather_", 0, 0, [everything, inputs])
        return group.submit(job, everything, opts, observed, op="all_gather", sources=inputs)

    allgather_coalesced = allgather

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: AllgatherOptions | None = None
    ) -> Work:
        """Run `allgather` into the equal parts of one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        """Run `all_gather_single` for several tensors in one operation."""
        group = self._group
        for output, source in paired(outputs, inputs):
            check_transfer([source], [output])
            check_parts(whole=output, part=source, size=group.size)
        checksum = checksum_of(inputs)

        def fill(results: list[Tensor], flats: list[Tensor]) -> None:
            for into, flat in zip(results, flats, strict=True):
                parts = equal_parts(into, group.size)
                call = Call("all_gather_single", flat.dtype, flat.numel(), checksum=checksum)
                group.state.exchange(call, [flat], parts, base=flat, shared=True)

        opts = opts or AllgatherOptions()
        observed = UNOBSERVED
        if len(outputs) == 1:
            observed = ("_allgather_base_", 0, 0, [outputs, inputs])
        return group.submit_into(outputs, fill, opts, "all_gather_single", inputs, observed)

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: GatherOptions | None = None
    ) -> Work:
        """Fill the root's list with all ranks' tensors, whose sizes may differ."""
        group, opts = self._group, opts or GatherOptions()
        root, source = check_root(opts.rootRank, group.size), only(inputs)
        into = one_each(only(outputs), group.size, "gather_list") if root == group.rank else []
        check_transfer([source], into)

        def fill(results: list[Tensor], flats: list[Tensor]) -> None:
            group.state.gather(root, only(flats), results)

        return group.submit_into(into, fill, opts, "gather", inputs)

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: ScatterOptions | None = None
    ) -> Work:
        """Fill every rank's tensor with its entry of the root's list, whose sizes may differ."""
        group, opts = self._group, opts or ScatterOptions()
        root, output = check_root(opts.rootRank, group.size), only(outputs)
        blocks = one_each(only(inputs), group.size, "scatter_list") if root == group.rank else []
        check_transfer(blocks, [output])

        def fill(results: list[Tensor], flats: list[Tensor]) -> None:
            group.state.scatter(root, flats, results[0])

        return group.submit_into(outputs, fill, opts, "scatter", blocks)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: AllToAllOptions | None = None
    ) -> Work:
        """Fill entry i of a rank's outputs with rank i's entry for it; sizes may differ."""
        group = self._group
        one_each(outputs, group.size, "output_tensor_list")
        check_transfer(one_each(inputs, group.size, "input_tensor_list"), outputs)

        def fill(results: list[Tensor], flats: list[Tensor]) -> None:
            group.state.exchange_blocks("all_to_all", flats, results)

        opts = opts or AllToAllOptions()
        return group.submit_into(outputs, fill, opts, "all_to_all", inputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: AllToAllOptions | None = None,
    ) -> Work:
        """Run `alltoall` between parts of two tensors, equal or of the given numbers of rows."""
        group = self._group
        check_transfer([input], [output])
        receives = row_counts(output, output_split_sizes, group.size, "output_split_sizes")
        sends = row_counts(input, input_split_sizes, group.size, "input_split_sizes")

        def fill(results: list[Tensor], flats: list[Tensor]) -> None:
            flat = only(flats)
            blocks, into = flat.split(sends), results[0].split(receives)
            group.state.exchange_blocks("all_to_all", blocks, into, base=flat)

        opts = opts or AllToAllOptions()
        observed = UNOBSERVED
        if len({*sends, *receives}) == 1:  # equal on all ranks
            observed = ("alltoall_base_", 0, 0, [[output], [input]])
        return group.submit_into([output], fill, opts, "all_to_all_single", [input], observed)

    def barrier(self, opts: BarrierOptions | None = None) -> Work:
        """Wait for every rank; the handle is done once all have called it."""
        group, opts = self._group, opts or BarrierOptions()
        return group.submit(group.state.barrier, [], opts, op="barrier")

    def monitored_barrier(
        self, opts: BarrierOptions | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when every rank has called it.

        Args:
            opts: Options, of which the timeout is used.
            wait_all_ranks: Ignored: the error always names all missing ranks.

        Raises:
            CollectiveTimeoutError: Ranks, named by the error, did not call it in time.
        """
        group, opts = self._group, opts or BarrierOptions()

        def job() -> None:
            group.state.barrier("monitored_barrier")

        group.submit(job, [], opts, op="barrier").wait()
