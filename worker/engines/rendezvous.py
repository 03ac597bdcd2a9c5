"""How the ranks of the chaos engine agree: a loopback socket to rank 0, one byte each way a step.

The byte of rank 0 goes to all: whether to stop, or which slots of a wave are called off.

It stands for the collectives of a real engine and fails as they do: it blocks while a peer is frozen and
raises in all ranks when a peer is dead.
"""

import socket
import time

CONNECT_TIMEOUT_S = 30.0


class Rendezvous:
    """The star of sockets; building it waits until all ranks are there."""

    def __init__(self, rank: int, world: int, port: int) -> None:
        self._rank = rank
        self._peers: list[socket.socket] = []
        if world == 1:
            return
        if rank == 0:
            with socket.create_server(("127.0.0.1", port), backlog=world) as server:
                server.settimeout(CONNECT_TIMEOUT_S)
                self._peers = [server.accept()[0] for _ in range(world - 1)]
        else:
            self._peers = [_connect(port)]
        for peer in self._peers:
            peer.settimeout(None)

    def agree(self, wanted: int) -> int:
        """Wait for all ranks and return the byte that rank 0 wants.

        Raises:
            ConnectionError: A peer is gone.
        """
        if self._rank == 0:
            for peer in self._peers:
                _receive(peer)
            for peer in self._peers:
                peer.sendall(bytes([wanted]))
            return wanted
        for peer in self._peers:
            peer.sendall(b"\0")
            return _receive(peer)[0]
        return wanted

    def close(self) -> None:
        """Hang up."""
        for peer in self._peers:
            peer.close()


def _connect(port: int) -> socket.socket:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=CONNECT_TIMEOUT_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _receive(peer: socket.socket) -> bytes:
    data = peer.recv(1)
    if not data:
        raise ConnectionError("a peer rank is gone")
    return data
