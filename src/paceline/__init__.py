"""paceline: faster decoding of any Hugging Face causal language model, without changing its output."""

from paceline.api import LLM, Output, load
from paceline.decoding.sampling import SamplingParams
from paceline.drafters import DRAFTERS
from paceline.errors import PacelineError
from paceline.policies import POLICIES
from paceline.version import __version__

__all__ = ["DRAFTERS", "LLM", "POLICIES", "Output", "PacelineError", "SamplingParams", "__version__", "load"]
