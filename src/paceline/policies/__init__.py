"""Stopping policies: how far to draft. A new one is a file in this folder and a line in `POLICIES`."""

from __future__ import annotations

from paceline.registry import Registry

POLICIES = Registry(
    "policy",
    "paceline.policies",
    {
        "fixed": "paceline.policies.fixed:Fixed",
        "schedule": "paceline.policies.schedule:Schedule",
        "max-confidence": "paceline.policies.max_confidence:MaxConfidence",
        "adaedl": "paceline.policies.adaedl:AdaEDL",
        "beta-ts": "paceline.policies.beta_ts:BetaTS",
        "cali-ts": "paceline.policies.cali_ts:CaliTS",
        "pace": "paceline.policies.pace:Pace",
        "specdec++": "paceline.policies.specdec_pp:SpecDecPP",
        "disco": "paceline.policies.disco:Disco",
    },
)
