"""Auto: a hook that measures a few steps, then chooses the hook for each bucket."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire._groups import check_group, default_group
from gradwire.errors import ArgumentError
from gradwire.hooks import (
    Compressor,
    GradBucket,
    HookReturn,
    StatefulHook,
    all_reduce,
    group_from,
    name_if_group,
)
from gradwire.tuning.candidates import (
    PLAIN,
    Candidate,
    Computing,
    candidate,
    interpolated,
    largest_of,
)
from gradwire.tuning.cost_model import Choice, Cost, choose, end_of_step, undisturbed
from gradwire.tuning.measure import measure_cluster
from gradwire.tuning.meter import agree_on_largest
from gradwire.tuning.trial import TRY_GAIN, Names, Trial, contenders


class AutoState:
    """State of an `Auto` hook: the choice, and the states of the hooks.

    Attributes:
        process_group: Process group; None for the default group.
        step: Number of reduced backward passes.
        choices: Hook of each bucket, by the names of its parameters; empty before the choice.
        choice: Prediction that led to the choices; None if the choice was made in another process.
        settling: True if the next step is the first with these choices. The errors that
            other hooks kept during a trial are added to its gradients.
        hooks: Candidate hooks, by name.
    """

    depends_on_buckets = True

    def __init__(self, group: ProcessGroup | None, hooks: Mapping[str, StatefulHook[Any]]) -> None:
        self.process_group, self.hooks = group, dict(hooks)
        self.step = 0
        self.choices: dict[tuple[str, ...], str] = {}
        self.choice: Choice | None = None
        self.settling = False

    def state_dict(self) -> dict[str, Any]:
        """Return choices and hook states. A choice that is on trial is saved as final."""
        kept = {n: h.state.state_dict() for n, h in self.hooks.items() if isinstance(h, Compressor)}
        choices = [[list(names), chosen] for names, chosen in self.choices.items()]
        return {"step": self.step, "choices": choices, "hooks": kept}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned. Nothing is measured again.

        Raises:
            ArgumentError: Other hooks were allowed when the state was saved.
        """
        own = {n: h for n, h in self.hooks.items() if isinstance(h, Compressor)}
        if saved["hooks"].keys() != own.keys():
            raise ArgumentError(
                f"the saved state is of auto with {sorted(saved['hooks'])}, this hook has "
                f"{sorted(own)}: allow the same hooks"
            )
        self.step = saved["step"]
        self.choices = {tuple(names): chosen for names, chosen in saved["choices"]}
        self.settling = bool(self.choices)  # the state may have been saved during a trial
        for name, hook in own.items():
            hook.state.load_state_dict(saved["hooks"][name])

    def __getstate__(self) -> dict[str, Any]:
        return {name: name_if_group(value) for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: group_from(value) for name, value in state.items()})
        self.settling = bool(self.choices)  # a copy does not continue the trial


logger = logging.getLogger(__name__)

MEASURED_STEPS = 3
"""Number of steps without a hook that are measured. Buckets are assigned again after the first."""


@dataclass
class _Seen:
    """Bucket of the measured steps, and the seconds from the step's first bucket to its launch."""

    names: tuple[str, ...]
    parameters: Sequence[Tensor]
    launched: float


class Auto(StatefulHook[AutoState]):
    """Hook returned by `auto`.

    Attributes:
        withdrawn: True if no hook gains enough for any bucket. The mean is then computed without a
            hook.
    """

    averages = True

    def __init__(self, candidates: Sequence[Candidate], group: ProcessGroup | None) -> None:
        self._candidates = {c.name: c for c in candidates}
        super().__init__(AutoState(group, {c.name: c.hook for c in candidates}))
        self._looked = 0  # measured steps
        self._seen: list[_Seen] = []
        self._last: list[_Seen] = []
        self._trial: Trial | None = None
        self._indices: dict[tuple[str, ...], int] = {}  # of buckets, by parameter names, in a trial
        self._packing = 0.0
        self._index = sys.maxsize  # of the previous bucket in this step
        self._step_began = self._step_ended = self._step_seconds = 0.0

    def __getstate__(self) -> dict[str, Any]:
        # without references to parameters, which would be copied; a copy measures again
        return super().__getstate__() | {
            "_looked": 0,
            "_seen": [],
            "_last": [],
            "_trial": None,
            "_indices": {},
            "_index": sys.maxsize,
        }

    @property
    def settled(self) -> bool:
        """Return True if the choice is final."""
        return bool(self.state.choices) and self._trial is None

    def run_hook(self, bucket: GradBucket) -> HookReturn:
        """Run the hook chosen for the bucket, or an all_reduce before the choice."""
        state = self.state
        group = self._group()
        names = tuple(bucket.names())
        if state.choices and names not in state.choices:
            self._start_over()
        if bucket.index() <= self._index:  # True also if the previous step failed midway
            self._begin_step()
        self._index = bucket.index()
        if not state.choices:
            launched = perf_counter() - self._step_began
            self._seen.append(_Seen(names, bucket.parameters(), launched))
        chosen = state.choices.get(names, PLAIN)
        if self._trial is not None:
            chosen = self._trial.current[self._indices[names]]
        elif state.settling:
            self._release(bucket, chosen)
        self.single_collective = self._candidates[chosen].single
        if chosen == PLAIN:
            return all_reduce(group, bucket)
        return self._run(chosen, group, bucket)

    def _begin_step(self) -> None:
        """Start the clock of a step at its first bucket."""
        self._seen = []
        self._step_began = perf_counter()

    def committed(self) -> None:
        """Count the step, measure its time since the end of the previous one, and choose if due.

        The choice is not made at the next step's first bucket: a rank that fails before that bucket
        would not take part in the measurement, and the others would wait for it.
        """
        now = perf_counter()
        self._step_seconds, self._step_ended = now - self._step_ended, now
        self._index = sys.maxsize
        self.state.step += 1
        if self._trial is not None:
            self._trial.add(self._step_seconds)
            if self._trial.is_over:
                self._conclude(self._group(), self._trial)
        elif self.state.settling:  # the other hooks' errors were added to this step's gradients
            self.state.settling = False
            self.withdrawn = set(self.state.choices.values()) == {PLAIN}
        elif not self.state.choices:
            self._look()

    def _group(self) -> ProcessGroup:
        return self.state.process_group or default_group("group")

    def _look(self) -> None:
        """Record a measured step; after the last one, choose."""
        if not self._seen:  # under AcrossHosts, only one rank of each host runs the hook
            return
        self._looked += 1
        same = [s.names for s in self._last] == [s.names for s in self._seen]
        if same:  # the minimum is the least disturbed
            for seen, before in zip(self._seen, self._last, strict=True):
                seen.launched = min(seen.launched, before.launched)
        self._last = self._seen
        if self._looked >= MEASURED_STEPS:
            self._decide(self._group())
            self._step_ended = perf_counter()  # excludes the measurement

    def _conclude(self, group: ProcessGroup, trial: Trial) -> None:
        """Choose the fastest contender of the trial."""
        best, seconds = trial.fastest(group, self._packing)
        logger.info("auto: final choice %s; seconds per step: %s", best, seconds)
        self._trial = None
        self._settle(best)

    def _settle(self, chosen: Names) -> None:
        """Use a choice from the next step on."""
        self.state.choices = {names: chosen[index] for names, index in self._indices.items()}
        self.state.settling = True

    def _release(self, bucket: GradBucket, chosen: str) -> None:
        """Add the errors of the hooks that were not chosen to a bucket's gradients."""
        for name, other in self._candidates.items():
            if name != chosen and isinstance(other.hook, Compressor):
                other.hook.release(bucket)

    def _run(self, chosen: str, group: ProcessGroup, bucket: GradBucket) -> HookReturn:
        hook = self._candidates[chosen].hook
        if isinstance(hook, Compressor):
            hook.state.process_group = group
            hook.state.step = self.state.step
        else:
            hook.state = group
        return hook.run_hook(bucket)

    def _start_over(self) -> None:
        """Discard the choice, because the module's buckets have changed."""
        self.state.choices, self.state.choice = {}, None
        self._looked, self._seen, self._last, self._trial = 0, [], [], None
        self._index = sys.maxsize

    def _decide(self, group: ProcessGroup) -> None:
        """Measure and choose, on all ranks after the same step."""
        plain = (PLAIN,) * len(self._last)
        choice, close = Choice(plain, 0.0, 0.0), [plain]
        if group.size() > 1:
            choice, close = self._choose(group)
        logger.info("auto: predicted choice %s, %d contenders", choice, len(close))
        self.state.choice = choice
        self._indices = {seen.names: index for index, seen in enumerate(self._last)}
        self._last = []
        self._settle(choice.names)
        # the same on all ranks, because it depends on agreed numbers only
        if len(close) > 1:
            self._trial = Trial(close)

    def _choose(self, group: ProcessGroup) -> tuple[Choice, list[Names]]:
        """Return the predicted choice and the contenders, the same on all ranks."""
        world, buckets = group.size(), [seen.parameters for seen in self._last]
        candidates = list(self._candidates.values())
        cluster = measure_cluster(group, largest_of(candidates, buckets, world), thorough=False)
        own = measured(candidates, buckets, world)
        numbers = [self._step_seconds, *(seen.launched for seen in self._last)]
        for of_hook in own.values():
            numbers += [number for c in of_hook for number in (c.before, c.after)]
        # all ranks use the largest measured values
        agreed = iter(agree_on_largest(group, numbers))
        step = next(agreed)
        launched = list(accumulate((next(agreed) for _ in buckets), max))
        computing = {
            name: [Computing(next(agreed), next(agreed)) for _ in of_hook]
            for name, of_hook in own.items()
        }
        packing = [c.before for c in computing[PLAIN]]
        self._packing = sum(packing)
        costs = {
            name: candidate.costs(buckets, computing[name], packing, world)
            for name, candidate in self._candidates.items()
        }
        # the measured steps had a hook, and so packed their buckets
        sent = [
            Cost(packs, c.messages, single=True)
            for packs, c in zip(packing, costs[PLAIN], strict=True)
        ]
        ready = undisturbed(launched, sent, cluster)
        # forward and update, which do not depend on the choice
        beside = max(0.0, step - end_of_step(ready, sent, cluster))
        choice = choose(ready, costs, cluster, min_gain=TRY_GAIN * step, idle=beside)
        return choice, contenders(choice, ready, costs, cluster, beside)


def measured(
    candidates: Sequence[Candidate], buckets: Sequence[Sequence[Tensor]], world: int
) -> dict[str, list[Computing]]:
    """Return each candidate's computing time for each bucket.

    It is measured for the smallest and the largest bucket, and interpolated for the others.
    """
    sizes = [sum(p.numel() for p in parameters) for parameters in buckets]
    chosen = dict.fromkeys((sizes.index(min(sizes)), sizes.index(max(sizes))))
    found = {}
    with torch.no_grad():
        for c in candidates:
            points = [(sizes[i], c.measure(buckets[i], world, parts=1)) for i in chosen]
            found[c.name] = [interpolated(points, size) for size in sizes]
    return found


def auto(
    allowed: Sequence[str | Compressor] = ("bf16", "int8"),
    *,
    group: ProcessGroup | None = None,
) -> Auto:
    """Return a hook that chooses the fastest allowed hook for each bucket, or no hook.

    The first three steps run without compression. Then the ranks measure the group's link and the
    computing time of each hook in a few seconds, agree on the numbers, and predict the time of a
    step. If a choice is predicted to gain 2 % of a step, the choices that are predicted to be close
    to the fastest are tried in turn, six steps each. The fastest is kept if it gains 5 % over steps
    without a hook; otherwise the hook is withdrawn.

    Args:
        allowed: Names of hooks ("bf16", "fp16", "int8", "int4", "low_rank", "sign", "top_k"), or
            compressing hooks such as `LowRank(8)`. Their loss of precision must be acceptable.
        group: Process group; None for the group of the module that the hook is registered for.

    Raises:
        ArgumentError: `allowed` is empty, or has duplicates or unknown hooks.

    Example:
        On two ranks of one host no hook gains enough:

        >>> from gradwire.ddp import DistributedDataParallel
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     net = DistributedDataParallel(torch.nn.Linear(8, 8))
        ...     hook = auto(["int8"])
        ...     net.register_comm_hook(None, hook)
        ...     for _ in range(5):
        ...         net(torch.ones(1, 8)).sum().backward()
        ...     return hook.state.choice.names, net.reducer.has_hook
        >>> run_ranks(main, world_size=2)
        [(('all_reduce',), False), (('all_reduce',), False)]

    Source:
        S. Agarwal et al., On the utility of gradient compression in distributed training systems,
        MLSys 2022: compression gained time in 6 of 200 setups.
    """
    if group is not None:
        check_group(group)
    candidates = [candidate(PLAIN), *map(candidate, allowed)]
    names = [c.name for c in candidates]
    if len(names) == 1 or len(set(names)) < len(names):
        raise ArgumentError(
            f"allowed is {names[1:]}: pass at least one hook, and each kind at most once"
        )
    return Auto(candidates, group)
