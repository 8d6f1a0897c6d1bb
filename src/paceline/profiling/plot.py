"""A profile as a picture: T(k) of each tier over the least it could be, and the share of the roofline it reaches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import OptionError, require
from paceline.files import whole

if TYPE_CHECKING:
    from paceline.profiling.profile import Profile

FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raises OptionError when `draw` could not write there: better before measuring than after."""
    require(path.suffix in FORMATS, f"a plot's file ends in {', '.join(FORMATS)}, not '{path.name}'")
    require(path.absolute().parent.is_dir(), f"there is no folder {path.parent} for the plot")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise OptionError("plots need matplotlib: pip install 'paceline[bench]'") from error


def draw(profiles: Sequence[Profile], path: Path) -> None:
    """Draw profiles of one model into a file of one of the `FORMATS`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter, ScalarFormatter

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    times, shares = figure.subplots(1, 2)
    for profile in profiles:
        widths, passes = list(profile.passes), list(profile.passes.values())
        median = [1e3 * found.median for found in passes]
        spread = [
            [1e3 * (found.median - found.low) for found in passes],
            [1e3 * (found.high - found.median) for found in passes],
        ]
        bars = times.errorbar(widths, median, spread, marker="o", markersize=4, capsize=2, label=profile.tier)
        colour = bars.lines[0].get_color()
        times.plot(widths, [1e3 * found.floor for found in passes], "--", color=colour, linewidth=1)
        shares.plot(
            widths,
            [found.floor / found.median for found in passes],
            "o-",
            markersize=4,
            color=colour,
            label=profile.tier,
        )
    times.plot([], [], "--", color="grey", linewidth=1, label="least, by the roofline")
    times.set(yscale="log", ylabel="milliseconds a pass", title="T(k): median and quartiles")
    times.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter=ScalarFormatter())
    times.yaxis.set_minor_formatter(NullFormatter())
    shares.set(ylabel="share of the roofline", title="least possible / measured")
    shares.set_ylim(0, max(1, shares.get_ylim()[1]))
    shares.yaxis.set_major_formatter(PercentFormatter(1))
    for axes in (times, shares):
        axes.set_xscale("log", base=2)
        axes.set_xticks(widths, [str(width) for width in widths])
        axes.set_xlabel("k, new tokens in the pass")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(_title(profiles[0]))
    with whole(path) as partial:
        figure.savefig(partial, dpi=150, format=path.suffix[1:])


def _title(profile: Profile) -> str:
    roof = profile.roofline
    return (
        f"{profile.model}, {profile.dtype} on {profile.device}, threads: {profile.threads}, "
        f"{profile.context} tokens of context; roofline {roof.bandwidth / 1e9:.0f} GB/s, {roof.flops / 1e9:.0f} GFLOPS"
    )
