"""Who listens where among the processes of a run, looked at again and again while it goes on."""

from __future__ import annotations

import contextlib
import re
import threading

import httpx
import psutil

_PORT = re.compile(r"--port[ =](\d+)")


class Listeners:
    """Use inside `with`. The launcher's server, and those with --port on their command line, speak HTTP."""

    def __init__(self, launcher: int) -> None:
        self.addresses: dict[str, set[str]] = {}
        """Address → the processes that listened there."""
        self.answers: dict[int, tuple[int, int, int]] = {}
        """Port of a server → what /health answers: to us, for another host, to a page in a browser."""
        self._launcher, self._over = launcher, threading.Event()
        self._thread = threading.Thread(target=self._look_again)

    def _look_again(self) -> None:
        while not self._over.wait(0.2):
            with contextlib.suppress(psutil.Error):
                launcher = psutil.Process(self._launcher)
                for process in [launcher, *launcher.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        self._look(process)

    def _look(self, process: psutil.Process) -> None:
        guardian = process.parent()  # knows the command line that a title hides
        words = " ".join([*process.cmdline(), *(guardian.cmdline() if guardian else [])])
        for one in process.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                self.addresses.setdefault(one.laddr.ip, set()).add(words)
                if process.pid == self._launcher or str(one.laddr.port) in _PORT.findall(words):
                    self._ask(one.laddr.port)

    def _ask(self, port: int) -> None:
        if port in self.answers:
            return
        options = ({}, {"host": f"a.page.example:{port}"}, {"origin": "http://a.page.example"})
        with contextlib.suppress(httpx.TransportError), httpx.Client(trust_env=False) as client:
            url = f"http://127.0.0.1:{port}/health"
            first, *others = (client.get(url, headers=headers).status_code for headers in options)
            if first == 200:
                self.answers[port] = (first, others[0], others[1])

    def __enter__(self) -> Listeners:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
