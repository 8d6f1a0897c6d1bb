"""Which machine this is: what was measured on another is not true here."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def this_machine() -> str:
    """Its processor and its size, in words."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {cpu()}"


def cpu() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()
