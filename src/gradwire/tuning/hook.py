"""Auto: plain for a few steps, which it measures; then what was predicted to be fastest."""

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
from gradwire.hooks import Compressor, GradBucket, HookReturn, StatefulHook, all_reduce
from gradwire.hooks.stateful import group_from, name_if_group
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
    """What an `Auto` has found out.

    Attributes:
        process_group: The group; None: the default one.
        step: How many backwards have been reduced.
        choices: The hook of each bucket, by the names of its parameters; empty until measured.
        choice: The prediction behind it, with the names in the order of buckets; None if it was
            not made in this process.
        settling: Whether the next step is the first by these choices: what other hooks, which were
            on trial, have kept goes with its gradients.
        hooks: Those that may be chosen, by name.
    """

    depends_on_buckets = True

    def __init__(self, group: ProcessGroup | None, hooks: Mapping[str, StatefulHook[Any]]) -> None:
        self.process_group, self.hooks = group, dict(hooks)
        self.step = 0
        self.choices: dict[tuple[str, ...], str] = {}
        self.choice: Choice | None = None
        self.settling = False

    def state_dict(self) -> dict[str, Any]:
        """The choices, and what the hooks keep; while a choice is on trial, as if it were final."""
        kept = {n: h.state.state_dict() for n, h in self.hooks.items() if isinstance(h, Compressor)}
        choices = [[list(names), chosen] for names, chosen in self.choices.items()]
        return {"step": self.step, "choices": choices, "hooks": kept}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave: nothing is measured again.

        Raises:
            ArgumentError: Other hooks were allowed.
        """
        own = {n: h for n, h in self.hooks.items() if isinstance(h, Compressor)}
        if saved["hooks"].keys() != own.keys():
            raise ArgumentError(
                f"the saved state is of auto with {sorted(saved['hooks'])}, this one has "
                f"{sorted(own)}: allow the same hooks"
            )
        self.step = saved["step"]
        self.choices = {tuple(names): chosen for names, chosen in saved["choices"]}
        self.settling = bool(self.choices)  # it may have been saved during a trial
        for name, hook in own.items():
            hook.state.load_state_dict(saved["hooks"][name])

    def __getstate__(self) -> dict[str, Any]:
        return {name: name_if_group(value) for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: group_from(value) for name, value in state.items()})
        self.settling = bool(self.choices)  # a copy goes on without the trial


logger = logging.getLogger(__name__)

MEASURED_STEPS = 3
"""How many steps are plain: in the first, buckets are not yet as they stay."""


@dataclass
class _Seen:
    """A bucket of the steps before the choice, and when it was launched in them."""

    names: tuple[str, ...]
    parameters: Sequence[Tensor]
    launched: float


class Auto(StatefulHook[AutoState]):
    """What `auto` makes.

    Attributes:
        withdrawn: Whether nothing pays for any bucket: from then on there is no hook.
    """

    averages = True

    def __init__(self, candidates: Sequence[Candidate], group: ProcessGroup | None) -> None:
        self._candidates = {c.name: c for c in candidates}
        super().__init__(AutoState(group, {c.name: c.hook for c in candidates}))
        self._looked = 0  # steps
        self._seen: list[_Seen] = []
        self._last: list[_Seen] = []
        self._trial: Trial | None = None
        self._places: dict[tuple[str, ...], int] = {}  # of buckets, by names, in a trial
        self._packing = 0.0
        self._index = sys.maxsize  # of the bucket before, in a step
        self._step_began = self._step_ended = self._step_seconds = 0.0

    def __getstate__(self) -> dict[str, Any]:
        # parameters would be copied; a copy looks at its own
        return super().__getstate__() | {
            "_looked": 0,
            "_seen": [],
            "_last": [],
            "_trial": None,
            "_places": {},
            "_index": sys.maxsize,
        }

    @property
    def settled(self) -> bool:
        """Whether the choice is made, and nothing is on trial."""
        return bool(self.state.choices) and self._trial is None

    def run_hook(self, bucket: GradBucket) -> HookReturn:
        """By the choice for the bucket; plain as long as there is none."""
        state = self.state
        group = self._group()
        names = tuple(bucket.names())
        if state.choices and names not in state.choices:
            self._start_over()
        if bucket.index() <= self._index:  # also where the step before was given up
            self._begin_step()
        self._index = bucket.index()
        if not state.choices:
            launched = perf_counter() - self._step_began
            self._seen.append(_Seen(names, bucket.parameters(), launched))
        chosen = state.choices.get(names, PLAIN)
        if self._trial is not None:
            chosen = self._trial.present[self._places[names]]
        elif state.settling:
            self._release(bucket, chosen)
        self.single_collective = self._candidates[chosen].single
        if chosen == PLAIN:
            return all_reduce(group, bucket)
        return self._run(chosen, group, bucket)

    def _begin_step(self) -> None:
        """At its first bucket."""
        self._seen = []
        self._step_began = perf_counter()

    def committed(self) -> None:
        """Counts the step, takes its time, from the end of the one before, and may choose.

        Here, not at the next step's first bucket: which a rank that fails before it does not come
        to, while the others measure and wait for it.
        """
        now = perf_counter()
        self._step_seconds, self._step_ended = now - self._step_ended, now
        self._index = sys.maxsize
        self.state.step += 1
        if self._trial is not None:
            self._trial.add(self._step_seconds)
            if self._trial.is_over:
                self._conclude(self._group(), self._trial)
        elif self.state.settling:  # what others had kept is with this step's gradients
            self.state.settling = False
            self.withdrawn = set(self.state.choices.values()) == {PLAIN}
        elif not self.state.choices:
            self._look()

    def _group(self) -> ProcessGroup:
        return self.state.process_group or default_group("group")

    def _look(self) -> None:
        """A plain step has ended: what it has shown, and after the last one the choice."""
        if not self._seen:  # others run the hook, as one rank of each host: with whom they measure
            return
        self._looked += 1
        same = [s.names for s in self._last] == [s.names for s in self._seen]
        if same:  # whichever was disturbed less
            for seen, before in zip(self._seen, self._last, strict=True):
                seen.launched = min(seen.launched, before.launched)
        self._last = self._seen
        if self._looked >= MEASURED_STEPS:
            self._decide(self._group())
            self._step_ended = perf_counter()  # measuring is no part of a step

    def _conclude(self, group: ProcessGroup, trial: Trial) -> None:
        """Take what was fastest."""
        best, seconds = trial.fastest(group, self._packing)
        logger.info("auto: %s; seconds of a step: %s", best, seconds)
        self._trial = None
        self._settle(best)

    def _settle(self, chosen: Names) -> None:
        """Reduce so from this step on."""
        self.state.choices = {names: chosen[place] for names, place in self._places.items()}
        self.state.settling = True

    def _release(self, bucket: GradBucket, chosen: str) -> None:
        """Add to the gradients what other hooks than theirs have kept of them."""
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
        """Buckets are others: the module has changed."""
        self.state.choices, self.state.choice = {}, None
        self._looked, self._seen, self._last, self._trial = 0, [], [], None
        self._index = sys.maxsize

    def _decide(self, group: ProcessGroup) -> None:
        """Measure, agree, and choose: every rank at the same bucket of the same step."""
        plain = (PLAIN,) * len(self._last)
        choice, able = Choice(plain, 0.0, 0.0), [plain]
        if group.size() > 1:
            choice, able = self._choose(group)
        logger.info("auto: %s, of %d that may be as fast", choice, len(able))
        self.state.choice = choice
        self._places = {seen.names: place for place, seen in enumerate(self._last)}
        self._last = []
        self._settle(choice.names)
        # by agreed numbers alone: all ranks try, or none
        if len(able) > 1:
            self._trial = Trial(able)

    def _choose(self, group: ProcessGroup) -> tuple[Choice, list[Names]]:
        """What is predicted to be fastest, and what else may be: the same on all ranks."""
        world, buckets = group.size(), [seen.parameters for seen in self._last]
        candidates = list(self._candidates.values())
        cluster = measure_cluster(group, largest_of(candidates, buckets, world), thorough=False)
        own = measured(candidates, buckets, world)
        numbers = [self._step_seconds, *(seen.launched for seen in self._last)]
        for of_hook in own.values():
            numbers += [number for c in of_hook for number in (c.before, c.after)]
        # what one rank has measured another has measured differently
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
        # they were sent by a hook, as one is registered
        sent = [
            Cost(packs, c.messages, single=True)
            for packs, c in zip(packing, costs[PLAIN], strict=True)
        ]
        ready = undisturbed(launched, sent, cluster)
        # forward and update, which all have
        beside = max(0.0, step - end_of_step(ready, sent, cluster))
        choice = choose(ready, costs, cluster, min_gain=TRY_GAIN * step, idle=beside)
        return choice, contenders(choice, ready, costs, cluster, beside)


def measured(
    candidates: Sequence[Candidate], buckets: Sequence[Sequence[Tensor]], world: int
) -> dict[str, list[Computing]]:
    """What each candidate computes for each bucket: measured for the smallest and the largest."""
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
    """Take for each bucket what is fastest of what is allowed; where nothing pays, no hook at all.

    Three steps are plain. Then every rank measures the group's link and what each hook computes,
    in a few seconds; they agree on the numbers, and predict when a step would end. Where that gains
    2 % of a step, what is predicted to be close to the fastest is tried: six steps each, by turns.
    A choice is kept if it gains 5 % of a step without a hook.

    Args:
        allowed: Names of hooks ("bf16", "fp16", "int8", "int4", "low_rank", "sign", "top_k"), or
            hooks that compress, as `LowRank(8)`. What they lose is yours to allow.
        group: The group; None: that of the module it is registered for.

    Raises:
        ArgumentError: Something else is allowed, or nothing, or something twice.

    Example:
        On two ranks of one host nothing pays:

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
        MLSys 2022: of 200 set-ups, 6 gained.
    """
    if group is not None:
        check_group(group)
    candidates = [candidate(PLAIN), *map(candidate, allowed)]
    names = [c.name for c in candidates]
    if len(names) == 1 or len(set(names)) < len(names):
        raise ArgumentError(
            f"allowed is {names[1:]}: give at least one hook, and each kind at most once"
        )
    return Auto(candidates, group)
