"""`gradwire plan`: prediction of a step on other links and numbers of ranks, for each hook."""

from gradwire.tuning.plan.predict import Row as Row
from gradwire.tuning.plan.predict import measure as measure
from gradwire.tuning.plan.predict import predict as predict
from gradwire.tuning.plan.predict import predict_here as predict_here
from gradwire.tuning.plan.predict import profile_here as profile_here
from gradwire.tuning.plan.profile import Profile as Profile
from gradwire.tuning.plan.profile import given as given
from gradwire.tuning.plan.profile import load_factory as load_factory
from gradwire.tuning.plan.profile import profile as profile
from gradwire.tuning.plan.report import draw as draw
from gradwire.tuning.plan.report import table as table
