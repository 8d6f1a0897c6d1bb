"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

import torch

from paceline.targets.machine import cpu
from paceline.version import __version__


def machine(device: str = "cpu") -> dict[str, Any]:
    """Hardware and versions that times depend on; ready for JSON."""
    facts: dict[str, Any] = {
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "paceline": __version__,
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts
