"""The compiled parts of the search, by numba: for targets that do not run on the native tier's library."""

from paceline.drafters.trigram.counts import learn, rebuild
from paceline.drafters.trigram.many import follow_all
from paceline.drafters.trigram.search import grow

__all__ = ["follow_all", "grow", "learn", "rebuild"]
