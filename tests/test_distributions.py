"""What the two wheels hold: paceline no heads, and the heads' own all that lies beside the weights."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
LEFTOVERS = shutil.ignore_patterns("build", "dist", "*.egg-info", "__pycache__", ".venv")


def wheel(folder: Path, out: Path) -> Path:
    out.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    [made] = out.iterdir()
    return made


def test_paceline(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=LEFTOVERS)
    made = wheel(copy, tmp_path / "out")
    assert made.stat().st_size < 12_000_000
    with ZipFile(made) as archive:
        names = set(archive.namelist())
    assert not {name for name in names if name.startswith("paceline/checkpoints")}
    for kept in ("*.py", "*.cpp", "*.h", "data/**/*"):
        for path in (copy / "src" / "paceline").rglob(kept):
            if path.is_file():
                assert path.relative_to(copy / "src").as_posix() in names


def test_heads(tmp_path: Path) -> None:
    """Built from a copy without links, as an sdist is: the package's folder holds the files themselves."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "heads" / "smollm2-135m", copy, ignore=LEFTOVERS)
    made = wheel(copy, tmp_path / "out")
    files = ROOT / "src" / "paceline" / "checkpoints" / "smollm2-135m"
    with ZipFile(made) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist() if ".dist-info/" not in info.filename}
    assert sizes == {
        f"paceline_heads_smollm2_135m/{path.relative_to(files).as_posix()}": path.stat().st_size
        for path in files.rglob("*")
        if path.is_file()
    }
