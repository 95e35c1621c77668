"""What programs call on objects that they take for PyTorch's class, by PyTorch's own names.

`isinstance` says that they are such, with and without `gradwire.compat`: these names are therefore
here and not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from gradwire.ddp.reducer.reducer import Reducer

__all__ = ["ModuleNames", "ReducerNames"]

DEFAULT_CAP = 25 << 20
SMALLEST_PIECE = 1 << 20


class ReducerNames:
    """The part of Reducer that PyTorch's own is called by."""

    def prepare(self) -> None:
        """See Reducer."""
        raise NotImplementedError

    def expect(self, outputs: Iterable[Tensor]) -> None:
        """See Reducer."""
        raise NotImplementedError

    def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
        """Expect a backward, which begins at these tensors: of a loss, or a forward's outputs.

        Programs call it where several forwards under `no_sync` have one backward that is reduced,
        and where one forward has several backwards.
        """
        self.prepare()
        self.expect(outputs)

    def _rebuild_buckets(self) -> bool:
        """Of no effect, and False: `prepare` rebuilds them."""
        return False

    def _delay_all_reduce(self) -> None:
        """Of no effect: the first backward of a static graph is reduced at its end in any case."""


class ModuleNames(nn.Module):
    """The part of DistributedDataParallel that PyTorch's own is asked for."""

    reducer: Reducer
    _reducer_options: dict[str, Any]

    @property
    def bucket_bytes_cap(self) -> int:
        """Bytes in a bucket, at least 1 MiB: torch.compile cuts graphs into pieces of that many.

        It takes no fewer.
        """
        caps: list[int] | None = self._reducer_options["caps"]
        return max(DEFAULT_CAP if caps is None else caps[-1], SMALLEST_PIECE)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.rebuilt
