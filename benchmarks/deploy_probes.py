"""What `deploy.py` measures with: a proxy that counts bytes, and a sampler of the memory of clients' processes."""

import asyncio
import threading
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil

BULK = 8192  # bytes; only models come in pieces of this size
MARKS = ("flwr-clientapp", "equipoise.flower.warm.resident")
SAMPLING = 0.05  # seconds between two samples of memory


class Proxy:
    """Ports that forward everything to the SuperLink and count it, until the block ends."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.servers, self.connections = [], 0
        self.bytes = Counter()
        self.bulk = {}
        "times at which pieces of a model passed, and their direction, by node"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _close(self):
        for server in self.servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def open(self, node, address):
        """Open a port for this node, and return its address."""
        host, port = address.rsplit(":", 1)
        seen = self.bulk[node] = []

        async def relay(reader, writer):
            self.connections += 1
            with suppress(OSError, asyncio.CancelledError):
                try:
                    to_reader, to_writer = await asyncio.open_connection(host, int(port))
                    try:
                        up = self._pass(reader, to_writer, "up", seen)
                        await asyncio.gather(up, self._pass(to_reader, writer, "down", seen))
                    finally:
                        to_writer.close()
                finally:
                    writer.close()

        listening = asyncio.start_server(relay, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(listening, self.loop).result()
        self.servers.append(server)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _pass(self, reader, writer, direction, seen):
        while piece := await reader.read(1 << 16):
            self.bytes[direction] += len(piece)
            if len(piece) >= BULK:
                seen.append((time.perf_counter(), direction))
            writer.write(piece)
            await writer.drain()
        writer.write_eof()

    def gaps(self, first, then):
        """Return the seconds between the end of a model in one direction and the start of the next in the other."""
        pairs = [pair for seen in self.bulk.values() for pair in pairwise(seen)]
        return [b - a for (a, was), (b, now) in pairs if (was, now) == (first, then)]


class Through:
    """Processes whose SuperNodes reach the SuperLink through the proxy."""

    def __init__(self, processes, proxy):
        self.processes, self.proxy = processes, proxy

    def __getattr__(self, name):
        return getattr(self.processes, name)

    def start(self, name, command):
        command = list(command)
        if "--superlink" in command:
            at = command.index("--superlink") + 1
            command[at] = self.proxy.open(name, command[at])
        self.processes.start(name, command)


class Memory:
    """Samples the memory of all processes that run clients' messages, until the block ends.

    Shared pages count in parts (PSS), so that the sum over processes is what they take together.
    """

    def __init__(self):
        self.samples = []
        "megabytes, and number of processes"
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.thread.join()

    def _sample(self):
        while not self.stopped.wait(SAMPLING):
            sizes = []
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error, OSError):
                    if any(mark in word for word in process.cmdline() for mark in MARKS):
                        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
                        sizes.append(next(int(line.split()[1]) for line in lines if line.startswith("Pss:")))
            self.samples.append((sum(sizes) / 1024, len(sizes)))

    @property
    def peak(self):
        """Return the largest sum, in megabytes."""
        return max(size for size, _ in self.samples)
