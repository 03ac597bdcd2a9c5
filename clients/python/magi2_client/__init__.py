"""A small client of the farm: submit, wait, download, cancel, verify webhooks. Needs httpx and nothing else.

A submit carries an idempotency key of its own, so a repeat after a lost connection makes no second video.
`wait` follows the event stream and falls back to polling. The API key is sent to the farm only, never to the
object store that downloads are redirected to.
"""

from magi2_client.client import Farm, FarmError, WaitTimeoutError
from magi2_client.webhooks import WebhookError, verify_webhook

__all__ = ["Farm", "FarmError", "WaitTimeoutError", "WebhookError", "verify_webhook"]
