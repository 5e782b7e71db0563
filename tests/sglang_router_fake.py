"""What `SGLangRouter` starts where there is no sglang-router: the part of its protocol that 0.3.2 was seen to speak.

It runs in a process of its own and is imported as `sglang_router`, so it needs nothing but the standard library. The
environment variable FAKE_ROUTER, a JSON object, says what it does otherwise:

    crash       a text: it ends with this error instead of listening
    mute        it never listens
    deaf        it does not hear TERM
    says        lines that it writes
    shouts      the length of one more
    policies    those that it knows
    fails       a text: each worker that is added fails with it
    denies      it does not know a worker by its id: the real one does not for a moment when it was just removed
    keeps       workers are not removed, though it says so
    clings      a text: the removal of each worker fails with it
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import urllib.request
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULTS: dict[str, Any] = json.loads(os.environ.get("FAKE_ROUTER", "{}"))


@dataclasses.dataclass
class RouterArgs:
    """Of the real one's fields those that are set here, and one more."""

    host: str
    port: int
    worker_urls: list[str]
    policy: str
    log_level: str
    request_timeout_secs: int
    retry_max_retries: int
    health_check_interval_secs: int
    health_check_endpoint: str
    health_failure_threshold: int
    health_success_threshold: int
    worker_startup_timeout_secs: int
    worker_startup_check_interval: int
    shutdown_grace_period_secs: int
    cb_failure_threshold: int = 10
    cb_timeout_duration_secs: int = 60
    cb_success_threshold: int = 3
    disable_circuit_breaker: bool = False
    cache_threshold: float = 0.3
    api_key: str | None = None


def launch_router(args: RouterArgs) -> None:
    say(f"pid {os.getpid()}")
    for line in FAULTS.get("says", ()):
        print(line, flush=True)
    print("x" * FAULTS.get("shouts", 0), flush=True)
    if args.policy not in FAULTS.get("policies", (args.policy,)):
        raise KeyError(args.policy)
    if "crash" in FAULTS:
        raise RuntimeError(FAULTS["crash"])
    signal.signal(signal.SIGTERM, lambda *_: say("TERM") if FAULTS.get("deaf") else os._exit(0))
    if FAULTS.get("mute"):
        while True:
            signal.pause()
    Server(args).serve_forever()


def say(text: str) -> None:
    print(
        f"\x1b[2m2026-11-29 21:00:53\x1b[0m \x1b[33m WARN\x1b[0m \x1b[2mfake\x1b[0m: /src/fake.rs:1: {text}", flush=True
    )


def job(kind: str, status: str, message: str | None = None) -> dict[str, Any]:
    return {"job_type": kind, "status": status, "message": message}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, args: RouterArgs) -> None:
        self.args = args
        self.workers: dict[str, dict[str, Any]] = {}
        self.changing = threading.Lock()
        super().__init__((args.host, args.port), Handler)
        for url in args.worker_urls:
            self.add(url, args.api_key)

    def add(self, url: str, api_key: str | None) -> str:
        with self.changing:
            for id, worker in self.workers.items():
                if worker["url"] == url:
                    worker["job_status"] = job("AddWorker", "failed", f"Worker {url} already exists")
                    return id
            id = str(uuid.uuid4())
            self.workers[id] = {"url": url, "is_healthy": False, "job_status": job("AddWorker", "processing")}
        threading.Thread(target=self.register, args=[id, url, api_key], daemon=True).start()
        return id

    def register(self, id: str, url: str, api_key: str | None) -> None:
        message = FAULTS.get("fails")
        while message is None and id in self.workers:
            try:
                headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
                with urllib.request.urlopen(urllib.request.Request(f"{url}/model_info", headers=headers), timeout=5):
                    self.workers[id] = {"url": url, "is_healthy": True}
                    return
            except OSError:
                threading.Event().wait(0.05)
        self.workers[id]["job_status"] = job("AddWorker", "failed", message)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        workers = self.server.workers
        if self.barred():
            return
        if self.path == "/workers":
            listed = [{"id": id, **worker} for id, worker in workers.items() if worker["is_healthy"]]
            self.answer(200, {"workers": listed, "total": len(listed)})
        elif (id := self.path.removeprefix("/workers/")) in workers and not FAULTS.get("denies"):
            self.answer(200, {"id": id, **workers[id]})
        elif self.path == "/arguments":
            self.answer(200, dataclasses.asdict(self.server.args))
        else:
            self.answer(404, {"error": f"Worker {id} not found", "code": "WORKER_NOT_FOUND"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.barred():
            return
        if self.path == "/exit":
            say("the disk is on fire")
            os._exit(body["code"])
        self.answer(202, {"status": "accepted", "worker_id": self.server.add(body["url"], body.get("api_key"))})

    def do_DELETE(self) -> None:
        if self.barred():
            return
        id = self.path.removeprefix("/workers/")
        if "clings" in FAULTS:
            self.server.workers[id]["job_status"] = job("RemoveWorker", "failed", FAULTS["clings"])
        elif not FAULTS.get("keeps"):
            self.server.workers.pop(id)
        self.answer(202, {"status": "accepted", "worker_id": id})

    def barred(self) -> bool:
        key = self.server.args.api_key
        if key is None or self.headers["authorization"] == f"Bearer {key}":
            return False
        self.answer(401, {})
        return True

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        sys.stderr.flush()
