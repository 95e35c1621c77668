"""Checks of losses and gradients: what is averaged, where, and what happens to it before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isclose, sqrt
from typing import Any

from gradwire.check.records import Event, Replicas, Run, Seen, check, differing, is_backward

_FEWEST = 2
"""Number of steps that must show the same."""
_CAUSES = {
    "late": (
        "parameters were thawed, added or replaced after wrapping",
        "Thaw, add and copy parameters before wrapping, or call model.refit() on every rank "
        "(gradwire)",
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
    steps = list(run.steps("stepped", model))
    if steps and not run.hooked(model) and differing(steps[-1], "parameters"):
        for events in steps:
            if name := differing(events, "gradients"):
                later = [e for e in run.steps("step", model) if e[0]["step"] > events[0]["step"]]
                return (
                    (events, name) if all(differing(e, "parameters") for e in later) else ([], "")
                )
    return [], ""


@check(
    "local-gradients",
    "gradients stay local, so that replicas become different models",
    "Reduce the gradients of each step",
    explains=("parameters-differ",),
    of_models=False,
)
def _local_gradients(run: Run) -> Iterator[Seen]:
    """Gradients differ between ranks at a step, parameters are never equal again, and the cause was
    seen: a call around the wrapper, parameters that it does not know, different numbers of reduced
    backwards, or a forward or backward in no_sync().
    """
    for model in run.replicas():
        events, name = _first_local_step(run, model)
        if events:
            cause, at, line = _cause(run, model, events, name)
            if cause:
                text, remedy = _CAUSES[cause]
                yield Seen(text, at, model.ranks, line, name, remedy)
    wrapped = all(run.of("model", rank) for rank in run.ranks)
    for model in run.alone() if wrapped and not run.replicas() else ():
        events, name = _first_local_step(run, model)
        if events and not differing(next(run.steps("step", model), events), "parameters"):
            text, remedy = _CAUSES["unused"]
            yield Seen(text, events[0], model.ranks, "", name, remedy)


def _cause(run: Run, model: Replicas, events: Sequence[Event], name: str) -> tuple[str, Event, str]:
    """Return the cause of local gradients, an event that shows it, and its line; "" if unknown."""
    if name in events[0]["late"]:
        return "late", events[0], model.line
    counts, last = [], None
    for rank, event in zip(model.ranks, events, strict=True):
        counts.append(sum(e["syncs"] for e in run.before(rank, event) if is_backward(e, model)))
        since = [e for e in run.window(rank, event, model) if is_backward(e, model)]
        for e in since:
            if str(model.number) in e["around"] and not e["syncs"]:
                return "around", e, e["around"][str(model.number)]
        last = since[-1] if since else last
    if len(set(counts)) > 1:
        return "skipped", events[0], ""
    if last is not None and not last["syncs"]:
        if last["wants"]:
            return "forward", last, last["forward"]
        # steps without any reduction are local steps, which are averaged later
        if counts[0] or any(len(ranks[0]) > 1 for ranks in run.reductions(model)):
            return "no_sync", events[0], ""
    return "", events[0], ""


def shown(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


@check(
    "gather-without-gradient",
    "the loss uses the result of an all_gather that has no gradient",
    "Use gradwire.all_gather or torch.distributed.nn.all_gather, or put this rank's own tensor "
    "back into its place of the result",
    of_models=False,
)
def _gather_without_gradient(run: Run) -> Iterator[Seen]:
    """A tensor that needs a gradient was gathered, and the loss's graph holds the result without
    one.
    """
    found: dict[str, tuple[Event, set[int]]] = {}
    for rank in run.ranks:
        for event in run.of("gathered", rank):
            found.setdefault(event["line"], (event, set()))[1].add(rank)
    for at, ranks in found.values():
        tensor = f"gathered tensor of shape {at['shape']}"
        yield Seen(
            "the gradients of the other ranks' tensors are lost", at, sorted(ranks), "", tensor
        )


@check(
    "mean-of-means",
    "the loss averages over different numbers of tokens or samples",
    "Call model.weight(n) before backward with the number n of tokens or samples (gradwire), "
    "or divide the sum by the mean of n over ranks and micro-steps",
)
def _mean_of_means(run: Run, model: Replicas) -> Iterator[Seen]:
    """In several steps, and not only at the end of a loader, the same term of the loss divides by
    numbers that differ by more than 10 % between ranks or micro-steps, nothing weights it, and no
    hook reduces the gradients.
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
        text = (
            f"in {len(differing)} of {len(reductions)} steps; in the first of them the ranks "
            f"divide by {counts}"
        )
        yield Seen(text, backwards[0][-1], model.ranks)


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


@check(
    "clip-without-gradients",
    "gradients are clipped, or their norm is taken, where there are none",
    "Clip between backward and optimizer.step(); with ShardedOptimizer(reduce_scatter=True), call "
    "optimizer.clip_grad_norm_() or optimizer.clip_grad_value_()",
    of_models=False,
)
def _clip_without_gradients(run: Run) -> Iterator[Seen]:
    """In several steps, a clip or norm comes before the backward, or a sharded optimizer holds the
    gradients.
    """
    found: dict[str, list[tuple[int, Event]]] = {}
    for rank in run.ranks:
        backward, early = False, {}
        for event in run.events[rank]:
            if event["kind"] == "backward":
                backward = True
            elif event["kind"] == "clip" and (event["none"] or not backward):
                early[event["line"]] = event
            elif event["kind"] == "stepped":
                for line, clip in early.items() if backward else ():
                    found.setdefault(line, []).append((rank, clip))
                backward, early = False, {}
    for clips in found.values():
        if len(clips) >= _FEWEST * len({rank for rank, _ in clips}):
            clip = clips[0][1]
            why = "param.grad is None, on" if clip["none"] else "there was no backward since"
            text = f"{why} each rank" if clip["none"] else f"{why} the last step"
            yield Seen(f"{clip['function']}: {text}", clip, sorted({rank for rank, _ in clips}))


@check(
    "clipped-before-reduce",
    "gradients are clipped before they are reduced",
    "Clip after the backward that reduces the gradients, or after the all_reduce",
    of_models=False,
)
def _clipped_before_reduce(run: Run) -> Iterator[Seen]:
    """Clipping changed an optimizer's gradients on a rank while they differed between ranks, and
    at the step they were equal.
    """
    found: dict[str, Seen] = {}
    for model in [*run.replicas(), *run.alone()]:
        for events in run.steps("stepped", model):
            if events[0]["hooked"] or differing(events, "gradients") is not None:
                continue
            clips = [
                [
                    c
                    for c in run.window(rank, e, model)
                    if c["kind"] == "clip" and e["optimizer"] in c["of"]
                ]
                for rank, e in zip(model.ranks, events, strict=True)
            ]
            for same in zip(*clips, strict=False):
                pairs = zip(model.ranks, same, strict=True)
                cut = [(rank, c) for rank, c in pairs if c["before"] > c["limit"]]
                if cut and len({c["digest"] for c in same}) > 1:
                    clip = cut[0][1]
                    text = (
                        f"{clip['function']} cut gradients of {clip['before']:.3g} to "
                        f"{clip['limit']:.3g} while they were this rank's own"
                    )
                    found.setdefault(clip["line"], Seen(text, clip, [rank for rank, _ in cut]))
    yield from found.values()


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
    factors = [(_constant([abs(t["factor"]) for t in terms]), terms) for terms in by_term]
    return [(f, steps, terms[0]) for f, terms in factors if f and all(t["builtin"] for t in terms)]


def _summed_norms(run: Run, model: Replicas) -> tuple[float, list[Event]]:
    """Return the norm of gradients after their norms were summed, if it is constant."""
    after, found = [], []
    for events in run.steps("stepped", model):
        pairs = zip(model.ranks, events, strict=True)
        windows = [run.window(rank, event, model) for rank, event in pairs]
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


@check(
    "scaled-by-world-size",
    "the loss is scaled by the world size, although the wrapper averages gradients",
    "Leave the factor out: after backward, gradients are the mean over ranks",
    of_models=False,
)
def _scaled_by_world_size(run: Run) -> Iterator[Seen]:
    """PyTorch's own means are scaled by a factor that accumulation does not explain, and that
    follows the number of ranks in a run on more of them; no tensor with a gradient is gathered.
    """
    for model, wider, other, ratio in _on_more_ranks(run):
        one, two = _scales(run, model), _scales(wider, other)
        pairs = list(zip(one, two, strict=False)) if len(one) == len(two) else []
        for by in (ratio, 1 / ratio):
            if pairs and all(isclose(f * s * by, g * t) for (f, s, _), (g, t, _) in pairs):
                (first, _, a), (second, _, b) = pairs[0]
                scales = zip(a["scales"], b["scales"], strict=False)
                line = next((y[1] for x, y in scales if isclose(y[0], x[0] * by)), "")
                text = f"factor {first:.3g} with {len(model.ranks)} ranks, {second:.3g} with"
                at = run.reductions(model)[0][0][0]
                yield Seen(f"{text} {len(other.ranks)}", at, model.ranks, line)


@check(
    "norm-reduced-twice",
    "the norm of gradients that are already reduced is summed over the ranks",
    "Use the norm of this rank's gradients, which are equal on all ranks",
    of_models=False,
)
def _norm_reduced_twice(run: Run) -> Iterator[Seen]:
    """A sum over ranks is taken of the norm of equal gradients, and clipped gradients are shorter
    in a run on more ranks.
    """
    for model, wider, other, ratio in _on_more_ranks(run):
        one, norms = _summed_norms(run, model)
        two, _ = _summed_norms(wider, other)
        if two and any(isclose(one, two * r, rel_tol=0.01) for r in (ratio, sqrt(ratio))):
            text = f"clipped to {one:.3g} with {len(model.ranks)} ranks, to {two:.3g} with"
            yield Seen(f"{text} {len(other.ranks)}", norms[0], model.ranks)


@check(
    "summed-gradients",
    "gradients are summed over the ranks, and not divided by their number",
    "Divide by the world size after the all_reduce, or reduce with ReduceOp.AVG",
    of_models=False,
)
def _summed_gradients(run: Run) -> Iterator[Seen]:
    """The gradients at each step are equal on all ranks, and the sum of those after backward; the
    loss is a mean that nothing else scales.
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
            yield Seen(f"in all {len(summed)} steps", steps[0][0], model.ranks)


@check(
    "synced-micro-steps",
    "gradient accumulation communicates in every micro-step",
    "Run all but the last micro-step in `with model.no_sync():`, its forward included",
)
def _synced_micro_steps(run: Run, model: Replicas) -> Iterator[Seen]:
    """Several backwards of the same line were reduced before each step, each on top of the
    gradients of the one before.
    """
    windows: list[list[Event]] = []
    current: list[Event] = []
    accumulates = False
    for event in run.events[model.ranks[0]]:
        if event["kind"] == "forward" and event["model"] == model.number:
            accumulates = event["accumulates"]
        elif event["kind"] == "backward" and model.number in event["models"]:
            if event["syncs"]:
                current = [*current, event] if accumulates else [event]
        elif event["kind"] == "stepped" and str(model.number) in event["models"]:
            windows.append(current)
            current = []
    several = [w for w in windows if len(w) > 1 and len({e["line"] for e in w}) == 1]
    if len(several) >= _FEWEST and len(several) >= len(windows) / 2:
        count = len(several[0])
        text = f"{count} reductions before each step, of which {count - 1} are not needed"
        yield Seen(text, several[0][0], model.ranks)
