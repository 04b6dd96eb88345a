"""The socket that the server listens on."""

import socket

from ddtree.server.run import listen


def test_connections_send_small_pieces_at_once():
    """Without this a kept connection stalls by a delayed acknowledgement, 40 ms, from its second answer on."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
