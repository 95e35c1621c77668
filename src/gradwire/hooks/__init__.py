"""Communication hooks: their interface, and the hooks that come with gradwire."""

from gradwire.hooks.averaging import SparseSum as SparseSum
from gradwire.hooks.averaging import all_reduce
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.bucket import with_buffer as with_buffer
from gradwire.hooks.compression import (
    BlockQuantization,
    Collective,
    Compressor,
    CompressorState,
    LowRank,
    Message,
    ParameterMemory,
    Reduction,
    Sign,
    TopK,
    Traffic,
    TwoPhase,
    Wire,
)
from gradwire.hooks.compression.compressor import as_real as as_real
from gradwire.hooks.hosts import AcrossHosts, HostGroups, across_hosts, host_groups
from gradwire.hooks.registry import COMPRESSING as COMPRESSING
from gradwire.hooks.registry import get_hook, noop
from gradwire.hooks.result import as_future, parse_hook_result
from gradwire.hooks.stateful import (
    CommHook,
    HookReturn,
    StatefulHook,
    bind_hook,
    check_hook,
    compose,
    hook_name,
)
from gradwire.hooks.stateful import DelegatingHook as DelegatingHook
from gradwire.hooks.stateful import group_from as group_from
from gradwire.hooks.stateful import name_if_group as name_if_group
from gradwire.hooks.stateful import run_in_group as run_in_group
from gradwire.hooks.wrapping import bf16, compress, fp16, wrap

# Names imported as themselves are for other packages of gradwire, and not public.
__all__ = [
    "AcrossHosts",
    "BlockQuantization",
    "Collective",
    "CommHook",
    "Compressor",
    "CompressorState",
    "GradBucket",
    "HookReturn",
    "HostGroups",
    "LowRank",
    "Message",
    "ParameterMemory",
    "Reduction",
    "Sign",
    "StatefulHook",
    "TopK",
    "Traffic",
    "TwoPhase",
    "Wire",
    "across_hosts",
    "all_reduce",
    "as_future",
    "bf16",
    "bind_hook",
    "check_hook",
    "compose",
    "compress",
    "fp16",
    "get_hook",
    "hook_name",
    "host_groups",
    "noop",
    "parse_hook_result",
    "wrap",
]
