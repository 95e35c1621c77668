"""Communication hooks: their interface, and the hooks that come with gradwire."""

from gradwire.hooks.averaging import SparseSum as SparseSum
from gradwire.hooks.averaging import all_reduce, bf16, compress, fp16, wrap
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.bucket import with_buffer as with_buffer
from gradwire.hooks.hosts import HostGroups, across_hosts, host_groups
from gradwire.hooks.interface import CommHook, StatefulHook
from gradwire.hooks.interface import DelegatingHook as DelegatingHook
from gradwire.hooks.interface import HookReturn as HookReturn
from gradwire.hooks.interface import after as after
from gradwire.hooks.interface import as_future as as_future
from gradwire.hooks.interface import bind_hook as bind_hook
from gradwire.hooks.interface import check_hook as check_hook
from gradwire.hooks.interface import group_from as group_from
from gradwire.hooks.interface import hook_name as hook_name
from gradwire.hooks.interface import is_mean_over as is_mean_over
from gradwire.hooks.interface import name_if_group as name_if_group
from gradwire.hooks.interface import parse_hook_result as parse_hook_result
from gradwire.hooks.interface import run_in_group as run_in_group
from gradwire.hooks.named import get_hook as get_hook
from gradwire.hooks.quantization import BlockQuantization

# Names imported as themselves are for other packages of gradwire, and not public.
__all__ = [
    "BlockQuantization",
    "CommHook",
    "GradBucket",
    "HostGroups",
    "StatefulHook",
    "across_hosts",
    "all_reduce",
    "bf16",
    "compress",
    "fp16",
    "host_groups",
    "wrap",
]
