"""What a recorded stream says of itself: checked, explained, counted, compared, and in other formats.

All of it are functions of an iterable of events in the order of `seq`: the events of a `LogReader`, or a list of them.

    check.py      every rule that the events of a pipeline keep, and who broke which
    why.py        the whole lineage of one sample or group
    waste.py      tokens and seconds that no batch has
    diff.py       where two streams part
    export.py     JSON lines, a trace for Perfetto
    slime.py      the files that slime writes for debugging, out of a log and into one
    show.py       all of it as lines of text
    commands.py   `rolloutbus log`
"""

from eventbus.log.inspect.check import Checker, CheckReport, Violation, check
from eventbus.log.inspect.diff import DiffReport, diff
from eventbus.log.inspect.waste import WasteReport, waste
from eventbus.log.inspect.why import Lineage, Target, why

__all__ = [
    "CheckReport",
    "Checker",
    "DiffReport",
    "Lineage",
    "Target",
    "Violation",
    "WasteReport",
    "check",
    "diff",
    "waste",
    "why",
]
