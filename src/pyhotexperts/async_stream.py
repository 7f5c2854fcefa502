"""A stream for asyncio: a thread waits for the native code, the event loop does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pyhotexperts.generation import NOT_PICKLED, Stream, finished
from pyhotexperts.results import Chunk, Generation

T = TypeVar("T")


class AsyncStream(AsyncIterator[Chunk]):
    """A running generation: iterate over it with ``async for``; then `result` has the whole.

    It begins with the first chunk that is asked for, and raises then what `Model.stream` raises. The model is busy
    until the stream is exhausted, closed or cancelled: a task that is cancelled stops the generation after the step
    that runs. The stream is also an asynchronous context manager.
    """

    def __init__(self, start: Callable[[], Stream]) -> None:
        self._start = start
        self._stream: Stream | None = None
        self._closed = False
        # One thread: what is asked of the stream happens in this order, and never at the same time.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pyhotexperts-stream")

    async def __anext__(self) -> Chunk:
        if self._closed:
            raise StopAsyncIteration
        try:
            chunk = await self._in_thread(self._next)
        except BaseException:  # cancelled too
            self._begin_to_close()
            raise
        if chunk is None:
            self._begin_to_close()
            raise StopAsyncIteration
        return chunk

    @property
    def result(self) -> Generation:
        """The finished generation.

        Raises
        ------
        PyHotExpertsError
            If the stream was not read to its end.
        """
        return finished(None if self._stream is None else self._stream.result)

    async def aclose(self) -> None:
        """Stop generating; the model is free for other calls when this returns. May be called twice."""
        self._begin_to_close()
        await asyncio.to_thread(self._thread.shutdown)  # waits for what runs

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __reduce__(self) -> str:
        raise TypeError(NOT_PICKLED)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _begin_to_close(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.submit(self._close)
            self._thread.shutdown(wait=False)

    def _next(self) -> Chunk | None:
        if self._stream is None:
            self._stream = self._start()
        return next(self._stream, None)

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
