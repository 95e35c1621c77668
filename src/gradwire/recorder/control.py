"""Start, stop and dump, by function calls or the environment."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from pathlib import Path

from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.recorder.black_box import OWNER, BlackBox
from gradwire.recorder.files import PREFIX

VARIABLE = "GRADWIRE_RECORDER"
_box: list[BlackBox] = []


def start(directory: str | os.PathLike[str], *, prefix: str = PREFIX) -> None:
    """Start writing this rank's dumps on errors, on SIGUSR2 and at the end of the process.

    When a rank fails, all ranks write dumps within a second. The environment variable
    GRADWIRE_RECORDER has the same effect.

    Args:
        directory: Directory that all ranks write to; created if missing. Use a new one per run.
        prefix: Prefix of file names, followed by the rank.

    Raises:
        ArgumentTypeError: `directory` is not a path.
        ArgumentError: The recorder was already started with another directory.

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
    if "RANK" in os.environ and multiprocessing.parent_process() is None:
        os.environ.setdefault(OWNER, str(os.getpid()))
    box = BlackBox(directory, prefix)
    box.start()
    _box.append(box)


def stop() -> None:
    """Stop writing dumps; collectives are still recorded."""
    while _box:
        _box.pop().stop()


def dump(directory: str | os.PathLike[str] | None = None, *, prefix: str = PREFIX) -> Path:
    """Write this rank's dump now.

    On Gloo, this waits up to 0.2 s for collectives to end.

    Args:
        directory: Directory of the dump. Default: the directory passed to `start`.
        prefix: Prefix of the file name.

    Returns:
        Path of the dump, `<directory>/<prefix><rank>`.

    Raises:
        ArgumentError: No directory was given, or this process has no rank.

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
            f"directory is None and the recorder was not started: pass a directory, call "
            f"recorder.start, or set {VARIABLE}"
        )
    box = _box[0] if directory is None else BlackBox(directory, prefix)
    path = box.write("call")
    if path is None:
        raise ArgumentError(
            "this process has no rank: call dump() after torch.distributed.init_process_group"
        )
    return path


def start_from_environment() -> None:
    """Start if GRADWIRE_RECORDER contains a directory; "0" disables it like the other variables."""
    directory = os.environ.get(VARIABLE, "0")
    if directory not in ("", "0") and not _box:
        try:
            start(directory)
        except OSError as error:  # diagnosis must not stop the program
            message = f"{VARIABLE} is {directory!r}, which cannot be written to: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
