"""An engine that cannot start reports the reason to the waiting API server."""

from __future__ import annotations

from pathlib import Path

import zmq

from tests.support.slowness import deadline
from weft.common.errors import ConfigError
from weft.engine.server.engine_server import tell_why
from weft.engine.server.listener import Listener
from weft.types import messages as m


def test_a_registered_api_server_gets_the_start_error(tmp_path: Path) -> None:
    context = zmq.Context()
    front = context.socket(zmq.DEALER)
    listener = Listener(f"ipc://{tmp_path}/head")
    try:
        front.connect(listener.address)
        front.send(m.encode(m.Hello(versions=(m.OLDEST, m.VERSION), front="f")))
        assert listener.socket.poll(int(deadline(5) * 1000))
        tell_why(listener, ConfigError("--kv-cache-memory is too small"))
        assert front.poll(int(deadline(5) * 1000))
        message = m.decode_to_front(front.recv())
        assert isinstance(message, m.EngineFailed)
        assert message.error.message == "--kv-cache-memory is too small"
    finally:
        front.close(0)
        listener.close()
        context.term()
