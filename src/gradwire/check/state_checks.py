"""Checks of optimizers, parameters, random states, and of what single ranks do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from gradwire.check.records import Check, Event, Finding, Replicas, Run, differing

_FEWEST = 3
_FEW_SAMPLES = 4
_NEAR = 0.5
"""Part of the timeout after which a wait is reported."""


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _left_out(run: Run, model: Replicas) -> tuple[list[str], Event]:
    """Return parameters that get gradients, are in no optimizer and never change."""
    steps = [events[0] for events in run.steps("stepped", model)]
    if len(steps) < _FEWEST or steps[0]["names"] != steps[-1]["names"]:
        return [], {}
    first, last = steps[0], steps[-1]
    same = zip(first["names"], first["parameters"], last["parameters"], strict=True)
    still = {name for name, a, b in same if a == b is not None}
    still = still.intersection(*(step["unowned"] for step in steps))
    return [name for name in first["names"] if name in still], first


class StaleOptimizer(Check):
    """Optimizers of parameters that the model no longer has.

    Parameters get gradients in every step, are in no optimizer and never change, and an optimizer
    has as many that the model does not have.
    """

    name = "stale-optimizer"
    finds = "the optimizer was made before parameters were replaced"
    remedy = "Make the optimizer after the model's parameters have been replaced or converted"
    explains = ("no-optimizer",)

    def conclude_on(self, run: Run, model: Replicas) -> Iterator[Finding]:
        left, at = _left_out(run, model)
        if left and at["foreign"] >= len(left):
            text = f"the optimizer has {at['foreign']} parameters that the model does not have"
            yield self.found(text, at, model.ranks, tensor=_shown(left))


class NoOptimizer(Check):
    """Parameters that no optimizer updates.

    A minority of the parameters get gradients in every step and never change.
    """

    name = "no-optimizer"
    finds = "parameters get gradients but are in no optimizer"
    remedy = "Pass them to the optimizer, or set requires_grad=False before wrapping"

    def conclude_on(self, run: Run, model: Replicas) -> Iterator[Finding]:
        left, at = _left_out(run, model)
        if left and len(left) < len(model.names) / 2:
            text = f"{len(left)} of {len(model.names)} parameters never change"
            yield self.found(text, at, model.ranks, tensor=_shown(left))


class ChangedAfterWrapping(Check):
    """Parameters that the wrapper does not know.

    They required no gradient when the module was wrapped, and their gradients differ.
    """

    name = "changed-after-wrapping"
    finds = "parameters were thawed, added or replaced after wrapping, so that nothing reduces them"
    remedy = (
        "Thaw and add parameters before wrapping, or call model.refit() on every rank (gradwire)"
    )
    explains = ("parameters-differ",)

    def conclude_on(self, run: Run, model: Replicas) -> Iterator[Finding]:
        for events in run.steps("stepped", model):
            late = events[0]["late"]
            if late and differing(events, "gradients") in late:
                text = f"{len(late)} parameters have gradients of their own on each rank"
                at = events[0]
                yield self.found(text, at, model.ranks, line=model.line, tensor=_shown(late))
                break


def _schedules_before(run: Run, rank: int, step: Event) -> list[Event]:
    """Return a rank's steps of schedulers before a step of an optimizer."""
    found = []
    for event in run.events[rank]:
        if event["kind"] == "schedule":
            found.append(event)
        elif all(event.get(name) == step[name] for name in ("kind", "optimizer", "number")):
            break
    return found


class SchedulerOnOneRank(Check):
    """Schedulers that some ranks step more often.

    The number of its steps and the learning rates differ at the same optimizer step.
    """

    name = "scheduler-on-one-rank"
    finds = "a scheduler is stepped on some ranks only"
    remedy = "Step the scheduler on every rank"
    explains = ("learning-rates", "parameters-differ")

    def conclude_on(self, run: Run, model: Replicas) -> Iterator[Finding]:
        for events in run.steps("stepped", model):
            if len({tuple(e["rates"]) for e in events}) == 1:
                continue
            done = [_schedules_before(run, r, e) for r, e in zip(model.ranks, events, strict=True)]
            counts = [len(steps) for steps in done]
            if len(set(counts)) > 1:
                most = done[counts.index(max(counts))][-1]
                text = f"steps of schedulers by rank: {counts}"
                yield self.found(text, events[0], model.ranks, line=most["line"])
            break


class LearningRates(Check):
    """Optimizers whose options differ between ranks.

    They differ at the same step of an optimizer of replicated parameters.
    """

    name = "learning-rates"
    finds = "learning rates or other options of the optimizer differ between ranks"
    remedy = (
        "Compute them from values that are equal on all ranks; all_reduce a metric before a "
        "scheduler uses it"
    )
    explains = ("parameters-differ",)

    def conclude(self, run: Run) -> Iterator[Finding]:
        for model in run.replicas():
            for events in run.steps("stepped", model):
                if not all(e["owned"] for e in events):
                    continue
                for field, text in (("rates", "learning rates"), ("options", "options")):
                    values = [e[field] for e in events]
                    if any(value != values[0] for value in values):
                        yield self.found(f"{text} by rank: {values}", events[0], model.ranks)
                        return


class OptimizerState(Check):
    """Optimizers whose state differs between ranks.

    The same tensors of its state differ after a step, although gradients, learning rates and
    options were equal in all steps so far.
    """

    name = "optimizer-state"
    finds = "the optimizer's state differs between ranks"
    remedy = "Load the same checkpoint of the optimizer on every rank, or on none"
    explains = ("parameters-differ",)

    def conclude(self, run: Run) -> Iterator[Finding]:
        for model in run.replicas():
            for events in run.steps("stepped", model):
                given = [(e["rates"], e["gradients"]) for e in events]
                if any(one != given[0] for one in given):
                    break
                states = [e["state"] for e in events]
                if any(not s or [x[:2] for x in s] != [x[:2] for x in states[0]] for s in states):
                    continue
                for entries in zip(*states, strict=True):
                    if len({entry[2] for entry in entries}) > 1:
                        tensor = f"{entries[0][1]!r} of parameter {entries[0][0]} of the optimizer"
                        text = "the optimizers have different states after equal gradients"
                        yield self.found(text, events[0], model.ranks, tensor=tensor)
                        return


class ParametersDiffer(Check):
    """Replicas that have become different.

    Every step was reduced without a hook of the program's own, and parameters differ at one step
    and at the end.
    """

    name = "parameters-differ"
    finds = "parameters differ between ranks"
    remedy = (
        "Change parameters by the optimizer alone or in the same way on every rank, or broadcast "
        "them afterwards"
    )

    def conclude_on(self, run: Run, model: Replicas) -> Iterator[Finding]:
        after = list(run.steps("stepped", model))
        if not after or run.hooked(model) or not self._always_reduced(run, model):
            return
        if differing(after[-1], "parameters") is None:
            return
        afterwards = {(e[0]["optimizer"], e[0]["number"]): e for e in after}
        previous = f"wrapping at {_short(model.line)}"
        for events in run.steps("step", model):
            at = events[0]
            name = differing(events, "parameters")
            text = f"changed between {previous} and the step at {_short(at['line'])}"
            if name is None:
                stepped = afterwards.get((at["optimizer"], at["number"]), events)
                name = differing(stepped, "parameters")
                cause = name and differing(stepped, "gradients")
                how = f"whose gradients of {cause} differ" if cause else "with equal gradients"
                text = f"after optimizer.step(), {how}"
            if name is not None:
                yield self.found(text, at, model.ranks, tensor=name)
                return
            previous = f"the step at {_short(at['line'])}"

    def _always_reduced(self, run: Run, model: Replicas) -> bool:
        """Return True if each step of each rank follows a reduced backward."""
        for rank in model.ranks:
            reduced = False
            for event in run.events[rank]:
                if event["kind"] == "backward" and model.number in event["models"]:
                    reduced = event["syncs"]
                elif event["kind"] == "stepped":
                    state = event["models"].get(str(model.number), {"owned": False})
                    if state["owned"] and not reduced:
                        return False
        return True


def _short(line: str) -> str:
    return line.replace("\\", "/").rpartition("/")[2]


class RandomState(Check):
    """Ranks that draw the same random numbers.

    Several training forwards, or draws of a data loader, change the random state, which is equal on
    two ranks before each of them, while inputs differ.
    """

    name = "random-state"
    finds = "ranks draw the same random numbers, for dropout or augmentation"
    remedy = "Seed each rank differently after the model is built: torch.manual_seed(seed + rank)"
    on_request = True  # trainers that seed all ranks alike work, with noise that is less diverse

    def conclude_on(self, run: Run, model: Replicas) -> Iterator[Finding]:
        for a, b in combinations(model.ranks, 2):
            forwards = [self._forwards(run, model, rank) for rank in (a, b)]
            batches = [
                {(e["loader"], e["epoch"], e["number"]): e for e in run.of("batch", rank)}
                for rank in (a, b)
            ]
            at, text = self._equal(*forwards), "forwards that draw numbers"
            if not at or all(one["inputs"] == other["inputs"] for one, other in at):
                at, text = self._equal(*batches), "batches whose loading draws numbers"
                if any(x[f] == y[f] for x, y in at for f in ("index", "samples")):
                    continue
            if at:
                text = f"equal random states before all {len(at)} {text}"
                yield self.found(text, at[0][0], (a, b))
                break

    def _forwards(self, run: Run, model: Replicas, rank: int) -> dict[Any, Event]:
        """Return a rank's forwards that draw random numbers, with their inputs."""
        inputs = {e["number"]: {"inputs": e["inputs"]} for e in run.forwards(model, rank)}
        drew = [e for e in run.of("drew", rank) if e["model"] == model.number]
        return {e["number"]: e | inputs[e["number"]] for e in drew if e["number"] in inputs}

    def _equal(self, one: dict[Any, Event], other: dict[Any, Event]) -> list[tuple[Event, Event]]:
        """Return the pairs that draw numbers if several do, all with equal random states."""
        pairs = [(one[key], other[key]) for key in one if key in other]
        pairs = [(a, b) for a, b in pairs if a["random"] and b["random"]]
        equal = len(pairs) >= _FEWEST and all(a["random"] == b["random"] for a, b in pairs)
        return pairs if equal else []


class BatchNorm(Check):
    """Batch norms whose statistics come from few samples.

    A batch norm gets fewer than 4 samples in its first calls on every rank.
    """

    name = "batch-norm"
    finds = "batch norm uses the statistics of few samples per rank"
    remedy = (
        "Convert the model before wrapping: gradwire.ddp.SyncBatchNorm.convert_sync_batchnorm or "
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
    )

    def conclude_on(self, run: Run, model: Replicas) -> Iterator[Finding]:
        calls = [
            [e for e in run.of("batch_norm", rank) if e["model"] == model.number]
            for rank in model.ranks
        ]
        if all(c and all(e["samples"] < _FEW_SAMPLES for e in c) for c in calls):
            at = calls[0][0]
            names = sorted({e["name"] for c in calls for e in c})
            text = f"{at['samples']} samples per rank"
            yield self.found(text, at, model.ranks, tensor=_shown(names))


class EvaluationOnOneRank(Check):
    """Forwards through the wrapper that only some ranks run.

    A rank calls a wrapper that broadcasts buffers without gradients, while another goes on without
    such a call.
    """

    name = "evaluation-on-one-rank"
    finds = "some ranks evaluate through the wrapper, whose forward broadcasts buffers"
    remedy = (
        "Evaluate model.module on that rank, or on all ranks; with gradwire, "
        "sync_buffers_in_eval=False"
    )

    def conclude(self, run: Run) -> Iterator[Finding]:
        for model in run.replicas():
            evaluations: dict[int, dict[int, Event]] = {rank: {} for rank in model.ranks}
            for rank, found in evaluations.items():
                for event in run.of("forward", rank):
                    if event["model"] == model.number and not event["gradients"]:
                        found.setdefault(event["step"], event)
            for a in model.ranks:
                for step, event in evaluations[a].items():
                    if not event["sends_buffers"]:
                        continue
                    others = [b for b in model.ranks if step not in evaluations[b]]
                    if without := [b for b in others if self._goes_on(run, b, step)]:
                        text = f"rank {a} evaluates after step {step}, ranks {without} do not"
                        yield self.found(text, event, (a,))
                        return

    def _goes_on(self, run: Run, rank: int, step: int) -> bool:
        """Return True if a rank trained, waited at a barrier or ended after its step."""
        events = [event for event in run.events[rank] if event["step"] == step]
        trains = any(event["kind"] == "forward" and event["gradients"] for event in events)
        return trains or any(event["kind"] in ("barrier", "end") for event in events)


class SlowSave(Check):
    """Ranks that wait for a rank that saves, for much of the timeout.

    A collective waited for half of the timeout, mostly while another rank saved.
    """

    name = "slow-save"
    finds = "ranks wait for another one to save, for much of the group's timeout"
    remedy = "Raise the timeout of init_process_group, or save in the background"

    def conclude(self, run: Run) -> Iterator[Finding]:
        for rank in run.ranks:
            for wait in run.of("waited", rank):
                seconds = wait["until"] - wait["since"]
                if not wait["timeout"] or seconds < _NEAR * wait["timeout"]:
                    continue
                for other in run.ranks:
                    for save in run.of("saved", other) if other != rank else ():
                        both = min(wait["until"], save["until"]) - max(wait["since"], save["since"])
                        if both > seconds / 2:
                            text = (
                                f"rank {rank} waited {seconds:.1f} s in {wait['op']} for rank "
                                f"{other}; the timeout is {wait['timeout']:.1f} s"
                            )
                            yield self.found(text, save, (other, rank))
                            return
