"""In a Jupyter kernel: the progress bar, asynchronous cells, an interrupt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client import BlockingKernelClient, KernelManager

WAIT = 60  # seconds


@pytest.fixture(scope="module")
def kernel() -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager = KernelManager(transport="ipc")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=WAIT)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def outcome(client: BlockingKernelClient, message: str) -> dict[str, str]:
    """What a cell printed on stdout and stderr, and the name of its error."""
    result = {"stdout": "", "stderr": "", "error": ""}
    while True:
        reply: dict[str, Any] = client.get_iopub_msg(timeout=WAIT)
        if reply["parent_header"].get("msg_id") != message:
            continue
        content = reply["content"]
        if reply["msg_type"] == "stream":
            result[content["name"]] += content["text"]
        elif reply["msg_type"] == "error":
            result["error"] = content["ename"]
        elif reply["msg_type"] == "status" and content["execution_state"] == "idle":
            return result


def test_a_notebook(kernel: tuple[KernelManager, BlockingKernelClient]) -> None:
    manager, client = kernel

    load = outcome(client, client.execute("import pyhotexperts as phx\nmodel = phx.Model(n_threads=1)"))
    assert load["error"] == ""
    assert "loading tinymoe" in load["stderr"]
    assert "100" in load["stderr"]

    text = (
        "async for chunk in model.astream('The harbour', max_tokens=8, temperature=0):\n    print(chunk.text, end='')"
    )
    written = outcome(client, client.execute(text))
    assert written["error"] == ""
    assert len(written["stdout"]) > 5

    endless = "print('begun', flush=True)\nwhile True:\n    model.generate('The harbour', temperature=1.5)"
    message = client.execute(endless)
    while True:
        reply = client.get_iopub_msg(timeout=WAIT)
        if reply["msg_type"] == "stream":
            break
    time.sleep(0.3)
    manager.interrupt_kernel()
    assert outcome(client, message)["error"] == "KeyboardInterrupt"
    again = outcome(client, client.execute("print(model.generate('The harbour', max_tokens=3).finish_reason)"))
    assert again["stdout"] == "length\n"
