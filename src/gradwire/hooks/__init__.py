"""Communication hooks: what they receive, what they are, and those that come with gradwire."""

from gradwire.hooks.across_hosts import AcrossHosts, across_hosts
from gradwire.hooks.auto import Auto, auto, measure_cluster
from gradwire.hooks.averaging import all_reduce
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.cast import bf16, compress, fp16
from gradwire.hooks.compression import (
    BlockQuantization,
    Compressor,
    CompressorState,
    LowRank,
    ParameterMemory,
    Reduction,
    Sign,
    TopK,
    Traffic,
    TwoPhase,
    Wire,
)
from gradwire.hooks.host_groups import HostGroups, host_groups
from gradwire.hooks.protocol import CommHook, HookReturn, check_hook, hook_name
from gradwire.hooks.registry import get_hook, noop
from gradwire.hooks.result import as_future, parse_hook_result
from gradwire.hooks.stateful import StatefulHook, bind_hook, compose
from gradwire.hooks.wrapping import wrap

__all__ = [
    "AcrossHosts",
    "Auto",
    "BlockQuantization",
    "CommHook",
    "Compressor",
    "CompressorState",
    "GradBucket",
    "HookReturn",
    "HostGroups",
    "LowRank",
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
    "auto",
    "bf16",
    "bind_hook",
    "check_hook",
    "compose",
    "compress",
    "fp16",
    "get_hook",
    "hook_name",
    "host_groups",
    "measure_cluster",
    "noop",
    "parse_hook_result",
    "wrap",
]
