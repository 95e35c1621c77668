"""Search for mistakes in data-parallel programs that raise no error: `gradwire check`.

Each rank of a checked program records what it does, by hooks and patches in that process alone
(`gradwire.check.__main__`). Afterwards the checks compare the ranks' records (`conclude`).
"""

from gradwire.check import data as _data
from gradwire.check import gradient_checks as _gradients
from gradwire.check import state_checks as _state
from gradwire.check.records import Check, Finding, Run, choose, conclude
from gradwire.check.records import Outcome as Outcome
from gradwire.check.records import run_checked as run_checked

# Names imported as themselves are for other packages of gradwire, and not public.
__all__ = ["CHECKS", "Check", "Finding", "Run", "choose", "conclude"]

CHECKS: tuple[Check, ...] = (
    _data.SameBatches(),
    _data.SameOrder(),
    _data.UnevenBatches(),
    _data.SharedSamples(),
    _data.SamplerSeed(),
    _gradients.AroundWrapper(),
    _gradients.GatherWithoutGradient(),
    _gradients.MeanOfMeans(),
    _gradients.ClippedBeforeReduce(),
    _gradients.ScaledByWorldSize(),
    _gradients.SyncedMicroSteps(),
    _state.StaleOptimizer(),
    _state.NoOptimizer(),
    _state.ChangedAfterWrapping(),
    _state.LearningRates(),
    _state.SchedulerOnOneRank(),
    _state.OptimizerState(),
    _state.ParametersDiffer(),
    _state.RandomState(),
    _state.BatchNorm(),
    _state.EvaluationOnOneRank(),
    _state.SlowSave(),
)
"""All checks, in the order of the report."""
