"""Detection of parameters in a module that its reducer does not reduce.

Parameters that are added, replaced or thawed after wrapping would be trained on this rank only.
Comparing the module's parameters at each step would cost more than the step of a small model, so
PyTorch's registration hooks trigger the comparison.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from weakref import WeakValueDictionary

from torch import nn
from torch.nn import Parameter
from torch.nn.modules import module as torch_module

from gradwire.ddp.hook_handles import WeakHook, remove_hooks_with
from gradwire.errors import ArgumentError


class ParameterCheck:
    """Compares a module's parameters with those at construction, after new registrations.

    `torch.func.functional_call` registers nothing: tensors that it substitutes for parameters in
    one call are ignored.

    Args:
        module: Module to check.
        named: Names and parameters that are checked, including frozen ones.
        ignored: Names of parameters that are not checked.
    """

    def __init__(
        self, module: nn.Module, named: Sequence[tuple[str, Parameter]], ignored: Collection[str]
    ) -> None:
        self._module, self._ignored = module, ignored
        self._known = dict(named)
        self._frozen = [(n, p) for n, p in named if not p.requires_grad]
        self._modules = {id(child) for child in module.modules()}
        self._registered: WeakValueDictionary[int, Parameter] = WeakValueDictionary()
        of_parameter, of_module = WeakHook(self._on_parameter), WeakHook(self._on_module)
        handles = [
            torch_module.register_module_parameter_registration_hook(of_parameter),
            torch_module.register_module_module_registration_hook(of_module),
        ]
        remove_hooks_with(self, handles)

    def _on_parameter(self, module: nn.Module, name: str, parameter: Parameter | None) -> None:
        if parameter is not None and id(module) in self._modules:
            self._registered[id(parameter)] = parameter

    def _on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None and id(module) in self._modules:
            self._modules.update(id(inner) for inner in child.modules())
            self._registered.update((id(p), p) for p in child.parameters())

    def check(self) -> None:
        """Raise if there are parameters that would not be reduced.

        Raises:
            ArgumentError: Parameters were added, replaced or thawed; lists their names.
        """
        thawed = [n for n, p in self._frozen if p.requires_grad]
        new: list[str] = []
        if self._registered:
            named = [(n, p) for n, p in self._module.named_parameters() if n not in self._ignored]
            new = [n for n, p in named if self._known.get(n) is not p and id(p) in self._registered]
            for p in self._known.values():  # registered again
                self._registered.pop(id(p), None)
        if new or thawed:
            what = "added or replaced" if new else "frozen when the module was wrapped, and are not"
            raise ArgumentError(
                f"parameters {new or thawed} were {what}: their gradients would not be reduced. "
                "Call refit() on every rank, and add them to the optimizer"
            )
