"""A Hub of models on loopback, in memory: what huggingface_hub needs to create one and upload a folder."""

from __future__ import annotations

import base64
import json
from http.server import ThreadingHTTPServer
from typing import Any

from ports import Handler

TOKEN = "hf_" + "a" * 34


class ModelHub(ThreadingHTTPServer):
    """`models`: name → file → content. `created`: bodies of the requests that created one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.models: dict[str, dict[str, bytes]] = {}
        self.created: list[dict[str, Any]] = []


class _Handler(Handler):
    server: ModelHub

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").split("?")[0].removesuffix("/revision/main")
        if name in self.server.models:
            self._answer(200, {"id": name, "sha": "0" * 40, "siblings": []})
        else:
            self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        body = self.body()
        if self.headers["authorization"] != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials"})
        elif self.path == "/api/repos/create":
            wanted = json.loads(body)
            self.server.created.append(wanted)
            name = f"{wanted.get('organization', 'acme')}/{wanted['name']}"
            known = name in self.server.models
            self.server.models.setdefault(name, {})
            self._answer(409 if known else 200, {"url": f"{self.server.url}/{name}"})
        elif self.path == "/api/validate-yaml":  # of README.md
            self._answer(200, {"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            self._answer(200, {"files": [{**one, "shouldIgnore": False} for one in files]})
        else:
            self._commit(self.path.removeprefix("/api/models/").removesuffix("/commit/main"), body)

    def _commit(self, name: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.server.models[name][line["value"]["path"]] = content
        url = f"{self.server.url}/{name}/commit/{'1' * 40}"
        self._answer(200, {"commitUrl": url, "commitOid": "1" * 40, "success": True})

    def _answer(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
        self.answer(status, json.dumps(value).encode(), headers or {})
