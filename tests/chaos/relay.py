"""The network between workers and server: for each worker a port of its own, whose traffic can be cut, delayed, lost.

What a broken network does not deliver is kept and delivered when it is healed, as a sender's TCP would do: an old
COMMIT may arrive long after its worker has given it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["Link", "Network"]

# Closing with this sends a reset, not an orderly end.
_RESET = struct.pack("ii", 1, 0)


class Link:
    """The way of one worker to the server. Its methods may be called from any thread."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._open: dict[str, asyncio.Event] = {}
        self._delay = 0.0
        self._refusing = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    # -- the nemesis -------------------------------------------------------------------------------------------

    def lose(self, *directions: str) -> None:
        """Deliver nothing any more ``"up"`` (to the server) or ``"down"`` (to the worker); no direction: neither."""
        self._network.call(lambda: [self._open[way].clear() for way in directions or ("up", "down")])

    def delay(self, seconds: float) -> None:
        """Deliver later from now on."""
        self._delay = seconds

    def cut(self, *, reset: bool) -> None:
        """End each connection, in order or by a reset, and refuse new ones."""
        self._refusing = True
        self._network.call(lambda: self._end_all(reset))

    def heal(self) -> None:
        """Deliver everything, at once."""
        self._refusing, self._delay = False, 0.0
        self._network.call(lambda: [gate.set() for gate in self._open.values()])

    # -- the loop ----------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        for way in ("up", "down"):
            self._open[way] = asyncio.Event()
            self._open[way].set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def end(self) -> None:
        if self._server is not None:
            self._server.close()
        self._end_all(reset=False)

    def _end_all(self, reset: bool) -> None:
        for writer in list(self._writers):
            if reset:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        self._writers.add(writer)
        try:
            await self._open["up"].wait()
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._network.server_port)
        except OSError:
            self._writers.discard(writer)
            writer.transport.abort()
            return
        self._writers.add(up_writer)
        pumps = (self._pump("up", reader, up_writer), self._pump("down", up_reader, writer))
        # Each direction ends by itself: the end of one is delivered after what came before it.
        await asyncio.gather(*pumps, return_exceptions=True)
        for one in (writer, up_writer):
            self._writers.discard(one)
            one.transport.abort()

    async def _pump(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                with contextlib.suppress(ConnectionError):
                    data = await reader.read(65536)
                    if self._delay:
                        await asyncio.sleep(self._delay)
                    await self._open[way].wait()
                    if data:
                        writer.write(data)
                        await writer.drain()
                        continue
                return
        finally:
            writer.close()


class Network:
    """The links of all workers, in one thread."""

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.links: dict[str, Link] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="network")
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> None:
        """Run ``function`` in the network's thread and wait for it."""

        async def run() -> None:
            function()

        self._run(run())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def link(self, name: str) -> Link:
        """The link of worker ``name``, made if it is new."""
        if name not in self.links:
            link = Link(self)
            self._run(link.listen())
            self.links[name] = link
        return self.links[name]

    def close(self) -> None:
        """End everything."""

        async def end() -> None:
            for link in self.links.values():
                link.end()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
