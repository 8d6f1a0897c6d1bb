"""vLLM's CPU platform, with Ray: a plug-in of vLLM's own kind, found where this folder is on the path.

vLLM asks Ray for a device a worker, and its CPU platform names none. Here a worker is a "GPU" of a Ray that was started
with as many of them as there are to be workers, on a machine that has none.
"""

from vllm.platforms.cpu import CpuPlatform


def register() -> str:
    return "ray_on_cpu.RayOnCpu"


class RayOnCpu(CpuPlatform):
    ray_device_key = "GPU"
