"""Checks of optimizers, parameters, random states, and of what single ranks do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, zip_longest
from typing import Any

from gradwire.check.gradient_checks import shown
from gradwire.check.observer import ALONE
from gradwire.check.records import Event, Replicas, Run, Seen, check, differing

_FEWEST = 3
_FEW_SAMPLES = 4
_NEAR = 0.5
"""Part of the timeout after which a wait is reported."""


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


@check(
    "stale-optimizer",
    "the optimizer was made before parameters were replaced",
    "Make the optimizer after the model's parameters have been replaced or converted",
    explains=("no-optimizer",),
)
def _stale_optimizer(run: Run, model: Replicas) -> Iterator[Seen]:
    """Parameters get gradients in every step, are in no optimizer and never change, and an
    optimizer has as many that the model does not have.
    """
    left, at = _left_out(run, model)
    if left and at["foreign"] >= len(left):
        text = f"the optimizer has {at['foreign']} parameters that the model does not have"
        yield Seen(text, at, model.ranks, tensor=shown(left))


@check(
    "no-optimizer",
    "parameters get gradients but are in no optimizer",
    "Pass them to the optimizer, or set requires_grad=False before wrapping",
)
def _no_optimizer(run: Run, model: Replicas) -> Iterator[Seen]:
    """A minority of the parameters get gradients in every step and never change."""
    left, at = _left_out(run, model)
    if left and len(left) < len(model.names) / 2:
        text = f"{len(left)} of {len(model.names)} parameters never change"
        yield Seen(text, at, model.ranks, tensor=shown(left))


@check(
    "scheduler-on-one-rank",
    "a scheduler is stepped on some ranks only",
    "Step the scheduler on every rank",
    explains=("learning-rates", "parameters-differ"),
)
def _scheduler_on_one_rank(run: Run, model: Replicas) -> Iterator[Seen]:
    """The number of its steps and the learning rates differ at the same optimizer step."""
    for events in run.steps("stepped", model):
        if len({tuple(e["rates"]) for e in events}) == 1:
            continue
        pairs = zip(model.ranks, events, strict=True)
        done = [[e for e in run.before(r, at) if e["kind"] == "schedule"] for r, at in pairs]
        counts = [len(steps) for steps in done]
        if len(set(counts)) > 1:
            most = done[counts.index(max(counts))][-1]
            text = f"steps of schedulers by rank: {counts}"
            yield Seen(text, events[0], model.ranks, most["line"])
        break


@check(
    "learning-rates",
    "learning rates or other options of the optimizer differ between ranks",
    "Compute them from values that are equal on all ranks; all_reduce a metric before a "
    "scheduler uses it",
    explains=("parameters-differ",),
)
def _learning_rates(run: Run, model: Replicas) -> Iterator[Seen]:
    """They differ at the same step of an optimizer of replicated parameters."""
    for events in run.steps("stepped", model):
        for field, text in (("rates", "learning rates"), ("options", "options")):
            values = [e[field] for e in events]
            if all(e["owned"] for e in events) and any(value != values[0] for value in values):
                yield Seen(f"{text} by rank: {values}", events[0], model.ranks)
                return


@check(
    "optimizer-state",
    "the optimizer's state differs between ranks",
    "Load the same checkpoint of the optimizer on every rank, or on none",
    explains=("parameters-differ",),
)
def _optimizer_state(run: Run, model: Replicas) -> Iterator[Seen]:
    """The same tensors of its state differ after a step, although gradients, learning rates and
    options were equal in all steps so far.
    """
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
                yield Seen(text, events[0], model.ranks, tensor=tensor)
                return


@check(
    "different-from-the-start",
    "replicas start with different parameters",
    "Broadcast the parameters after they are made, or wrap the model",
    explains=("parameters-differ",),
    of_models=False,
)
def _different_from_the_start(run: Run) -> Iterator[Seen]:
    """Parameters of no wrapper differ before the first step and after the last one, and their
    gradients are equal at every step.
    """
    for model in run.alone():
        steps = list(run.steps("stepped", model))
        first = next(run.steps("step", model), [])
        name = differing(first, "parameters") if first else None
        if len(steps) >= _FEWEST and name and differing(steps[-1], "parameters"):
            equal = all(
                e["gradients"] == events[0]["gradients"] for events in steps for e in events
            )
            if equal and any(steps[0][0]["gradients"]):
                text = f"{name} differs before the first step, and gradients are equal at each"
                yield Seen(text, first[0], model.ranks, tensor=name)


@check(
    "parameters-differ",
    "parameters differ between ranks",
    "Change parameters by the optimizer alone or in the same way on every rank, or broadcast "
    "them afterwards",
    of_models=False,
)
def _parameters_differ(run: Run) -> Iterator[Seen]:
    """Every step was reduced without a hook of the program's own, and parameters differ at one step
    and at the end.
    """
    for model in [*run.replicas(), *run.alone()]:
        after = list(run.steps("stepped", model))
        if not after or run.hooked(model) or not _always_reduced(run, model, after):
            continue
        if differing(after[-1], "parameters") is None:
            continue
        afterwards = {(e[0]["optimizer"], e[0]["number"]): e for e in after}
        for events in run.steps("step", model):
            at = events[0]
            name = differing(events, "parameters")
            if name is not None:
                yield _changed(run, model, events, name)
                break
            stepped = afterwards.get((at["optimizer"], at["number"]), events)
            name = differing(stepped, "parameters")
            if name is not None:
                cause = differing(stepped, "gradients") if stepped is not events else None
                how = f"whose gradients of {cause} differ" if cause else "with equal gradients"
                text = f"changed in optimizer.step(), {how}"
                yield Seen(text, at, model.ranks, tensor=name)
                break


def _changed(run: Run, model: Replicas, events: Sequence[Event], name: str) -> Seen:
    """Return the first change outside of steps that differs between ranks."""
    changes = [
        [
            e
            for e in run.window(rank, event, model)
            if e["kind"] == "changed" and e["model"] == model.number
        ]
        for rank, event in zip(model.ranks, events, strict=True)
    ]
    for same in zip_longest(*changes):
        done = [e for e in same if e is not None]
        if len(done) < len(same) or len({e["digest"] for e in done}) > 1:
            at = done[0]
            text = f"changed {at['how']}" if at["how"] else f"changed after {_short(at['after'])}"
            return Seen(text, at, model.ranks, tensor=name)
    return Seen("changed between two steps", events[0], model.ranks, tensor=name)


def _always_reduced(run: Run, model: Replicas, steps: Sequence[Sequence[Event]]) -> bool:
    """Return True if each step of each rank follows a reduced backward."""
    if model.number == ALONE:
        first = next(run.steps("step", model))  # there is one of each step
        return differing(first, "parameters") is None and all(
            any(e["gradients"]) and e["gradients"] == events[0]["gradients"]
            for events in steps
            for e in events
        )
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


@check(
    "buffers-differ",
    "buffers that the model updates by itself differ between ranks",
    "all_reduce what they are updated with, or leave broadcast_buffers=True",
)
def _buffers_differ(run: Run, model: Replicas) -> Iterator[Seen]:
    """A buffer that is saved, of no batch norm, differs after several steps until the end, and
    the wrapper does not broadcast buffers.
    """
    steps = list(run.steps("stepped", model))
    by_name: dict[str, list[bool]] = {}
    for events in steps:
        for same in zip(*(e["buffers"] for e in events), strict=False):
            by_name.setdefault(same[0][0], []).append(len({code for _, code in same}) > 1)
    for name, differ in by_name.items():
        first = differ.index(True) if any(differ) else len(differ)
        if len(differ) - first >= _FEWEST and all(differ[first:]):
            window = run.window(model.ranks[0], steps[first][0], model)
            forward = [e["forward"] for e in window if e["kind"] == "backward" and e["forward"]]
            line = forward[-1] if forward else ""
            text = f"from step {steps[first][0]['number']} on"
            yield Seen(text, steps[first][0], model.ranks, line, name)
            return


@check(
    "random-state",
    "ranks draw the same random numbers, for dropout, noise or augmentation",
    "Seed each rank differently after the model is built: torch.manual_seed(seed + rank)",
    on_request=True,  # trainers that seed all ranks alike work, with noise that is less diverse
)
def _random_state(run: Run, model: Replicas) -> Iterator[Seen]:
    """Several training forwards, or draws of a data loader or its workers, change the random state,
    which is equal on two ranks before each of them, while inputs differ.
    """
    for a, b in combinations(model.ranks, 2):
        inputs = [{e["number"]: e["inputs"] for e in run.forwards(model, r)} for r in (a, b)]
        drew = [
            {e["number"]: e for e in run.of("drew", r) if e["model"] == model.number}
            for r in (a, b)
        ]
        batches = [
            {(e["loader"], e["epoch"], e["number"]): e for e in run.of("batch", r)} for r in (a, b)
        ]
        workers = [dict(enumerate(run.of("worker", r))) for r in (a, b)]
        for events, text in (
            (drew, "forwards with draws of numbers in or before them"),
            (batches, "batches whose loading draws numbers"),
            (workers, "batches whose loading in workers draws numbers"),
        ):
            equal = _equal(*events)
            if events is batches:
                equal = [(x, y) for x, y in equal if x["samples"] != y["samples"]]
            elif events is drew:
                equal = [
                    (x, y)
                    for x, y in equal
                    if inputs[0].get(x["number"]) != inputs[1].get(x["number"])
                ]
            if len(equal) >= _FEWEST:
                text = f"equal random states before all {len(equal)} {text}"
                yield Seen(text, equal[0][0], (a, b))
                return


def _equal(one: dict[Any, Event], other: dict[Any, Event]) -> list[tuple[Event, Event]]:
    """Return the pairs that use a generator, if all have equal states of it."""
    common = [(one[key], other[key]) for key in one if key in other]
    for generator in range(3):
        pairs = []
        for a, b in common:
            states = [(e["random"] or [])[generator : generator + 1] for e in (a, b)]
            if all(state and state[0] is not None for state in states):
                pairs.append((a, b, states[0] == states[1]))
        if pairs and all(equal for _, _, equal in pairs):
            return [(a, b) for a, b, _ in pairs]
    return []


@check(
    "batch-norm",
    "batch norm uses the statistics of few samples per rank",
    "Convert the model before wrapping: gradwire.ddp.SyncBatchNorm.convert_sync_batchnorm or "
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
)
def _batch_norm(run: Run, model: Replicas) -> Iterator[Seen]:
    """A batch norm gets fewer than 4 samples in its first calls on every rank."""
    calls = [
        [e for e in run.of("batch_norm", rank) if e["model"] == model.number]
        for rank in model.ranks
    ]
    if all(c and all(e["samples"] < _FEW_SAMPLES for e in c) for c in calls):
        at = calls[0][0]
        names = sorted({e["name"] for c in calls for e in c})
        yield Seen(f"{at['samples']} samples per rank", at, model.ranks, tensor=shown(names))


@check(
    "evaluation-on-one-rank",
    "some ranks evaluate through the wrapper, whose forward broadcasts buffers",
    "Evaluate model.module on that rank, or on all ranks; with gradwire, "
    "sync_buffers_in_eval=False",
)
def _evaluation_on_one_rank(run: Run, model: Replicas) -> Iterator[Seen]:
    """A rank calls a wrapper that broadcasts buffers without gradients, while another goes on
    without such a call.
    """
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
            if without := [b for b in others if _goes_on(run, b, step)]:
                text = f"rank {a} evaluates after step {step}, ranks {without} do not"
                yield Seen(text, event, (a,))
                return


def _goes_on(run: Run, rank: int, step: int) -> bool:
    """Return True if a rank trained, waited at a barrier or ended after its step."""
    events = [event for event in run.events[rank] if event["step"] == step]
    trains = any(event["kind"] == "forward" and event["gradients"] for event in events)
    return trains or any(event["kind"] in ("barrier", "end") for event in events)


@check(
    "slow-save",
    "ranks wait for another one to save, for much of the group's timeout",
    "Raise the timeout of init_process_group, or save in the background",
    of_models=False,
)
def _slow_save(run: Run) -> Iterator[Seen]:
    """A collective waited for half of the timeout, mostly while another rank saved."""
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
                        yield Seen(text, save, (other, rank))
                        return
