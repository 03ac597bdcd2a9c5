"""Errors become one body; what is not meant for clients stays out of it."""

import pytest
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from api.problems import RefusedError, as_farm_error, problem_body, problem_response
from farm.errors import FarmError, NotFinishedError
from magi2.contract import Problem

pytestmark = pytest.mark.req("F-10")

LOST = Exception("connection to server at 10.0.0.5 failed")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "invalid_request_error"),
        (409, "conflict_error"),
        (410, "not_found_error"),
        (413, "invalid_request_error"),
        (415, "invalid_request_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_status_has_its_type_in_openais_object(status: int, kind: str) -> None:
    assert problem_body(FarmError("a_code", status, "text"), "req_1")["error"]["type"] == kind


@pytest.mark.parametrize(
    ("code", "http"),
    [
        ("seconds_unsupported", ("unsupported_duration", 422)),
        ("size_incomplete", ("unsupported_size", 422)),
        ("size_invalid", ("unsupported_size", 422)),
        ("size_unsupported", ("unsupported_size", 422)),
        ("size_resolution_mismatch", ("unsupported_size", 422)),
        ("resolution_unsupported", ("unsupported_size", 422)),
        ("num_frames_unsupported", ("unsupported_num_frames", 422)),
        ("fps_unsupported", ("unsupported_fps", 422)),
        ("deterministic_mismatch", ("deterministic_mismatch", 422)),
        ("profile_limit", ("profile_limit", 422)),
        ("image_undecodable", ("invalid_image", 400)),
        ("image_too_small", ("invalid_image", 400)),
        ("image_aspect", ("invalid_image", 400)),
        ("image_count", ("invalid_field", 422)),
        ("output_size_invalid", ("invalid_field", 422)),
        ("field_unsupported", ("invalid_field", 422)),
        ("prompt_missing", ("invalid_field", 422)),
    ],
)
def test_first_problem_decides_code_and_status(code: str, http: tuple[str, int]) -> None:
    error = RefusedError([Problem("a", code, "first"), Problem("b", "fps_unsupported", "second")])
    body = problem_body(error, "req_1")
    assert (body["code"], body["status"]) == http
    assert body["type"] == f"urn:magi2:error:{http[0]}"
    assert [entry["type"] for entry in body["errors"]] == [code, "fps_unsupported"]
    assert (body["detail"], body["error"]["param"]) == ("first", "a")


@pytest.mark.parametrize(
    ("exc", "code", "status"),
    [
        (OperationalError("SELECT 1", {}, LOST), "no_database", 503),
        (InterfaceError("SELECT 1", {}, LOST), "no_database", 503),
        (PoolTimeoutError("QueuePool limit"), "no_database", 503),
        (IntegrityError("INSERT INTO job", {}, LOST), "internal", 500),
        (IntegrityError("INSERT", {}, LOST, connection_invalidated=True), "no_database", 503),
        (ValueError("/etc/passwd"), "internal", 500),
        (HTTPException(404), "not_found", 404),
        (HTTPException(405), "method_not_allowed", 405),
        (HTTPException(400, "Traceback /etc/passwd"), "invalid_request", 400),
        (ClientDisconnect(), "client_disconnected", 400),
        (FarmError("queue_full", 429, "wait"), "queue_full", 429),
    ],
)
def test_foreign_errors_are_translated_without_their_text(exc: Exception, code: str, status: int) -> None:
    error = as_farm_error(exc)
    body = str(problem_body(error, "req_1"))
    assert (error.code, error.http_status) == (code, status)
    assert [word for word in ("10.0.0.5", "SELECT", "INSERT", "/etc", "Traceback") if word in body] == []


def test_wrong_parameters_are_named() -> None:
    wrong = [{"loc": ("query", "wait"), "msg": "Input should be", "type": "int_parsing", "input": "soon"}]
    error = as_farm_error(RequestValidationError(wrong))
    assert [(entry.loc, entry.msg) for entry in error.errors] == [
        ("wait", "wait must be an integer (got soon)")
    ]


def test_headers_follow_the_status() -> None:
    answers = {
        status: problem_response(FarmError("a", status, "b", retry_after_s=0), "req_1").headers
        for status in (401, 408, 413, 429)
    }
    assert answers[401]["www-authenticate"] == "Bearer"
    assert answers[408]["connection"] == answers[413]["connection"] == "close"
    assert answers[429]["retry-after"] == "1"
    assert "connection" not in answers[429]


def test_state_is_told_with_unfinished_content() -> None:
    assert problem_body(NotFinishedError("video_1", "running"), "req_1")["state"] == "running"
    assert "state" not in problem_body(FarmError("a", 400, "b"), "req_1")
