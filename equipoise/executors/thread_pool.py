"""A pool of threads that compute a few items ahead, each with something of its own to work with."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

W = TypeVar("W")
I = TypeVar("I")  # noqa: E741 - an item
T = TypeVar("T")


class ThreadPool(Generic[W]):
    """Threads with one instance each of what they work with, such as a copy of the model."""

    def __init__(self, workers: int, make: Callable[[], W], inner: int = 1):
        """Start a pool.

        Args:
            workers: number of threads.
            make: makes what a thread works with; called once in every thread.
            inner: number of threads inside an operator of torch. With more than one, they wait for each other in a
                loop that takes as much time as work does, so that another busy process slows them down many times.
        """
        self.workers, self.inner, self.make = workers, inner, make
        self.threads_before = torch.get_num_threads()
        torch.set_num_threads(inner)
        self.local = threading.local()
        self.pool = ThreadPoolExecutor(workers, initializer=self._start_thread)

    def _start_thread(self) -> None:
        torch.set_num_threads(self.inner)
        self.local.own = self.make()

    def each(
        self, function: Callable[[W, I], T], items: Sequence[I], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[T]:
        """Yield the result for each item in order, computed only a few items ahead so that memory stays small.

        Args:
            function: computes the result of an item, with what its thread works with.
            items: the items.
            stopped: tells whether to end early; items that are already being computed are waited for.
        """

        def call(item: I) -> T:
            return function(self.local.own, item)

        limit = 4 * self.workers
        waiting: deque[Future[T]] = deque(self.pool.submit(call, item) for item in items[:limit])
        for k in range(len(items)):
            if stopped():
                for future in waiting:
                    future.cancel()
                return
            result = waiting.popleft().result()
            if k + limit < len(items):
                waiting.append(self.pool.submit(call, items[k + limit]))
            yield result

    def close(self) -> None:
        """Stop the threads, and restore the thread settings of torch."""
        self.pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self.threads_before)
