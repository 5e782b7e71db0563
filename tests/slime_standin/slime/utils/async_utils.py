"""All of slime's coroutines run on one event loop, in a thread of its own."""

import asyncio
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()
