"""What `distill overview` needs of wandb's server: who asks, and the views that were saved."""

from __future__ import annotations

import gzip
import json
from http.server import ThreadingHTTPServer
from typing import Any

from ports import Handler


class WandbServer(ThreadingHTTPServer):
    """`views`: variables of every mutation that saved one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.views: list[dict[str, Any]] = []


class _Handler(Handler):
    server: WandbServer

    def do_POST(self) -> None:
        body = self.body()
        data: dict[str, Any] = {"viewer": {"id": "1", "entity": "acme", "username": "a", "flags": "{}"}}
        if self.path == "/graphql":  # the rest is telemetry
            asked = json.loads(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            if "upsertView" in asked["query"]:
                self.server.views.append(asked["variables"])
                data = {"upsertView": {"view": {"id": "2", "name": "nw-saved-v"}, "inserted": True}}
        self.answer(200, json.dumps({"data": data}).encode(), {"content-type": "application/json"})
