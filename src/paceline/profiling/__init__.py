"""What a target pass and a draft step cost on this machine, and how far that is from what the hardware allows."""

from paceline.profiling.profile import PassProfile, Profile, measure
from paceline.profiling.roofline import PassCost, Roofline, measure_roofline, pass_cost
from paceline.profiling.timing import Timing, time_passes
from paceline.targets.costs import WIDTHS, stored_passes

__all__ = [
    "WIDTHS",
    "PassCost",
    "PassProfile",
    "Profile",
    "Roofline",
    "Timing",
    "measure",
    "measure_roofline",
    "pass_cost",
    "stored_passes",
    "time_passes",
]
