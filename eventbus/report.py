"""What a run came to: a table, a plot in the terminal and one in a file.

Rewards are those of what was generated, before any filter (`Summary.reward_mean`): the kept groups alone are biased by
the filter that kept them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

from rich.table import Table

from eventbus.group import Summary
from eventbus.imports import optional_dependency

__all__ = ["Report"]

_SHOWN: Final = 8
"""Drop reasons with a line of their own; the rest are counted together."""

_TITLE: Final = "mean reward of what was generated"


class Report:
    """Collects the summaries of the rollouts that were trained, in order."""

    def __init__(self) -> None:
        self.summaries: list[Summary] = []

    def __len__(self) -> int:
        return len(self.summaries)

    def table(self) -> Table:
        """Two columns: what, how much."""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        rewards = [reward for _, reward in self._rewards()]
        table.add_row("rollouts", str(len(self)))
        table.add_row(_TITLE, f"{rewards[0]:.3f} first, {rewards[-1]:.3f} last" if rewards else "none")
        table.add_row("groups kept", f"{self._total('kept')} of {self._total('submitted')}")
        share = self._total("fallback_loss_tokens") / (self._total("loss_tokens") or 1)
        table.add_row("of these by fallback", f"{self._total('kept_by_fallback')} ({share:.0%} of the loss tokens)")
        for reason, count in sum(self._dropped(), Counter()).most_common():
            table.add_row(f"dropped, {reason}", str(count))
        for outcome in ("failed", "cancelled", "recycled", "carried", "surplus"):
            if count := self._total(outcome):
                table.add_row(outcome, str(count))
        table.add_row("seconds", f"{sum(summary.seconds for summary in self.summaries):.1f}")
        return table

    def terminal_plot(self, width: int) -> str:
        """The rewards over the rollouts, `width` characters wide; empty when there are fewer than two.

        :raises LoadError: plotext is not installed.
        """
        with optional_dependency():
            import plotext
        points = self._rewards()
        if len(points) < 2:
            return ""
        figure = plotext.figure
        figure.clear()
        figure.draw(figure.signal(*map(list, zip(*points, strict=True)), marker="braille").lines())
        figure.plot_size(width, 16)
        figure.title(_TITLE)
        return str(figure.build().string(colorless=True))

    def save(self, path: Path) -> None:
        """Write the rewards, and the groups dropped per reason or kept by a fallback, over the rollouts.

        :raises LoadError: matplotlib is not installed.
        :raises OSError: the file cannot be written.
        """
        with optional_dependency():
            from matplotlib.figure import Figure
        figure = Figure(figsize=(8, 6), layout="constrained")
        rewards, groups = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        if points := self._rewards():
            rewards.plot(*zip(*points, strict=True))
        rewards.set_ylabel(_TITLE)
        rewards.grid(alpha=0.3)
        rollouts = [summary.rollout_id for summary in self.summaries]
        dropped = self._dropped()
        below = [0] * len(rollouts)
        for reason in sum(dropped, Counter()):
            counts = [by_reason[reason] for by_reason in dropped]
            groups.bar(rollouts, counts, bottom=below, width=1.0, label=f"dropped, {reason}", alpha=0.6)
            below = [under + count for under, count in zip(below, counts, strict=True)]
        fillers = [summary.kept_by_fallback for summary in self.summaries]
        groups.plot(rollouts, fillers, color="black", drawstyle="steps-mid", label="kept by fallback")
        groups.set_ylabel("groups")
        groups.set_xlabel("rollout")
        figure.legend(loc="outside lower center", ncols=3, fontsize="small")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)

    def _rewards(self) -> list[tuple[int, float]]:
        """(rollout, mean reward) where there is one: a reward that is a dict has none."""
        return [(each.rollout_id, each.reward_mean) for each in self.summaries if each.reward_mean is not None]

    def _total(self, name: str) -> int:
        return sum(getattr(summary, name) for summary in self.summaries)

    def _dropped(self) -> list[Counter[str]]:
        """Groups per reason, for each rollout; the rarest reasons together as "others"."""
        totals: Counter[str] = Counter()
        for summary in self.summaries:
            totals.update(summary.dropped)
        named = {reason for reason, _ in totals.most_common(_SHOWN)}
        dropped = []
        for summary in self.summaries:
            counts: Counter[str] = Counter()
            for reason, count in summary.dropped.items():
                counts[reason if reason in named else "others"] += count
            dropped.append(counts)
        return dropped
