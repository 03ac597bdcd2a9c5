"""The bodies and answers of webhook management, as pydantic models; they are also what /openapi.json shows.

OpenAI's members come first (`client.webhooks` works unchanged), the farm's own stand beside them. Times of
OpenAI's members are Unix seconds. Secrets are in two answers only: to a creation and to a rotation.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from farm.webhooks.messages import DEFAULT_EVENT_TYPES, EVENT_TYPES

MAX_NAME_CHARS = 128
MAX_UNIX_S = 253_402_300_799  # the last second of the year 9999

EventType = Annotated[str, Field(json_schema_extra={"enum": list(EVENT_TYPES)})]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS, pattern=r"^[^\x00-\x1f\x7f]*$")]
Url = Annotated[str, Field(json_schema_extra={"format": "uri"})]
EventTypes = Annotated[list[EventType], Field(min_length=1, max_length=len(EVENT_TYPES))]
Status = Literal["pending", "leased", "ok", "dead", "canceled"]
UnixTime = Annotated[int, Field(ge=0, le=MAX_UNIX_S)]
MaxInFlight = Annotated[int, Field(ge=1, le=10, description="Deliveries on the wire at a time.")]
Payload = Annotated[
    Literal["thin", "full"], Field(description="Full sends the whole video object, prompt included.")
]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class EndpointCreate(_Body):
    """A new endpoint; without `video_id` it hears of every video of the account."""

    url: Url
    name: Name = ""
    event_types: EventTypes = list(DEFAULT_EVENT_TYPES)
    payload: Payload = "thin"
    max_in_flight: MaxInFlight = 1
    ed25519: bool = Field(default=False, description="Sign with an Ed25519 key too.")
    video_id: str | None = Field(default=None, max_length=64)


class EndpointUpdate(_Body):
    """What is to be changed; members that are left out stay as they are."""

    url: Url = ""
    name: Name = ""
    event_types: EventTypes = list(DEFAULT_EVENT_TYPES)
    payload: Payload = "thin"
    max_in_flight: MaxInFlight = 1
    ed25519: bool = False
    enabled: bool = True


class RotateSecret(_Body):
    """How the old secret ends."""

    keep_old_secret_active_for_24_hours: bool = False


class SampleRequest(_Body):
    """Which event to send a sample of."""

    event_type: EventType = "webhook.test"


class ReplayRange(_Body):
    """A stretch of time, by when the events happened."""

    since: UnixTime
    until: UnixTime | None = None
    only_failed: bool = True


class PageQuery(BaseModel):
    """Where a page begins and how long it is."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = Field(None, description="Last id of the page before.")
    limit: int = Field(20, ge=1, le=100)


class EndpointListQuery(PageQuery):
    """Endpoints of the whole account, or of one video."""

    video_id: str | None = Field(None, description="Endpoints that hear of this video only.")


class DeliveryListQuery(PageQuery):
    """Deliveries of one endpoint."""

    status: Status | None = None
    event_type: EventType | None = None


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WebhookEndpoint(_Answer):
    """An endpoint."""

    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    created_at: int
    updated_at: int
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str | None
    video_id: str | None = Field(description="Null: every video of the account.")
    payload: str
    max_in_flight: int
    enabled: bool
    disabled_reason: str | None
    failing_since: int | None = Field(description="The first failure since the last success.")
    old_secret_expires_at: int | None = Field(description="Until when a rotated secret signs too.")
    ed25519_public_key: str | None


class WebhookEndpointWithSecret(WebhookEndpoint):
    """An endpoint with its secret, which is shown now and never again."""

    signing_secret: str


class WebhookEndpointList(_Answer):
    """One page of endpoints, newest first."""

    object: Literal["list"] = "list"
    data: list[WebhookEndpoint]
    first_id: str | None
    last_id: str | None
    has_more: bool


class WebhookEndpointDeleted(_Answer):
    """The answer to a delete."""

    id: str
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"
    deleted: Literal[True] = True


class WebhookEndpointTest(_Answer):
    """What came of a sample; `success` says that the receiver answered, `status_code` what."""

    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    webhook_endpoint_id: str
    event_type: str
    delivery_id: str
    success: bool = False
    status_code: int | None = None
    error: str | None = None


class WebhookEndpointReplay(_Answer):
    """How many deliveries go out again."""

    object: Literal["webhook_endpoint.replay"] = "webhook_endpoint.replay"
    webhook_endpoint_id: str
    replayed: int


class WebhookEventTypeList(_Answer):
    """The types that an endpoint may subscribe to."""

    object: Literal["list"] = "list"
    data: list[str]


class WebhookDelivery(_Answer):
    """One message for one endpoint, and how far it got."""

    id: str
    object: Literal["webhook_delivery"] = "webhook_delivery"
    webhook_endpoint_id: str
    event_id: str = Field(description="The webhook-id that the receiver sees.")
    event_type: str
    video_id: str | None
    status: str = Field(description="pending, leased (on the wire), ok, dead or canceled.")
    attempts: int
    max_attempts: int
    created_at: int
    next_attempt_at: int | None
    last_status_code: int | None
    last_error: str | None


class WebhookAttempt(_Answer):
    """One POST."""

    n: int
    at: str
    duration_ms: int
    status_code: int | None
    error: str | None


class WebhookDeliveryDetail(WebhookDelivery):
    """A delivery with its event (without the links, which are made when it is sent) and all attempts."""

    event: dict[str, Any]
    attempt_log: list[WebhookAttempt]


class WebhookDeliveryList(_Answer):
    """One page of deliveries, newest first."""

    object: Literal["list"] = "list"
    data: list[WebhookDelivery]
    first_id: str | None
    last_id: str | None
    has_more: bool


class PublicKeys(_Answer):
    """A JSON Web Key Set (RFC 7517)."""

    keys: list[dict[str, str]]
