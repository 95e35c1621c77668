"""What a communication hook receives (`GradBucket`) and is (`CommHook`)."""

from gradwire.gradients.bucket import GradBucket
from gradwire.gradients.hook import (
    CommHook,
    HookReturn,
    as_future,
    check_hook,
    name_of,
    parse_hook_result,
)

__all__ = [
    "CommHook",
    "GradBucket",
    "HookReturn",
    "as_future",
    "check_hook",
    "name_of",
    "parse_hook_result",
]
