"""Receive webhooks: verify, keep each once, answer at once. WEBHOOK_SECRET=whsec_... python FILE PORT"""

import os
import sqlite3
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from standardwebhooks import Webhook, WebhookVerificationError

webhook = Webhook(os.environ["WEBHOOK_SECRET"])
db = sqlite3.connect(os.environ.get("WEBHOOK_DB", "events.db"), isolation_level=None)
db.execute("CREATE TABLE IF NOT EXISTS event (id TEXT PRIMARY KEY, body TEXT NOT NULL)")


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            event = webhook.verify(body, dict(self.headers))  # signature and age
        except (WebhookVerificationError, ValueError):
            self.send_error(400)
            return
        # A repeat has the same id and changes nothing; the work is done later, from the table.
        db.execute("INSERT OR IGNORE INTO event VALUES (?, ?)", (event["id"], body.decode()))
        self.send_response(204)
        self.end_headers()


if __name__ == "__main__":
    HTTPServer(("", int(sys.argv[1])), Receiver).serve_forever()
