"""Checks of losses and gradients: what is averaged, where, and what happens to it before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import inf, isclose, sqrt
from typing import Any

from gradwire.check.observer import ALONE
from gradwire.check.records import (
    Event,
    Finding,
    Replicas,
    Run,
    check,
    differing,
    is_backward,
    seen,
)

_FEWEST = 2
"""Number of steps that must show the same."""
_ROUNDED = 0.1
"""Relative error of a factor such as a local by a global batch size, which is rounded."""
_CAUSES = {
    "late": (
        "parameters were thawed, added, replaced or converted after wrapping",
        "Thaw, add, copy, move and convert parameters before wrapping, or call model.refit() on "
        "every rank (gradwire)",
    ),
    "around": (
        "the model, or a part of it, is called around its wrapper",
        "Call the wrapper: model(x) instead of model.module(x) or its methods; let forward choose "
        "the method",
    ),
    "skipped": (
        "some ranks skip a step of the optimizer",
        "Decide for all ranks together: all_reduce the condition before it is used",
    ),
    "forward": (
        "the forward ran while gradients were not to be reduced, but its backward should be",
        "Run the forward outside of no_sync(), and set require_backward_grad_sync before it",
    ),
    "no_sync": (
        "the optimizer steps after a backward in no_sync()",
        "Leave no_sync() for the last micro-step before each step, also at the end of an epoch",
    ),
    "unused": (
        "the wrapper is never called, and the optimizer has parameters of another module",
        "Train the wrapper and its parameters, not a copy of the module",
    ),
}


def _first_local_step(run: Run, model: Replicas) -> tuple[list[Event], str]:
    """Return the first step with different gradients, if parameters are never equal afterwards."""
    steps = [] if run.hooked(model) else list(run.steps("stepped", model))
    for events in steps:
        if name := differing(events, "gradients"):
            first, wrapped = events[0]["step"], run.of("model", model.ranks[0])
            # a wrapper that is made later makes them equal by accident
            until = min((e["step"] for e in wrapped if e["step"] > first), default=inf)
            later = [e for e in run.steps("step", model) if first < e[0]["step"] < until]
            later.append([e for e in steps if e[0]["step"] < until][-1])
            return (events, name) if all(differing(e, "parameters") for e in later) else ([], "")
    return [], ""


@check(explains=("parameters-differ",), of_models=False)
def _local_gradients(run: Run) -> Iterator[Finding]:
    """Gradients stay local, so that replicas become different models.

    Gradients differ between ranks at a step, parameters are never equal again, and the cause
    was seen: a call around the wrapper, parameters that it does not know, different numbers of
    reduced backwards, or a forward or backward in no_sync().

    Reduce the gradients of each step.
    """
    for model in [*run.replicas(), *run.alone()]:
        events, name = _first_local_step(run, model)
        if events:
            cause, at, line = _cause(run, model, events, name)
            if cause:
                text, remedy = _CAUSES[cause]
                yield seen(text, at, model.ranks, line, name, remedy)


def _cause(run: Run, model: Replicas, events: Sequence[Event], name: str) -> tuple[str, Event, str]:
    """Return the cause of local gradients, an event that shows it, and its line; "" if unknown."""
    if model.number == ALONE:
        first = next(run.steps("step", model), events)
        wrapped = all(run.of("model", rank) for rank in run.ranks) and not run.replicas()
        return "unused" if wrapped and not differing(first, "parameters") else "", events[0], ""
    if name in events[0]["late"]:
        return "late", events[0], model.line
    last = None
    for window in run.windows(events, model):
        for last in (e for e in window if is_backward(e, model)):
            if str(model.number) in last["around"] and model.number not in last["syncs"]:
                return "around", last, last["around"][str(model.number)]
    counts = [e["reduced"] for e in events]
    if len(set(counts)) > 1:
        return "skipped", events[0], ""
    if last is not None and model.number not in last["syncs"]:
        if model.number in last["wants"]:
            return "forward", last, last["forward"]
        # steps without any reduction are local steps, which are averaged later
        if counts[0] or any(len(ranks[0]) > 1 for ranks in run.reductions(model)):
            return "no_sync", events[0], ""
    return "", events[0], ""


def shown(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


@check(of_models=False)
def _gather_without_gradient(run: Run) -> Iterator[Finding]:
    """The loss uses the result of an all_gather that has no gradient.

    A tensor that needs a gradient was gathered, and the loss's graph holds the result without
    one.

    Use gradwire.all_gather or torch.distributed.nn.all_gather, or put this rank's own tensor
    back into its place of the result.
    """
    gathers = [(e, r, str(e["shape"])) for r in run.ranks for e in run.of("gathered", r)]
    for at, ranks, shape in _by_line(gathers):
        text = f"the gradients of the other ranks' tensors of shape {shape} are lost"
        yield seen(text, at, ranks)


def _by_line(events: Iterable[tuple[Event, int, str]]) -> Iterator[tuple[Event, list[int], str]]:
    """Yield the first of the events of each line, the ranks that have one, and its text."""
    found: dict[str, list[tuple[Event, int, str]]] = {}
    for event, rank, text in events:
        found.setdefault(event["line"], []).append((event, rank, text))
    for same in found.values():
        yield same[0][0], sorted({rank for _, rank, _ in same}), same[0][2]


@check()
def _mean_of_means(run: Run, model: Replicas) -> Iterator[Finding]:
    """The loss averages over different numbers of tokens or samples.

    In several steps, and not only at the end of a loader, the same term of the loss divides by
    numbers that differ by more than 10 % between ranks or micro-steps, nothing weights it, and
    no hook reduces the gradients.

    Call model.weight(n) before backward with the number n of tokens or samples (gradwire), or
    divide the sum by the mean of n over ranks and micro-steps.
    """
    if run.any("weight"):
        return
    reductions = [
        ranks
        for ranks in run.reductions(model)
        if not any(event["last"] for micro in ranks for event in micro)
    ]
    differing = [(r, counts) for r in reductions if (counts := _counts(r))]
    if len(differing) >= max(_FEWEST, 0.25 * len(reductions)):
        backwards, counts = differing[0]
        steps = f"in {len(differing)} of {len(reductions)} steps"
        text = f"{steps}; in the first of them the ranks divide by {counts}"
        yield seen(text, backwards[0][-1], model.ranks)


def _counts(ranks: list[list[Event]]) -> list[Any] | None:
    """Return the different counts of a term, by rank and micro-step; None if they agree."""
    events = [event for micro in ranks for event in micro]
    if any(e["hooked"] for e in events) or len({len(e["terms"]) for e in events}) != 1:
        return None
    for term in range(len(events[0]["terms"])):
        terms = [e["terms"][term] for e in events]
        counts = [t["count"] for t in terms]
        first = terms[0]["factor"]
        same = all(isclose(t["factor"], first, rel_tol=1e-6) for t in terms)
        whole = all(t["builtin"] or (t["count"] == int(t["count"]) >= 1) for t in terms)
        if same and whole and min(counts) < 0.9 * max(counts):
            by_rank = [[int(e["terms"][term]["count"]) for e in micro] for micro in ranks]
            return [c[0] if len(c) == 1 else c for c in by_rank]
    return None


@check(of_models=False)
def _clip_without_gradients(run: Run) -> Iterator[Finding]:
    """Gradients are clipped, or their norm is taken, where there are none.

    In several steps, a clip or norm comes before the backward, or a sharded optimizer holds the
    gradients.

    Clip between backward and optimizer.step(); with ShardedOptimizer(reduce_scatter=True), call
    optimizer.clip_grad_norm_() or optimizer.clip_grad_value_().
    """
    found = []
    for rank in run.ranks:
        backward, early = False, {}
        for event in run.events[rank]:
            if event["kind"] == "backward":
                backward = True
            elif event["kind"] == "clip" and (event["none"] or not backward):
                early[event["line"]] = event
            elif event["kind"] == "stepped":
                found += [(clip, rank, "") for clip in early.values() if backward]
                backward, early = False, {}
    for clip, ranks, _ in _by_line(found):
        if sum(other["line"] == clip["line"] for other, _, _ in found) >= _FEWEST * len(ranks):
            why = "param.grad is None" if clip["none"] else "no backward since the last step"
            yield seen(f"{clip['function']}: {why}", clip, ranks)


@check(of_models=False)
def _clipped_before_reduce(run: Run) -> Iterator[Finding]:
    """Gradients are clipped before they are reduced.

    Clipping changed an optimizer's gradients on a rank while they differed between ranks, and
    at the step they were equal.

    Clip after the backward that reduces the gradients, or after the all_reduce.
    """
    found = []
    for model in [*run.replicas(), *run.alone()]:
        for events in run.steps("stepped", model):
            if events[0]["hooked"] or differing(events, "gradients") is not None:
                continue
            optimizer = events[0]["optimizer"]
            clips = [
                [e for e in window if e["kind"] == "clip" and optimizer in e["of"]]
                for window in run.windows(events, model)
            ]
            for same in zip(*clips, strict=False):
                if len({clip["digest"] for clip in same}) > 1:
                    pairs = zip(same, model.ranks, strict=True)
                    found += [(c, r, "") for c, r in pairs if c["before"] > c["limit"]]
    for clip, ranks, _ in _by_line(found):
        text = (
            f"{clip['function']} cut gradients of {clip['before']:.3g} to {clip['limit']:.3g} "
            "while they were this rank's own"
        )
        yield seen(text, clip, ranks)


def _constant(values: Sequence[float]) -> float:
    """Return the value if all are equal; 0 otherwise."""
    same = len(values) >= _FEWEST and all(isclose(v, values[0], rel_tol=1e-4) for v in values)
    return values[0] if same else 0.0


def _scales(run: Run, model: Replicas) -> list[tuple[float, int, Event]]:
    """Return the constant factors of means in the loss, the micro-steps, and a term with each."""
    reductions = [micro for ranks in run.reductions(model) for micro in ranks]
    events = [event for micro in reductions for event in micro]
    if not events or run.any("weight") or any(e["hooked"] or e["gathers"] for e in events):
        return []
    steps = Counter(map(len, reductions)).most_common(1)[0][0]
    by_term = zip(*(e["terms"] for e in events), strict=False)
    means = [([abs(t["factor"]) * t["mean"][0] for t in terms], terms[0]) for terms in by_term]
    return [(factor, steps, term) for each, term in means if (factor := _constant(each))]


def _summed_norms(run: Run, model: Replicas) -> tuple[float, list[Event]]:
    """Return the norm of gradients after their norms were summed, if it is constant."""
    after, found = [], []
    for events in run.steps("stepped", model):
        windows = run.windows(events, model)
        norms = [e for window in windows for e in window if e["kind"] == "norm"]
        if len(norms) >= len(windows) and len({e["digest"] for e in norms}) == 1:
            after.append(events[0]["norm"])
            found.append(norms[0])
    return _constant(after), found


def needs_more_ranks(run: Run) -> bool:
    """Return True if only a run on more ranks can tell what scales with their number."""
    for model in run.replicas():
        for factor, steps, _ in _scales(run, model):
            sizes = (len(model.ranks), 1 / len(model.ranks))
            if any(isclose(f, s, rel_tol=1e-4) for f in (factor, factor * steps) for s in sizes):
                return True
    return run.any("norm")


def _on_more_ranks(run: Run) -> Iterator[tuple[Replicas, Run, Replicas, float]]:
    """Yield the models of both runs, and the ratio of their numbers of ranks."""
    for model in run.replicas() if run.wider else ():
        assert run.wider is not None
        for other in run.wider.replicas():
            if other.number == model.number:
                yield model, run.wider, other, len(other.ranks) / len(model.ranks)


def _scaled_back(run: Run, model: Replicas) -> bool:
    """Return True if the program multiplies reduced gradients by the number of ranks."""
    sums = [e["sums"] for events in run.steps("stepped", model) for e in events]
    return all(s and isclose(s * len(model.ranks), t, rel_tol=1e-3) for s, t in sums)


@check(of_models=False)
def _scaled_by_world_size(run: Run) -> Iterator[Finding]:
    """The loss is scaled by the world size, although the wrapper averages gradients.

    Means, or sums divided by a constant or a sum over ranks, are scaled by a factor that
    accumulation does not explain, and that follows the number of ranks in a run on more of them;
    no tensor with a gradient is gathered, and gradients are not scaled back.

    Leave the factor out: after backward, gradients are the mean over ranks.
    """
    for model, wider, other, ratio in _on_more_ranks(run):
        one = [] if _scaled_back(run, model) else _scales(run, model)
        two = _scales(wider, other)
        pairs = list(zip(one, two, strict=False)) if len(one) == len(two) else []
        for by in (ratio, 1 / ratio):
            if pairs and all(
                isclose(f * s * by, g * t, rel_tol=_ROUNDED) for (f, s, _), (g, t, _) in pairs
            ):
                (first, _, a), (second, _, b) = pairs[0]
                scales = zip([a["mean"], *a["scales"]], [b["mean"], *b["scales"]], strict=False)
                near = (y[1] for x, y in scales if isclose(y[0], x[0] * by, rel_tol=_ROUNDED))
                line = next(near, "")
                text = f"factor {first:.3g} with {len(model.ranks)} ranks, {second:.3g} with"
                at = run.reductions(model)[0][0][0]
                yield seen(f"{text} {len(other.ranks)}", at, model.ranks, line)


@check(of_models=False)
def _norm_reduced_twice(run: Run) -> Iterator[Finding]:
    """The norm of gradients that are already reduced is summed over the ranks.

    A sum over ranks is taken of the norm of equal gradients, and clipped gradients are shorter
    in a run on more ranks.

    Use the norm of this rank's gradients, which are equal on all ranks.
    """
    for model, wider, other, ratio in _on_more_ranks(run):
        one, norms = _summed_norms(run, model)
        two, _ = _summed_norms(wider, other)
        if two and any(isclose(one, two * r, rel_tol=0.01) for r in (ratio, sqrt(ratio))):
            text = f"clipped to {one:.3g} with {len(model.ranks)} ranks, to {two:.3g} with"
            yield seen(f"{text} {len(other.ranks)}", norms[0], model.ranks)


@check(of_models=False)
def _summed_gradients(run: Run) -> Iterator[Finding]:
    """Gradients are summed over the ranks, and not divided by their number.

    The gradients at each step are equal on all ranks, and the sum of those after backward; the
    loss is a mean that nothing else scales.

    Divide by the world size after the all_reduce, or reduce with ReduceOp.AVG.
    """
    for model in [*run.replicas(), *run.alone()]:
        scales = _scales(run, model)
        if run.hooked(model) or not scales or not isclose(scales[0][0] * scales[0][1], 1):
            continue
        steps = list(run.steps("stepped", model))
        sums = [([e["sums"][0] or 0.0 for e in events], events[0]["sums"][1]) for events in steps]
        summed = [total and isclose(sum(one), total, rel_tol=1e-3) for one, total in sums]
        equal = not any(differing(events, "gradients") for events in steps)
        if equal and len(summed) >= _FEWEST and all(summed):
            yield seen(f"in all {len(summed)} steps", steps[0][0], model.ranks)
