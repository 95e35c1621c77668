"""Checks of optimizers, parameters, random states, and of what single ranks do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product, zip_longest
from pathlib import Path

from gradwire.check.gradient_checks import shown
from gradwire.check.observer import ALONE
from gradwire.check.records import Event, Finding, Replicas, Run, check, differing, seen

_FEWEST = 3
_FEW_SAMPLES = 4


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


@check()
def _no_optimizer(run: Run, model: Replicas) -> Iterator[Finding]:
    """Parameters get gradients but are in no optimizer.

    A minority of the parameters get gradients in every step and never change, or an optimizer
    has as many that the model does not have.

    Pass them to the optimizer, or set requires_grad=False before wrapping.
    """
    left, at = _left_out(run, model)
    if left and at["foreign"] >= len(left):
        text = f"the optimizer was made before {len(left)} parameters were replaced"
        remedy = "Make the optimizer after parameters have been replaced or converted"
        yield seen(text, at, model.ranks, "", shown(left), remedy)
    elif left and len(left) < len(model.names) / 2:
        text = f"{len(left)} of {len(model.names)} parameters never change"
        yield seen(text, at, model.ranks, tensor=shown(left))


@check(explains=("parameters-differ",))
def _learning_rates(run: Run, model: Replicas) -> Iterator[Finding]:
    """Learning rates or other options of the optimizer differ between ranks.

    They differ at the same step of an optimizer of replicated parameters.

    Compute them from values that are equal on all ranks; all_reduce a metric before a scheduler
    uses it.
    """
    before = None
    for events in run.steps("stepped", model):
        for field, text in (("rates", "learning rates"), ("options", "options")):
            values = [e[field] for e in events]
            if all(e["owned"] for e in events) and any(value != values[0] for value in values):
                text, counts = f"{text} by rank: {values}", [e["schedules"] for e in events]
                most = events[counts.index(max(counts))]
                scheduled = len(set(counts)) > 1 or before not in (None, counts)
                line = most["schedule"] if scheduled else ""
                text += f"; steps of schedulers: {counts}" if line else ""
                yield seen(text, events[0], model.ranks, line)
                return
        before = [e["schedules"] for e in events]


@check(explains=("parameters-differ",))
def _optimizer_state(run: Run, model: Replicas) -> Iterator[Finding]:
    """The optimizer's state differs between ranks.

    The same tensors of its state differ after a step, although gradients, learning rates and
    options were equal in all steps so far.

    Load the same checkpoint of the optimizer on every rank, or on none.
    """
    for events in run.steps("stepped", model):
        given = [(e["rates"], [m["gradients"] for m in e["models"].values()]) for e in events]
        if any(one != given[0] for one in given):
            break
        states = [e["state"] for e in events]
        if any(not s or [x[:2] for x in s] != [x[:2] for x in states[0]] for s in states):
            continue
        for entries in zip(*states, strict=True):
            if len({entry[2] for entry in entries}) > 1:
                tensor = f"{entries[0][1]!r} of parameter {entries[0][0]} of the optimizer"
                text = "the optimizers have different states after equal gradients"
                yield seen(text, events[0], model.ranks, tensor=tensor)
                return


@check(of_models=False)
def _parameters_differ(run: Run) -> Iterator[Finding]:
    """Parameters differ between ranks.

    Every step was reduced without a hook of the program's own, and parameters differ at one
    step and at the end.

    Change parameters by the optimizer alone or in the same way on every rank, or broadcast them
    afterwards.
    """
    for model in [*run.replicas(), *run.alone()]:
        after = list(run.steps("stepped", model))
        if len(after) < 2 or run.hooked(model) or not differing(after[-1], "parameters"):
            continue
        if not _always_reduced(run, model, after):
            continue
        for before, stepped in zip(run.steps("step", model), after, strict=False):
            if name := differing(before, "parameters"):
                yield _changed(run, model, before, name)
                break
            if name := differing(stepped, "parameters"):
                cause = differing(stepped, "gradients")
                how = f"whose gradients of {cause} differ" if cause else "with equal gradients"
                text = f"changed in optimizer.step(), {how}"
                yield seen(text, stepped[0], model.ranks, tensor=name)
                break


def _changed(run: Run, model: Replicas, events: Sequence[Event], name: str) -> Finding:
    """Return the first change outside of steps that differs between ranks."""
    changes = [
        [e for e in window if e["kind"] == "changed" and e["model"] == model.number]
        for window in run.windows(events, model)
    ]
    for same in zip_longest(*changes):
        done = [e for e in same if e is not None]
        if len(done) < len(same) or len({e["digest"] for e in done}) > 1:
            at = done[0]
            text = f"changed {at['how'] or 'after ' + Path(at['after']).name}"
            return seen(text, at, model.ranks, tensor=name)
    at_first = model.number == ALONE and events[0]["number"] == 0
    text = "they differ before the first step" if at_first else "changed between two steps"
    return seen(text, events[0], model.ranks, tensor=name)


def _always_reduced(run: Run, model: Replicas, steps: Sequence[Sequence[Event]]) -> bool:
    """Return True if each step of each rank follows a reduced backward."""
    if model.number == ALONE:
        given = [[e["gradients"] for e in events] for events in steps]
        return all(any(one) and one == by_rank[0] for by_rank in given for one in by_rank)
    for rank in model.ranks:
        reduced = False
        for event in run.events[rank]:
            if event["kind"] == "backward" and model.number in event["models"]:
                reduced = model.number in event["syncs"]
            elif event["kind"] == "stepped":
                state = event["models"].get(str(model.number), {"owned": False})
                if state["owned"] and not reduced:
                    return False
    return True


@check()
def _buffers_differ(run: Run, model: Replicas) -> Iterator[Finding]:
    """Buffers, or unregistered tensors of modules, differ between ranks.

    After several steps until the end, there differs a buffer that is saved, of no batch norm,
    and not broadcast, or a module's tensor that is not registered and never changes.

    Register tensors as buffers, and all_reduce what they are updated with, or leave
    broadcast_buffers=True.
    """
    steps = list(run.steps("stepped", model))
    by_name: dict[str, list[bool]] = {}
    for events in steps:
        for same in zip(*(e["buffers"] for e in events), strict=False):
            if len({name for name, _ in same}) == 1:
                by_name.setdefault(same[0][0], []).append(len({code for _, code in same}) > 1)
    for name, differ in by_name.items():
        first = differ.index(True) if any(differ) else len(differ)
        if len(differ) - first >= _FEWEST and all(differ[first:]):
            window = run.windows(steps[first], model)[0]
            forward = [e["forward"] for e in window if e["kind"] == "backward" and e["forward"]]
            line = forward[-1] if forward else ""
            text = f"from step {steps[first][0]['number']} on"
            yield seen(text, steps[first][0], model.ranks, line, name)
            return


@check(on_request=True)
def _random_state(run: Run, model: Replicas) -> Iterator[Finding]:
    """Ranks draw the same random numbers, for dropout, noise or augmentation.

    Several training forwards, or draws of a data loader or its workers, change the random
    state, which is equal on two ranks before each of them, while inputs differ.

    Seed each rank differently after the model is built: torch.manual_seed(seed + rank).
    """
    for a, b in combinations(model.ranks, 2):
        drew = [{(e["where"], *e["key"]): e for e in run.of("drew", rank)} for rank in (a, b)]
        common = [(drew[0][key], drew[1][key]) for key in drew[0] if key in drew[1]]
        for where, generator in product((f"forward {model.number}", "loader", "worker"), range(3)):
            pairs = []
            for one, other in common:
                states = [e["random"][generator : generator + 1] for e in (one, other)]
                if one["where"] == where and all(s and s[0] is not None for s in states):
                    pairs.append((one, states[0] == states[1], one["data"] != other["data"]))
            if len(pairs) >= _FEWEST and all(equal and other for _, equal, other in pairs):
                text = f"equal random states before all {len(pairs)} draws of {where}s"
                yield seen(text.replace(f" {model.number}s", "s"), pairs[0][0], (a, b))
                return


@check()
def _batch_norm(run: Run, model: Replicas) -> Iterator[Finding]:
    """Batch norm uses the statistics of few samples per rank.

    A batch norm gets fewer than 4 samples in its first calls on every rank.

    Convert the model before wrapping: gradwire.ddp.SyncBatchNorm.convert_sync_batchnorm or
    torch.nn.SyncBatchNorm.convert_sync_batchnorm.
    """
    calls = [
        [e for e in run.of("batch_norm", rank) if e["model"] == model.number]
        for rank in model.ranks
    ]
    if all(c and all(e["samples"] < _FEW_SAMPLES for e in c) for c in calls):
        at = calls[0][0]
        names = sorted({e["name"] for c in calls for e in c})
        yield seen(f"{at['samples']} samples per rank", at, model.ranks, tensor=shown(names))
