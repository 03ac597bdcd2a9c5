"""Everything that the dashboard has: pages in the order in which their paths are tried, files, changes."""

from api.dashboard import accounts, groups, job_changes, jobs, overview, queue, system, webhooks

PAGES = (
    *overview.PAGES,
    *queue.PAGES,
    *jobs.PAGES,
    *groups.PAGES,
    *webhooks.PAGES,
    *accounts.PAGES,
    *system.PAGES,
)
FILES = (*jobs.FILES, *system.FILES)
CHANGES = (
    *job_changes.CHANGES,
    *queue.CHANGES,
    *groups.CHANGES,
    *webhooks.CHANGES,
    *accounts.CHANGES,
)
