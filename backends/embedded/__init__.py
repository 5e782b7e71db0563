"""A real engine and a real trainer, small enough to read in one sitting: a transformer that runs on the CPU, inside the
process, so that a whole reinforcement-learning run fits into a minute and a test.

    model      the transformer, and the cache of keys and values that generation needs
    engine     continuous batching: what an engine has to do for a pipeline
    trainer    a clipped policy gradient: what a trainer has to do with a batch

Needs `rolloutbus[embedded]`.
"""

from __future__ import annotations

from eventbus.imports import optional_dependency

with optional_dependency():
    from backends.embedded.engine import EmbeddedEngine
    from backends.embedded.trainer import EmbeddedTrainer

__all__ = ["EmbeddedEngine", "EmbeddedTrainer"]
