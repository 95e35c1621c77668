"""What a communication hook receives (`GradBucket`) and is (`CommHook`, `StatefulHook`)."""

from gradwire.gradients.bucket import GradBucket
from gradwire.gradients.hook import CommHook, HookReturn, check_hook, name_of
from gradwire.gradients.result import as_future, parse_hook_result
from gradwire.gradients.stateful import StatefulHook, bind_hook, compose

__all__ = [
    "CommHook",
    "GradBucket",
    "HookReturn",
    "StatefulHook",
    "as_future",
    "bind_hook",
    "check_hook",
    "compose",
    "name_of",
    "parse_hook_result",
]
