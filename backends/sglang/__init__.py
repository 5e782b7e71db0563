"""SGLang: servers that generate, and the router in front of them.

    engine     what a pipeline generates with: its face
    request    what is sent, checked on our side
    model      the vocabulary and the tokenizer of the workers' model
    attempts   asks until a response is done; aborts
    response   what one call of `generate` sends, and what has come of it
    fleet      the workers in use, and which of them have the current weights
    workers    which worker is asked, and which ones rest
    client     HTTP to the workers, and what is asked again
    inprocess  the same to an sglang.Engine of this process
    reply      what comes back, into packed columns
    weights    a weight update, from the pause until all go on
    router     the router, started or attached to; `router_process` is the one that is started

Needs `rolloutbus[sglang]`; SGLang itself is not needed where its servers run elsewhere.
"""

from backends.sglang.client import AttemptFailed, RequestRefused, WorkersUnavailable
from backends.sglang.engine import SGLangEngine
from backends.sglang.router import CircuitBreaker, RouterError, SGLangRouter
from backends.sglang.weights import WeightUpdate

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
