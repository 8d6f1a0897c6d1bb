"""The native tier: a target pass in C++ on the CPU."""

from paceline.targets.native.build import available, instruction_set, possible
from paceline.targets.native.target import NativeTarget, check_model

__all__ = ["NativeTarget", "available", "check_model", "instruction_set", "possible"]
