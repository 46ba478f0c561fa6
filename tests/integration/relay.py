"""A TCP relay in front of the server that can lose packets, refuse connections or cut them."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import URL


class Relay:
    """Forwards to the server of ``url``.

    ``drop()`` loses everything silently, as a broken network does; ``cut()`` ends each connection and refuses new ones;
    ``heal()`` forwards again. ``rewrite`` changes what the server says.
    """

    def __init__(self, url: URL, rewrite: Callable[[bytes], bytes] = bytes) -> None:
        self._target = url
        self._rewrite = rewrite
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._forwarding = True
        self._refusing = False
        self._ended = False
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._guard = threading.Lock()
        port = self._listener.getsockname()[1]
        self.url = url.set(host="127.0.0.1", port=port, query={})
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _connect(self) -> socket.socket:
        folder = self._target.query.get("host")
        if isinstance(folder, str) and folder.startswith("/"):
            upstream = socket.socket(socket.AF_UNIX)
            upstream.connect(str(Path(folder) / f".s.PGSQL.{self._target.port or 5432}"))
            return upstream
        return socket.create_connection((self._target.host or "127.0.0.1", self._target.port or 5432))

    def _run(self) -> None:
        while not self._ended:
            with self._guard:
                pairs = list(self._pairs)
                forwarding = self._forwarding
            if not forwarding:
                select.select([], [], [], 0.02)
                continue
            sources = {a: (a, b) for a, b in pairs} | {b: (a, b) for a, b in pairs}
            try:
                ready, _, _ = select.select([self._listener, *sources], [], [], 0.02)
            except (OSError, ValueError):
                continue  # cut meanwhile
            for source in ready:
                if source is self._listener:
                    client, _ = self._listener.accept()
                    if self._refusing:
                        client.close()
                        continue
                    with self._guard:
                        self._pairs.add((client, self._connect()))
                    continue
                pair = sources[source]
                other = pair[1] if source is pair[0] else pair[0]
                try:
                    data = source.recv(65536)
                    if data:
                        other.sendall(self._rewrite(data) if source is pair[1] else data)
                        continue
                except OSError:
                    pass
                self._end(pair)

    def _end(self, pair: tuple[socket.socket, socket.socket]) -> None:
        with self._guard:
            self._pairs.discard(pair)
        for end in pair:
            with contextlib.suppress(OSError):
                end.close()

    def drop(self) -> None:
        self._forwarding = False

    def is_asked(self) -> bool:
        """Whether somebody connects, and gets no answer."""
        return bool(select.select([self._listener], [], [], 0)[0])

    def end_all(self) -> None:
        """End each connection."""
        for pair in list(self._pairs):
            self._end(pair)

    def cut(self) -> None:
        self._refusing = True
        self.end_all()

    def heal(self) -> None:
        self._refusing = False
        self._forwarding = True

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        for pair in list(self._pairs):
            self._end(pair)
        self._listener.close()
