"""One bucket through a hook, waited for; a backend's error becomes gradwire's."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire._engine_errors import backend_failure, is_over, is_transport
from gradwire.ddp.group import timeout_of
from gradwire.errors import DistributedError, HookError
from gradwire.hooks import GradBucket, StatefulHook, as_future, hook_name, parse_hook_result

__all__ = ["reduce_bucket"]


def reduce_bucket(hook: StatefulHook[Any], bucket: GradBucket, group: ProcessGroup) -> Tensor:
    """What the hook makes of a bucket.

    Raises:
        PeerLostError, CollectiveTimeoutError: Another rank is gone, or stayed away.
        HookError: The hook failed in another way.
    """
    since = time.monotonic()
    try:
        result = as_future(hook.run_hook(bucket), hook).wait()
        return parse_hook_result(result, bucket, hook)
    except DistributedError:
        raise
    except Exception as error:
        what = f"hook {hook_name(hook)}, bucket {bucket.index()}"
        if not is_transport(error):
            raise HookError(f"{what}: {type(error).__name__}: {error}") from error
        timed_out = is_over(since, timeout_of(group))
        raise backend_failure(error, what, timed_out=timed_out) from error
