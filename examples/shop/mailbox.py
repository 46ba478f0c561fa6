"""An SMTP server on this machine that counts what it gets."""

import socket
from collections import Counter
from typing import Any

from aiosmtpd.controller import Controller


class Mailbox:
    """Listens on ``port``; ``received`` says how many copies came of each message."""

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._controller = Controller(self, hostname="127.0.0.1", port=self.port)

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
        for line in envelope.content.decode().splitlines():
            if line.lower().startswith("message-id:"):
                self.received[line.partition(":")[2].strip()] += 1
        return "250 OK"

    def __enter__(self) -> "Mailbox":
        self._controller.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._controller.stop()
