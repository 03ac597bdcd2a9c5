"""The farm's metrics: name -> (type, labels). Tests hold code, board and alert rules against it.

`sweep` is ours: the table leaves the labels of the sweeps' two metrics open, and one number for all sweeps
would say nothing.
"""

PROFILE = ("profile",)
SIZED = ("profile", "resolution")
GROUP = ("group", "profile")
HTTP = ("route", "method", "status_class")

TABLE = {
    "magi2_http_requests_total": ("counter", HTTP),
    "magi2_http_request_seconds": ("histogram", HTTP),
    "magi2_submit_seconds": ("histogram", ("outcome",)),
    "magi2_jobs": ("gauge", ("profile", "state")),
    "magi2_queue_oldest_age_seconds": ("gauge", PROFILE),
    "magi2_jobs_finished_total": ("counter", ("profile", "outcome", "error_code")),
    "magi2_queue_wait_seconds": ("histogram", SIZED),
    "magi2_render_seconds": ("histogram", SIZED),
    "magi2_upload_seconds": ("histogram", SIZED),
    "magi2_e2e_seconds": ("histogram", SIZED),
    "magi2_phase_seconds": ("histogram", ("profile", "phase")),
    "magi2_step_seconds": ("histogram", SIZED),
    "magi2_attempts_total": ("counter", PROFILE),
    "magi2_lease_lost_total": ("counter", PROFILE),
    "magi2_fenced_writes_total": ("counter", PROFILE),
    "magi2_poison_total": ("counter", PROFILE),
    "magi2_preemptions_total": ("counter", PROFILE),
    "magi2_group_up": ("gauge", GROUP),
    "magi2_group_busy_ratio": ("gauge", GROUP),
    "magi2_group_restarts_total": ("counter", GROUP),
    "magi2_gpu_memory_bytes": ("gauge", GROUP),
    "magi2_gpu_utilization": ("gauge", GROUP),
    "magi2_waves_total": ("counter", PROFILE),
    "magi2_wave_ghosts_total": ("counter", PROFILE),
    "magi2_wave_wait_seconds": ("histogram", PROFILE),
    "magi2_outbox_unsent": ("gauge", ()),
    "magi2_outbox_oldest_age_seconds": ("gauge", ()),
    "magi2_doorbells_total": ("counter", ("result",)),
    "magi2_webhook_attempts_total": ("counter", ()),
    "magi2_webhook_seconds": ("histogram", ()),
    "magi2_webhook_pending": ("gauge", ()),
    "magi2_webhook_dead": ("gauge", ()),
    "magi2_webhook_blocked_total": ("counter", ("reason",)),
    "magi2_sse_clients": ("gauge", ()),
    "magi2_sse_dropped_total": ("counter", ()),
    "magi2_storage_errors_total": ("counter", ()),
    "magi2_quota_rejections_total": ("counter", ()),
    "magi2_sweep_seconds": ("histogram", ("sweep",)),
    "magi2_sweep_last_success_timestamp": ("gauge", ("sweep",)),
}


def series_of(name: str) -> dict[str, tuple[str, ...]]:
    """Return the series that a metric of the table makes, each with its labels."""
    kind, labels = TABLE[name]
    if kind != "histogram":
        return {name: labels}
    return {f"{name}_bucket": (*labels, "le"), f"{name}_sum": labels, f"{name}_count": labels}


SERIES = {series: labels for name in TABLE for series, labels in series_of(name).items()}
