"""A webhook receiver in a thread of the test: takes everything and remembers it."""

import json
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Receiver:
    """Every message that was delivered: type -> id of the video -> ids of messages."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                receiver.take(body["type"], body["data"]["id"], self.headers["webhook-id"])
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def take(self, kind: str, video_id: str, message_id: str) -> None:
        """Remember a message."""
        with self._lock:
            self.seen[kind][video_id].add(message_id)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
