"""Low-priority jobs of a batch that left the profile to the farm, and that fill whole waves by themselves.

A wave makes the most clips an hour but each of them late, which is what a job of low priority is for. Jobs
that would have to wait for neighbours stay where `auto` put them, and so does all of an account that may not
run as many at a time as a wave has slots.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from api.deps import Services
from api.intake import Intake, on_profile
from farm.accounts import Principal, usage
from farm.jobs.submit import Submission
from farm.profiles import AUTO, Profile
from magi2.contract import wave_key


async def prefer_waves(services: Services, principal: Principal, intakes: Sequence[Intake]) -> None:
    """Move what fills waves to a live profile of waves, in the order of the file; the rest stays."""
    left = [intake for intake in intakes if _may_wait(intake.submission)]
    waves = services.profiles.live_waves(await services.live_profiles()) if left else []
    if not waves:
        return
    rules = services.settings.rules()
    found = await services.look(lambda conn: usage(conn, principal.account_id, rules))
    for profile in waves:
        if found is not None and found.max_running >= profile.wave_size:
            left = _fill(profile, left)


def _may_wait(submission: Submission) -> bool:
    return submission.priority < 0 and submission.requested_profile == AUTO


def _fill(profile: Profile, intakes: Iterable[Intake]) -> list[Intake]:
    """Fill as many waves of a profile as there are jobs for; return who is left over."""
    by_key: dict[str, list[tuple[Intake, Submission]]] = defaultdict(list)
    left = []
    for intake in intakes:
        moved = on_profile(intake, profile)
        if moved is None:
            left.append(intake)
        else:
            by_key[wave_key(moved.request)].append((intake, moved))
    for members in by_key.values():
        num_taken = len(members) // profile.wave_size * profile.wave_size
        for intake, moved in members[:num_taken]:
            intake.submission = moved
        left += [intake for intake, _ in members[num_taken:]]
    return left
