"""The picture of a multi-turn run: times to the first token, and bytes written a turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class PlotError(RuntimeError):
    """No picture can be drawn here."""


def require_matplotlib() -> Any:
    """Return ``matplotlib.figure.Figure``.

    Raises:
        PlotError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(
            "--plot needs matplotlib, which is not installed: pip install 'tierkv-store[plots]'"
        ) from error
    return Figure


def draw(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    """Write the picture of ``rows`` to a PNG file.

    Raises:
        PlotError: matplotlib is not installed.
    """
    figure = require_matplotlib()(figsize=(10, 4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    times, written = figure.subplots(1, 2)
    names = [row["method"] for row in rows]
    colours = ["#2a6f97" if name.startswith("tierkv") else "#9a9a9a" for name in names]
    megabytes = [row["bytes_written"] / 2**20 for row in rows]
    middle = [row["ttft_p50_s"] for row in rows]
    top = [row["ttft_p99_s"] - row["ttft_p50_s"] for row in rows]
    times.bar(names, middle, color=colours)
    times.errorbar(names, middle, yerr=[[0] * len(rows), top], fmt="none", ecolor="black")
    times.set_ylabel("seconds (P50, whisker to P99)")
    times.set_title("time to first token, later turns", fontsize=10)
    written.bar(names, megabytes, color=colours)
    written.set_ylabel("MiB")
    written.set_title("written a later turn", fontsize=10)
    written.set_yscale("symlog", linthresh=1)
    above = [row["ttft_p99_s"] for row in rows]  # labels stand clear of the whiskers
    for axes, labels, heights, form in (
        (times, middle, above, "{:.2f}"),
        (written, megabytes, megabytes, "{:.1f}"),
    ):
        for at, (label, height) in enumerate(zip(labels, heights, strict=True)):
            axes.annotate(
                form.format(label), (at, height), ha="center", va="bottom", fontsize=8,
                xytext=(0, 2), textcoords="offset points",
            )  # fmt: skip
        axes.tick_params(axis="x", labelrotation=30, labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    if max(middle) > 5 * min(middle):
        times.set_yscale("log")
    figure.savefig(path, dpi=130, format="png")
