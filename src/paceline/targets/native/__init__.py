"""The native tier: a target pass in C++ for the Llama family on CPU."""

from paceline.targets.native.build import available
from paceline.targets.native.target import NativeTarget

__all__ = ["NativeTarget", "available"]
