"""The event log: one MCAP file per run, written while it runs and readable after a kill at any byte.

`format` says what is in the file, `LogWriter` writes it, `LogReader` reads it, `recover` finishes one that was not
closed. Recording a pipeline is `middleware.Recorder`.
"""

from eventbus.log.format import LogError, LogHeader, Round, StageNote
from eventbus.log.reader import Damage, LogReader, RecordedGroup, RecordedRollout, RecordedSample
from eventbus.log.recover import RecoverReport, recover
from eventbus.log.stages import stage_notes
from eventbus.log.writer import LogWriter

__all__ = [
    "Damage",
    "LogError",
    "LogHeader",
    "LogReader",
    "LogWriter",
    "RecordedGroup",
    "RecordedRollout",
    "RecordedSample",
    "RecoverReport",
    "Round",
    "StageNote",
    "recover",
    "stage_notes",
]
