"""The first page: how the farm is doing, and what needs somebody."""

from api.dashboard.access import desk_of
from api.dashboard.pages import Ask, Context, Page
from farm.profile_control import paused_profiles
from farm.watch.overview import Overview, overview

MAX_LAG_S = 30.0
MAX_FAILURE_RATE = 0.2
OLD_S = 3600.0


async def load(ask: Ask) -> Context:
    """Read the overview and what is degraded; profiles that nobody serves, uses or paused are left out."""
    paused = await ask.services.look(paused_profiles)
    found = await ask.services.look(overview, paused)
    readiness = await desk_of(ask.request).readiness.answer()
    warnings = warnings_of(found, readiness.degraded, readiness.checks)
    return {"farm": found, "paused": paused, "warnings": warnings}


def warnings_of(farm: Overview, degraded: list[str], checks: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return what needs somebody, as (severity, sentence, where to look)."""
    found = [
        ("bad", f"{part.replace('_', ' ')}: {said}", "/system")
        for part, said in checks.items()
        if said != "ok"
    ]
    found += [("warn", f"degraded: {part.replace('_', ' ')}", "/system") for part in degraded]
    for profile in farm.profiles:
        if profile.queued and not profile.groups_up:
            text = _count(profile.queued, "job waits", "jobs wait")
            found.append(("bad", f"{text} for {profile.name}, which no group serves", "/groups"))
        elif profile.oldest_s is not None and profile.oldest_s > OLD_S:
            found.append(("warn", f"the oldest job of {profile.name} has waited for over an hour", "/queue"))
    if farm.sick_groups:
        found.append(("bad", _count(farm.sick_groups, "group is sick", "groups are sick"), "/groups"))
    if farm.outbox_oldest_s is not None and farm.outbox_oldest_s > MAX_LAG_S:
        found.append(("bad", "doorbells wait in the outbox: is a ticker running?", "/system"))
    if farm.failure_rate_1h is not None and farm.failure_rate_1h > MAX_FAILURE_RATE:
        found.append(("warn", "more than one job in five failed within the last hour", "/jobs?state=failed"))
    if farm.disabled_endpoints:
        text = _count(farm.disabled_endpoints, "webhook endpoint was", "webhook endpoints were")
        found.append(("warn", f"{text} disabled because it kept failing", "/webhooks"))
    return found


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


PAGES = (Page("/", "overview", "overview", load, regions=("warnings", "totals", "profiles"), every_s=3.0),)
