"""Where dumps go, as programs and the environment say it."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from pathlib import Path

from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.recorder.black_box import OWNER, PREFIX, BlackBox

VARIABLE = "GRADWIRE_RECORDER"
_box: list[BlackBox] = []


def start(directory: str | os.PathLike[str], *, prefix: str = PREFIX) -> None:
    """Write this rank's dumps into a directory, on errors, SIGUSR2 and at the end.

    When one rank fails, all ranks write theirs within a second. The environment variable
    GRADWIRE_RECORDER does the same.

    Args:
        directory: Where all ranks write; made if there is none. Use a new one for each run.
        prefix: What the files' names begin with; the rank follows.

    Raises:
        ArgumentTypeError: `directory` is no path.
        ArgumentError: It was started before, with another directory.

    Example:
        >>> import tempfile
        >>> from gradwire import recorder
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     recorder.start(directory)
        ...     recorder.stop()
    """
    if not isinstance(directory, str | os.PathLike):
        raise ArgumentTypeError(f"directory is {directory!r}: pass a path")
    if _box:
        if _box[0].directory == Path(directory).absolute() and _box[0].prefix == prefix:
            return
        raise ArgumentError(
            f"directory is {str(directory)!r}, but the recorder writes to "
            f"{str(_box[0].directory)!r} already: call recorder.stop() first"
        )
    box = BlackBox(directory, prefix)
    box.start()
    _box.append(box)


def stop() -> None:
    """Write no more dumps; the ring goes on."""
    while _box:
        _box.pop().stop()


def dump(directory: str | os.PathLike[str] | None = None, *, prefix: str = PREFIX) -> Path:
    """Write this rank's dump now.

    Where collectives run on Gloo, it awaits for up to 0.2 s that they end.

    Args:
        directory: Where; that which `start` was given if None.
        prefix: What the file's name begins with.

    Returns:
        The file, `<directory>/<prefix><rank>`.

    Raises:
        ArgumentError: There is no directory, or this process is no rank.

    Example:
        >>> import tempfile
        >>> from gradwire import recorder
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     def main():
        ...         torch.distributed.all_reduce(torch.ones(3))
        ...         return recorder.dump(directory).name
        ...     run_ranks(main, world_size=2, backend="shm")
        ['rank_0', 'rank_1']
    """
    if directory is None and not _box:
        raise ArgumentError(
            f"directory is None and none was given before: pass one, call recorder.start, or set "
            f"{VARIABLE}"
        )
    box = _box[0] if directory is None else BlackBox(directory, prefix)
    path = box.write("call")
    if path is None:
        raise ArgumentError(
            "this process is no rank: call dump() after torch.distributed.init_process_group"
        )
    return path


def start_from_environment() -> None:
    """Start if GRADWIRE_RECORDER has a directory; "0" is none, as with the other variables."""
    directory = os.environ.get(VARIABLE, "0")
    if directory not in ("", "0") and not _box:
        if "RANK" in os.environ and multiprocessing.parent_process() is None:
            os.environ.setdefault(OWNER, str(os.getpid()))
        try:
            start(directory)
        except OSError as error:  # what is to explain failures is not to be one
            message = f"{VARIABLE} is {directory!r}, which cannot be written to: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
