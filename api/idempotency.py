"""`Idempotency-Key` is refused where it is not honoured: a client that sends it counts on it."""

from fastapi import Request

from farm.errors import InvalidFieldError


def refuse_idempotency_key(request: Request) -> None:
    """Refuse the header: to accept it without honouring it would double what the client believes to be safe.

    Raises:
        InvalidFieldError: The request has it.
    """
    if "idempotency-key" in request.headers:
        message = "Idempotency-Key is not supported by this farm yet; send the request without it"
        raise InvalidFieldError("Idempotency-Key", message)
