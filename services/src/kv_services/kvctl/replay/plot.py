"""Hit rate against capacity, as a picture."""

from collections.abc import Sequence
from pathlib import Path

from kv_core.errors import MissingExtraError
from kv_services.kvctl.replay.engine import Outcome
from kv_services.kvctl.replay.errors import ReplayRequestError


def require_plotting() -> None:
    """Raises:
    MissingExtraError: the extra `plot` is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            feature="kvctl replay --plot", module="matplotlib", package="kv-services", extra="plot"
        ) from None


def plot_hit_rates(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Write a curve for each policy; the file's ending says the format.

    Raises:
        ReplayRequestError: the file cannot be written, or its ending is not a known format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for policy in dict.fromkeys(outcome.policy for outcome in outcomes):
        points = sorted((o.capacity_blocks, o.hit_rate) for o in outcomes if o.policy == policy)
        axes.plot([size for size, _ in points], [rate for _, rate in points], marker="o", label=policy)
    axes.set_xscale("log")
    axes.set_xlabel("capacity of a node's memory, blocks")
    axes.set_ylabel("hits by block")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ReplayRequestError(option="--plot", reason=str(error)) from None
