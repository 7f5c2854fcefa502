"""Streams for asyncio: the same text, an event loop that goes on, cancellation, errors."""

from __future__ import annotations

import asyncio
import pickle
import threading

import pytest
from test_generation import PROMPT

import pyhotexperts as phx


def test_an_async_stream_gives_the_text_of_generate(model: phx.Model) -> None:
    async def read() -> tuple[str, phx.Generation]:
        stream = model.astream(PROMPT, seed=5, max_tokens=20)
        with pytest.raises(phx.PyHotExpertsError, match="not finished"):
            _ = stream.result
        text = "".join([chunk.text async for chunk in stream])
        assert [chunk async for chunk in stream] == []
        return text, stream.result

    text, result = asyncio.run(read())
    whole = model.generate(PROMPT, seed=5, max_tokens=20)
    assert text == result.text == whole.text
    assert result.tokens == whole.tokens


def test_the_event_loop_goes_on(model: phx.Model) -> None:
    async def read() -> int:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.001)

        heart = asyncio.create_task(beat())
        before = beats
        # one call of the native code, which takes some tenths of a second
        async with model.astream([7] * 1500, max_tokens=1) as stream:
            async for _ in stream:
                pass
        heart.cancel()
        return beats - before

    assert asyncio.run(read()) > 20


def test_chat(model: phx.Model) -> None:
    messages = [{"role": "user", "content": "Who?"}]

    async def read(chatty: phx.Model) -> str:
        return "".join([c.text async for c in chatty.astream_chat(messages, temperature=0, max_tokens=8)])

    with phx.Model(n_threads=1, chat_template="{{ messages[0].content }}") as chatty:
        assert asyncio.run(read(chatty)) == chatty.chat(messages, temperature=0, max_tokens=8, reuse_prefix=False).text
    with pytest.raises(phx.UnavailableError, match="no chat template"):
        asyncio.run(read(model))


def test_a_cancelled_task_frees_the_model(model: phx.Model) -> None:
    async def cancel_soon() -> None:
        started = asyncio.Event()

        async def read() -> None:
            async for _ in model.astream(PROMPT, max_tokens=1900, temperature=1.5):
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        with pytest.raises(phx.BusyError):
            model.reset()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(500):  # the step that runs ends first
            try:
                return model.reset()
            except phx.BusyError:
                await asyncio.sleep(0.01)
        raise AssertionError("the model stayed busy")

    asyncio.run(cancel_soon())


def test_closing_frees_the_model_at_once(model: phx.Model) -> None:
    async def read_one() -> None:
        stream = model.astream(PROMPT, max_tokens=1900, temperature=1.5)
        await stream.__anext__()
        await stream.aclose()
        model.reset()
        await stream.aclose()
        assert [c async for c in stream] == []
        async with model.astream(PROMPT, max_tokens=50) as other:
            async for _ in other:
                break
        model.reset()
        async with model.astream(PROMPT):
            pass  # never begun
        model.reset()

    asyncio.run(read_one())
    assert not [t for t in threading.enumerate() if t.name.startswith("pyhotexperts-stream")]


def test_errors_come_with_the_first_chunk(model: phx.Model) -> None:
    async def read(**sampling: object) -> None:
        async for _ in model.astream(PROMPT, **sampling):
            pass

    with pytest.raises(phx.ConfigError, match="temperature"):
        asyncio.run(read(temperature=-1))
    with model.stream(PROMPT, max_tokens=3) as stream:
        next(stream)
        with pytest.raises(phx.BusyError):
            asyncio.run(read())
    asyncio.run(read(max_tokens=2))


def test_streams_are_not_pickled_and_results_are(model: phx.Model) -> None:
    with model.stream(PROMPT, max_tokens=3, logprobs=1) as stream:
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            pickle.dumps(stream)
        list(stream)
        assert pickle.loads(pickle.dumps(stream.result)) == stream.result
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        pickle.dumps(model.astream(PROMPT))
    sampling = phx.Sampling(json_schema=True, logit_bias={5: 1.0})
    assert pickle.loads(pickle.dumps(sampling)) == sampling
