"""Drafters: what proposes tokens. A new one is a file in this folder and a line in `DRAFTERS`."""

from __future__ import annotations

from paceline.registry import Registry

DRAFTERS = Registry(
    "drafter",
    "paceline.drafters",
    {
        "auto": "paceline.drafters.auto:Auto",
        "none": "paceline.drafters.none:NoDrafter",
        "prompt-lookup": "paceline.drafters.prompt_lookup:PromptLookup",
        "suffix": "paceline.drafters.suffix:Suffix",
        "recycling": "paceline.drafters.recycling:Recycling",
        "lookahead": "paceline.drafters.lookahead:Lookahead",
        "rest": "paceline.drafters.rest.drafter:Rest",
        "merge": "paceline.drafters.merge:Merge",
        "draft-model": "paceline.drafters.draft_model:DraftModel",
        "early-exit": "paceline.drafters.early_exit.drafter:EarlyExit",
        "medusa": "paceline.drafters.medusa.drafter:Medusa",
        "dflash": "paceline.drafters.dflash.drafter:DFlash",
        "eagle": "paceline.drafters.eagle.drafter:Eagle",
        "mtp": "paceline.drafters.mtp.drafter:Mtp",
        "layer-skip": "paceline.drafters.layer_skip.drafter:LayerSkip",
        "trigram": "paceline.drafters.trigram.drafter:Trigram",
    },
)
