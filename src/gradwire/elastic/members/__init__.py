"""Membership: the store, signs of life, process groups and supervisors of an elastic run."""

from gradwire.elastic.members.environment import (
    members_of_environment,
    parse_address,
    store_of_environment,
)
from gradwire.elastic.members.reports import end_with_reports, report
from gradwire.elastic.members.runtime import Options, Runtime
from gradwire.elastic.members.supervise import SHUTDOWN_SECONDS, serve_store, supervise
from gradwire.elastic.members.waiting import Wait, let_go, may_mean_a_loss, means_a_loss

__all__ = [
    "SHUTDOWN_SECONDS",
    "Options",
    "Runtime",
    "Wait",
    "end_with_reports",
    "let_go",
    "may_mean_a_loss",
    "means_a_loss",
    "members_of_environment",
    "parse_address",
    "report",
    "serve_store",
    "store_of_environment",
    "supervise",
]
