"""SGLang: servers that generate, and the router in front of them.

    engine     what a pipeline generates with: attempts, aborts, weight updates
    client     HTTP to the workers, and what is asked again
    inprocess  the same to an sglang.Engine of this process
    request    what is sent, checked on our side
    reply      what comes back, into packed columns
    router     the router, started or attached to

Needs `rolloutbus[sglang]`; SGLang itself is not needed where its servers run elsewhere.
"""

from backends.sglang.client import AttemptFailed, RequestRefused, WorkersUnavailable
from backends.sglang.engine import SGLangEngine, WeightUpdate
from backends.sglang.router import CircuitBreaker, RouterError, SGLangRouter

__all__ = [
    "AttemptFailed",
    "CircuitBreaker",
    "RequestRefused",
    "RouterError",
    "SGLangEngine",
    "SGLangRouter",
    "WeightUpdate",
    "WorkersUnavailable",
]
