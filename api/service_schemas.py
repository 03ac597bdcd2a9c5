"""Shapes of what is around videos: links, timelines, API keys, profiles and usage."""

from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

MAX_NAME_CHARS = 128
MAX_CIDRS = 32
MAX_OVERLAP_S = 30 * 86_400


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ContentUrl(_Answer):
    """A link that works without a key until it ends."""

    url: str
    expires_at: int


class TimelineEvent(_Answer):
    """One thing that happened to a video."""

    seq: int
    type: str
    at: str
    attempt: int
    data: dict[str, Any]


class TimelineAttempt(_Answer):
    """One claim by a group."""

    attempt: int
    group: str
    profile: str
    queued_at: str | None
    started_at: str | None
    running_at: str | None
    uploading_at: str | None
    ended_at: str | None
    outcome: str | None
    error_code: str | None
    timings: dict[str, Any]
    peak_memory_mb: int | None


class VideoTimeline(_Answer):
    """Everything that happened to a video, in order."""

    id: str
    object: Literal["video.timeline"] = "video.timeline"
    events: list[TimelineEvent]
    attempts: list[TimelineAttempt]


class ApiKey(_Answer):
    """What may be shown of a key."""

    id: str
    object: Literal["api_key"] = "api_key"
    name: str
    hint: str = Field(description="The first and the last characters of its text.")
    scopes: list[str]
    cidrs: list[str]
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None


class ApiKeyWithText(ApiKey):
    """A key at the only moment when its text is shown."""

    key: str


class ApiKeyList(_Answer):
    """All keys of the account, newest first."""

    object: Literal["list"] = "list"
    data: list[ApiKey]


class ApiKeyRevoked(_Answer):
    """The answer to a revocation."""

    id: str
    object: Literal["api_key.revoked"] = "api_key.revoked"
    revoked: Literal[True] = True


class ApiKeyCreate(_Body):
    """What a new key should be; it may do nothing that the asking key may not."""

    name: str = Field("", max_length=MAX_NAME_CHARS)
    scopes: list[str] | None = Field(None, min_length=1, description="Default: those of the asking key.")
    cidrs: list[str] | None = Field(None, max_length=MAX_CIDRS, description="Default: the asking key's.")
    expires_at: AwareDatetime | None = Field(None, description="RFC 3339 or Unix seconds.")


class ApiKeyRotate(_Body):
    """How long the old key lives beside the new one."""

    overlap_seconds: int = Field(0, ge=0, le=MAX_OVERLAP_S)


class AssetInfo(_Answer):
    """An input image that videos may name."""

    id: str
    object: Literal["asset"] = "asset"
    sha256: str
    width: int
    height: int
    bytes: int
    media_type: str
    created_at: int
    expires_at: int | None = Field(description="If no video refers to it until then.")
    refs: int


class AssetDeleted(_Answer):
    """The answer to a delete."""

    id: str
    object: Literal["asset.deleted"] = "asset.deleted"
    deleted: Literal[True] = True


class ProfileState(_Answer):
    """How a profile is doing now."""

    name: str
    paused: bool = Field(description="Its jobs wait and new ones are refused until an operator resumes it.")
    live_groups: int
    idle_groups: int
    queued: int
    oldest_queued_s: float | None
    clip_s: float | None = Field(description="What a clip with the profile's defaults takes, once known.")
    estimated_start_s: float | None = Field(
        description="For a job submitted now; null where unknown or paused."
    )


class ProfileStateList(_Answer):
    """All profiles of the farm."""

    object: Literal["list"] = "list"
    data: list[ProfileState]


class GpuSeconds(_Answer):
    """GPU-seconds of the day (UTC)."""

    used: int
    reserved: int
    limit: int | None
    resets_in_s: int


class UsageInfo(_Answer):
    """What the account has and may have."""

    object: Literal["usage"] = "usage"
    queued: int
    max_queued: int
    running: int
    max_running: int
    gpu_seconds: GpuSeconds
    requests_per_minute: int
    submits_per_minute: int
