"""The shapes of the answers, as pydantic models; they are also what /openapi.json shows.

OpenAI's members come first and keep OpenAI's types (integer Unix seconds, `seconds` as text); the farm's own
stand beside them. How a job becomes a `Video` is in `api/presenter.py`.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class VideoError(_Answer):
    """Why a job has no video."""

    code: str
    message: str
    retryable: bool = False


class VideoFacts(_Answer):
    """The picture of the clip."""

    width: int
    height: int
    frames: int
    fps: float
    duration_s: float


class AudioFacts(_Answer):
    """The sound of the clip."""

    sample_rate: int
    channels: int
    duration_s: float


class Urls(_Answer):
    """Where to go next; null while there is nothing at that place."""

    content: str | None
    thumbnail: str | None
    events: str | None
    cancel: str | None


class CreatedWebhook(_Answer):
    """The endpoint that a submit made; the secret is shown here and never again."""

    url: str
    events: list[str]
    signing_secret: str


class Conditioning(BaseModel):
    """What the model was conditioned on: the grid of the image, and tokens by kind for each branch."""

    model_config = ConfigDict(frozen=True, extra="allow")

    reference_grid: list[int] | None = Field(None, description="Rows and columns of image tokens.")
    branches: dict[str, dict[str, int]] = {}


class Video(_Answer):
    """One requested video."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int = Field(ge=0, le=100)
    created_at: int
    completed_at: int | None = Field(description="Set on success only.")
    expires_at: int | None = Field(description="When the content is removed; set on success only.")
    seconds: str
    size: str
    prompt: str
    error: VideoError | None
    remixed_from_video_id: None = None

    state: Literal["queued", "starting", "running", "uploading", "succeeded", "failed", "canceled", "expired"]
    phase: str | None
    step: int
    total_steps: int
    eta_s: float | None
    queue_position: int | None
    attempt: int
    max_attempts: int
    retry_count: int
    profile: str
    group: str | None
    priority: int
    seed: int
    num_frames: int
    fps: float
    resolution: str
    has_input_reference: bool
    metadata: dict[str, str]
    user: str | None
    batch_id: str | None
    queued_at: str
    started_at: str | None
    finished_at: str | None
    cancel_requested_at: str | None
    expires_in: int
    inference_time_s: float | None
    queue_time_s: float | None
    stage_durations: dict[str, float]
    peak_memory_mb: float | None
    peak_host_pss_mb: float | None = None
    conditioning: Conditioning | None = Field(description="Known once the clip is finished.")
    acceleration: str
    reuse: Literal["off", "exact"]
    deterministic: bool
    notices: list[str]
    media_type: str | None
    bytes: int | None
    sha256: str | None
    video: VideoFacts
    audio: AudioFacts
    urls: Urls
    webhook: CreatedWebhook | None = Field(None, description="In the answer to the submit only.")


class VideoList(_Answer):
    """One page of videos."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchItemError(_Answer):
    """Why an item of a batch was not queued."""

    code: str
    message: str
    param: str | None


class BatchItem(_Answer):
    """What became of one item; an item with several seeds comes once for each."""

    index: int
    video_id: str | None
    seed: int | None
    error: BatchItemError | None


class VideoBatch(_Answer):
    """Videos that were submitted together."""

    id: str
    object: Literal["video.batch"] = "video.batch"
    created_at: int
    finished_at: int | None = Field(description="When the last of them had ended for the first time.")
    counts: dict[str, int]
    metadata: dict[str, str]
    items: list[BatchItem] | None = Field(None, description="In the answer to the submit only.")
    webhook: CreatedWebhook | None = Field(None, description="In the answer to the submit only.")


class VideoDeleted(_Answer):
    """The answer to a delete."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class ErrorEntry(_Answer):
    """One problem of a request."""

    loc: str
    msg: str
    type: str


class OpenAiError(_Answer):
    """The error as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None
    code: str


class ProblemBody(_Answer):
    """Every error answer: RFC 9457 with OpenAI's error object inside."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    errors: list[ErrorEntry]
    error: OpenAiError
    state: str | None = Field(None, description="Of a video that has no content yet.")
    video_id: str | None = Field(None, description="Of a video that a sync submit made and did not wait for.")


class ProfileInfo(_Answer):
    """What one profile does where a request says nothing, and what it allows."""

    name: str
    is_live: bool
    engine: dict[str, Any] | None = Field(description="What the engine says about itself, while one is live.")
    default_resolution: str
    max_resolution: str
    default_num_inference_steps: int
    max_num_inference_steps: int
    accelerations: list[str]
    default_acceleration: str
    deterministic: bool
    execution_timeout_s: int
    max_execution_timeout_s: int
    jobs_at_a_time: int


class ModelInfo(_Answer):
    """The served model with every limit that a client would otherwise have to guess."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    contract_version: int
    limits: dict[str, Any]
    profiles: list[ProfileInfo]


class ModelList(_Answer):
    """The models of this farm: one."""

    object: Literal["list"] = "list"
    data: list[ModelInfo]


class Alive(_Answer):
    """The event loop turns."""

    status: Literal["ok"] = "ok"


class Readiness(_Answer):
    """Whether this process can serve, part by part."""

    status: Literal["ready", "not_ready"]
    checks: dict[str, str]
    degraded: list[str]
