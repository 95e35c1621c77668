"""Texts of all ranks, for error messages."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from gradwire.collectives.wire.ints import gather_ints

__all__ = ["gather_different", "gather_texts"]

_SHOWN = 200
_LONGEST = 1 << 16
"""Bytes that are sent of a text; each is an int on the wire."""


def gather_different(text: str, group: ProcessGroup) -> list[str]:
    """Each rank's text; of long ones what is around the first difference."""
    size = max(size for (size,) in gather_ints([len(text.encode())], group))
    texts = gather_texts(text, group, min(size, _LONGEST))
    columns = enumerate(zip(*texts, strict=False))
    same = next((i for i, column in columns if len({*column}) > 1), min(map(len, texts)))
    start = max(0, same - _SHOWN // 2) if max(map(len, texts)) > _SHOWN else 0
    return ["… " * (start > 0) + text[start : start + _SHOWN] for text in texts]


def gather_texts(text: str, group: ProcessGroup, size: int) -> list[str]:
    """Each rank's text, of which so many bytes are sent."""
    everyone = gather_ints(list(text.encode()[:size].ljust(size)), group)
    return [bytes(row).decode(errors="replace").rstrip() for row in everyone]
