"""A judge over HTTP: at most two requests at once, each within five seconds, and asked again when the server fails.

A small server stands where the judge is; it fails its first request. Needs `rolloutbus[http]`. Prints:

    rewards [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    9 requests for 8 samples
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType

import anyio
import httpx

from backends.simulated import SimulatedEngine
from eventbus import BatchSpec, Completion, Pipeline, Prompts, Sample
from middleware import Generate, limit, retry, sample_stage, timeout


class Judge:
    """A stage that is a context manager is opened and closed with its pipeline."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def __aenter__(self) -> None:
        self.client = httpx.AsyncClient()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.client.aclose()

    async def __call__(self, sample: Sample) -> None:
        reply = await self.client.post(self.url, json={"response": sample.response, "label": sample.label})
        if reply.is_server_error:
            raise OSError(f"sample {sample.index}: {reply.status_code} from {self.url}")
        sample.reward = reply.raise_for_status().json()["score"]


class Server(BaseHTTPRequestHandler):
    requests = 0

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Server.requests += 1
        self.send_response(503 if Server.requests == 1 else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": float(asked["response"] == asked["label"])}).encode())

    def log_message(self, *args: object) -> None: ...


async def main(url: str) -> None:
    engine = SimulatedEngine(lambda sample: Completion(str(3 + (sample.index or 0) % 2), tokens=[1], log_probs=[-0.1]))
    judge = sample_stage(Judge(url), name="judge", external=True)  # external: a replay answers from the record
    asked = limit(timeout(retry(judge, attempts=3, on=(OSError, httpx.TransportError)), 5), 2)
    prompts = Prompts([{"prompt": "2+2=", "label": "4"}] * 2, group_size=4)
    async with Pipeline(prompts, [Generate(engine), asked], BatchSpec(groups=2)) as pipeline:
        async for batch in pipeline.rollouts():
            print("rewards", [sample.reward for sample in batch.samples])
            print(f"{Server.requests} requests for {len(batch.samples)} samples")


if __name__ == "__main__":
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        anyio.run(main, f"http://127.0.0.1:{server.server_port}/score")
        server.shutdown()
