"""`HEAD` wherever `GET` is: the request runs as GET and its body is dropped on the way out.

Routes whose body is costly look at `scope["is_head"]` and do not make one.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadMiddleware:
    """Answers HEAD with what GET would answer, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        # A copy: the server looks at its own scope to know that no body may follow.
        await self._app({**scope, "method": "GET", "is_head": True}, receive, send_head)
