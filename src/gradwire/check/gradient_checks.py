"""Checks of losses and gradients: what is averaged, where, and what happens to it before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from math import isclose, sqrt
from typing import Any

from gradwire.check.records import Event, Replicas, Run, Seen, check, differing, is_of

_FEWEST = 2
"""Number of steps that must show the same."""


def _first_local_step(run: Run, model: Replicas) -> tuple[list[Event], str] | None:
    """Return the first step with different gradients, if parameters are never equal afterwards."""
    steps = list(run.steps("stepped", model))
    if not steps or run.hooked(model) or differing(steps[-1], "parameters") is None:
        return None
    for events in steps:
        name = differing(events, "gradients")
        if name is not None:
            at = events[0]["step"]
            later = [e for e in run.steps("step", model) if e[0]["step"] > at]
            equal = any(differing(e, "parameters") is None for e in later)
            return None if equal else (events, name)
    return None


def _cause(run: Run, model: Replicas) -> tuple[str, Seen] | None:
    """Return the name of the check that explains why gradients stay local, and what it has seen."""
    local = _first_local_step(run, model)
    if local is None:
        return None
    events, name = local
    late = events[0]["late"]
    if name in late:
        text = f"{len(late)} parameters have gradients of their own on each rank"
        tensor = shown(late)
        return "changed-after-wrapping", Seen(text, events[0], model.ranks, model.line, tensor)
    counts, last = [], None
    for rank, event in zip(model.ranks, events, strict=True):
        backwards = [
            e for e in run.before(rank, event) if e["kind"] == "backward" and is_of(e, model)
        ]
        counts.append(sum(e["syncs"] for e in backwards))
        since = [e for e in run.window(rank, event, model) if e["kind"] == "backward"]
        for e in since:
            if str(model.number) in e["around"] and not e["syncs"]:
                seen = Seen(_LOCAL, e, model.ranks, e["around"][str(model.number)], name)
                return "around-wrapper", seen
        last = next((e for e in reversed(since) if model.number in e["models"]), last)
    if len(set(counts)) > 1:
        text = f"at its step {events[0]['number']}, ranks have run {counts} reduced backwards"
        return "step-on-some-ranks", Seen(text, events[0], model.ranks, tensor=name)
    if last is None or last["syncs"]:
        return None
    if last["wants"]:
        return "forward-without-sync", Seen(_LOCAL, last, model.ranks, last["forward"], name)
    # steps without any reduction are local steps, which are averaged later
    if counts[0] or any(len(ranks[0]) > 1 for ranks in run.reductions(model)):
        return "step-without-sync", Seen(_LOCAL, events[0], model.ranks, tensor=name)
    return None


_LOCAL = "the gradients differ between ranks, and parameters never become equal again"


def _caused_by(name: str, run: Run, model: Replicas) -> Iterator[Seen]:
    found = _cause(run, model)
    if found is not None and found[0] == name:
        yield found[1]


def _define_causes() -> None:
    calls_wrapper = "Call the wrapper: model(x) instead of model.module(x) or its methods"
    for name, finds, remedy, evidence in (
        (
            "around-wrapper",
            "the model is called around its wrapper, so that its gradients stay local",
            f"{calls_wrapper}; let forward choose the method",
            "A part of the wrapped module was called with gradients outside of the wrapper's "
            "forward, and no forward of the wrapper was reduced in that backward.",
        ),
        (
            "changed-after-wrapping",
            "parameters were thawed, added or replaced after wrapping, so that nothing reduces "
            "them",
            "Thaw, add and copy parameters before wrapping, or call model.refit() on every rank "
            "(gradwire)",
            "They required no gradient when the module was wrapped.",
        ),
        (
            "step-on-some-ranks",
            "some ranks skip a step of the optimizer",
            "Decide for all ranks together: all_reduce the condition before it is used",
            "Ranks have run different numbers of reduced backwards before the same step.",
        ),
        (
            "forward-without-sync",
            "the forward ran while gradients were not to be reduced, but the backward should be",
            "Run the forward outside of no_sync(), and set require_backward_grad_sync before it",
            "require_backward_grad_sync was False in the forward and True in the backward.",
        ),
        (
            "step-without-sync",
            "the optimizer steps after a backward in no_sync()",
            "Leave no_sync() for the last micro-step before each step, also at the end of an epoch",
            "Other backwards were reduced, or accumulated.",
        ),
    ):
        common = "Gradients differ between ranks at a step, and parameters are never equal again. "
        search: Callable[..., Any] = partial(_caused_by, name)
        search.__doc__ = common + evidence
        check(name, finds, remedy, explains=("parameters-differ",))(search)


_define_causes()


@check(
    "wrapper-unused",
    "a model is wrapped, but another one is trained, whose gradients stay local",
    "Train the wrapper and its parameters, not a copy of the module",
    of_models=False,
)
def _wrapper_unused(run: Run) -> Iterator[Seen]:
    """No wrapper is called, an optimizer has parameters of no wrapper, which were equal at first,
    and their gradients differ.
    """
    wrapped = all(run.of("model", rank) for rank in run.ranks)
    for model in run.alone() if wrapped and not run.replicas() else ():
        local = _first_local_step(run, model)
        first = next(run.steps("step", model), [])
        if local is not None and first and differing(first, "parameters") is None:
            yield Seen(_LOCAL, local[0][0], model.ranks, tensor=local[1])


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


def _constant(values: list[float]) -> float | None:
    same = len(values) >= _FEWEST and all(isclose(v, values[0], rel_tol=1e-4) for v in values)
    return values[0] if same else None


def _scales(run: Run, model: Replicas) -> list[tuple[float, int, Event]]:
    """Return the constant factors of means in the loss, the micro-steps, and a term with each."""
    reductions = [micro for ranks in run.reductions(model) for micro in ranks]
    events = [event for micro in reductions for event in micro]
    if not events or run.any("weight") or any(e["hooked"] or e["gathers"] for e in events):
        return []
    steps = Counter(map(len, reductions)).most_common(1)[0][0]
    found = []
    for terms in zip(*(e["terms"] for e in events), strict=False):
        factor = _constant([abs(t["factor"]) for t in terms])
        if factor is not None and all(t["builtin"] for t in terms):
            found.append((factor, steps, terms[0]))
    return found


def needs_more_ranks(run: Run) -> bool:
    """Return True if only a run on more ranks can tell what scales with their number."""
    for model in run.replicas():
        for factor, steps, _ in _scales(run, model):
            sizes = (len(model.ranks), 1 / len(model.ranks))
            if any(isclose(f, s, rel_tol=1e-4) for f in (factor, factor * steps) for s in sizes):
                return True
    return run.any("norm")


@check(
    "scaled-by-world-size",
    "the loss is scaled by the world size, although the wrapper averages gradients",
    "Leave the factor out: after backward, gradients are the mean over ranks",
)
def _scaled_by_world_size(run: Run, model: Replicas) -> Iterator[Seen]:
    """PyTorch's own means are scaled by a factor that accumulation does not explain, and that
    follows the number of ranks in a run on more of them; no tensor with a gradient is gathered.
    """
    others = [m for m in run.wider.replicas() if m.number == model.number] if run.wider else []
    for other in others:
        assert run.wider is not None
        one, two = _scales(run, model), _scales(run.wider, other)
        ratio = len(other.ranks) / len(model.ranks)
        pairs = list(zip(one, two, strict=False))
        for by in (ratio, 1 / ratio):
            follow = [isclose(f * s * by, g * t, rel_tol=1e-4) for (f, s, _), (g, t, _) in pairs]
            if follow and all(follow) and len(one) == len(two):
                terms = pairs[0][0][2], pairs[0][1][2]
                scales = zip(terms[0]["scales"], terms[1]["scales"], strict=False)
                line = next((b[1] for a, b in scales if isclose(b[0], a[0] * by)), "")
                text = (
                    f"factor {terms[0]['factor']:.3g} on {len(model.ranks)} ranks and "
                    f"{terms[1]['factor']:.3g} on {len(other.ranks)}"
                )
                at = run.reductions(model)[0][0][0]
                yield Seen(text, at, model.ranks, line)


@check(
    "norm-reduced-twice",
    "the norm of gradients that are already reduced is summed over the ranks",
    "Use the norm of this rank's gradients, which are equal on all ranks",
)
def _norm_reduced_twice(run: Run, model: Replicas) -> Iterator[Seen]:
    """A sum over ranks is taken of the norm of equal gradients, and clipped gradients are shorter
    in a run on more ranks.
    """
    others = [m for m in run.wider.replicas() if m.number == model.number] if run.wider else []
    for other in others:
        assert run.wider is not None
        one, norms = _summed_norms(run, model)
        two, _ = _summed_norms(run.wider, other)
        ratio = len(other.ranks) / len(model.ranks)
        if one and two and any(isclose(one, two * r, rel_tol=0.01) for r in (ratio, sqrt(ratio))):
            text = (
                f"clipped gradients have a norm of {one:.3g} on {len(model.ranks)} ranks and of "
                f"{two:.3g} on {len(other.ranks)}"
            )
            yield Seen(text, norms[0], model.ranks)


def _summed_norms(run: Run, model: Replicas) -> tuple[float | None, list[Event]]:
    """Return the norm of gradients after their norms were summed, if it is constant."""
    after, found = [], []
    for events in run.steps("stepped", model):
        norms = [
            next((n for n in run.window(r, e, model) if n["kind"] == "norm"), None)
            for r, e in zip(model.ranks, events, strict=True)
        ]
        if norms[0] is not None and all(n and n["digest"] == norms[0]["digest"] for n in norms):
            after.append(events[0]["norm"])
            found.append(norms[0])
    return _constant(after), found


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
        steps = []
        for events in run.steps("stepped", model):
            before = [e["sums"][0] for e in events]
            terms = [
                [e["terms"] for e in run.window(r, event, model) if e["kind"] == "backward"]
                for r, event in zip(model.ranks, events, strict=True)
            ]
            plain = all(
                t["builtin"] and isclose(abs(t["factor"]) * len(micro), 1, rel_tol=1e-4)
                for micro in terms
                for of_backward in micro
                for t in of_backward[:1]
            )
            if events[0]["hooked"] or None in before or not plain or not all(terms):
                continue
            if differing(events, "gradients") is not None or not any(terms[0]):
                break
            total = sum(before)
            steps.append(
                (abs(total) > 0 and isclose(total, events[0]["sums"][1], rel_tol=1e-3), events)
            )
        if len(steps) >= _FEWEST and all(summed for summed, _ in steps):
            text = f"in all {len(steps)} steps"
            yield Seen(text, steps[0][1][0], model.ranks)


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
