"""Why some of PyTorch's tests need not pass with another class: one line each."""

from __future__ import annotations

PRIVATE = {
    "test_ddp_native_mixed_precision_ignored_params": "passes `mixed_precision`, which is refused: "
    "autocast, and the hook `bf16`",
    "test_ddp_logging_data_cpu": "counts the logger's samples and reads its environment fields",
    "test_ddp_profiling_torch_profiler": "looks for an event inside the C++ reducer, "
    "`search_unused_parameters`; the collectives' events, checked before, are there",
    "test_ddp_control_flow_same_across_ranks": "reads `reducer._get_local_used_map()`",
    "test_ddp_control_flow_different_across_ranks": "reads `reducer._get_local_used_map()`",
    "test_ddp_build_debug_param_to_name_mapping": "calls `_build_params_for_reducer` and "
    "`_build_debug_param_to_name_mapping`, private helpers",
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": "calls the same private helpers",
    "test_detect_ddp_is_actually_static": "reads `reducer._ddp_graph_static()`",
    "test_ddp_static_graph_nested_types": "wraps a wrapper: a parameter has one reducer",
    "test_ddp_hook_pickling_powerSGD": "loads a state_dict into a module without a hook: ours "
    "holds the hook's state, and asks for the hook first",
    "test_invalid_static_graph": "looks for the whole text of one of PyTorch's messages; both "
    "errors are raised, with its phrases in them and the parameters' names",
}
"""They pass with PyTorch's class and not with ours: most because they look into its insides."""
