"""From the spelling of a submit to a `Submission` that may be queued, with every problem reported at once.

Reads the database once (which profiles are live) and may ask a name server about a webhook's host; writes
nothing. The image is decoded in a child process and lies in a temporary file until `store_input` has put it
into the store.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from api.body import Body
from api.deps import Services
from api.members import DAY_S, FARM_FIELDS, Members, WebhookMember, read_members
from api.problems import RefusedError
from api.reference import Reference, asset_reference, take_reference
from api.schemas import CreatedWebhook
from api.views import checked_id
from api.webhook_targets import refusal_of
from farm.accounts import Principal
from farm.assets import get_image, keep_image
from farm.errors import InvalidFieldError, NotFoundError, ScopeError
from farm.images import NormalisedImage
from farm.jobs.estimates import Estimator
from farm.jobs.job import NewAsset
from farm.jobs.submit import JobWebhook, Submission
from farm.profiles import Profile
from farm.secretbox import seal
from farm.storage import input_key
from farm.webhooks.signing import new_secret
from magi2.contract import GenerationRequest, ImageFacts, Problem, Validated, validate
from magi2.values import shown

PRIORITY_SCOPE = "videos:priority"
PNG = "image/png"
TIMEOUT_PER_CLIP = 4


@dataclass
class Intake:
    """A checked request: what to queue, its image if any, and what only the answer to this request shows."""

    submission: Submission
    image: NormalisedImage | None
    webhook: CreatedWebhook | None
    members: Members
    facts: Sequence[ImageFacts]

    def discard(self) -> None:
        """Remove the temporary file."""
        if self.image:
            self.image.discard()


async def take_request(services: Services, principal: Principal, body: Body) -> Intake:
    """Check everything that can be checked before the queue; the caller discards the result.

    Raises:
        RefusedError: With all problems, in the order spelling, contract, image, the farm's own members.
        ScopeError: The priority needs a scope that the key lacks.
    """
    retention = services.settings.retention
    members, own_problems = read_members(
        body.members,
        default_retention_s=retention.default_days * DAY_S,
        max_retention_s=retention.longest_days * DAY_S,
    )
    if members.priority > 0 and PRIORITY_SCOPE not in principal.scopes:
        raise ScopeError(PRIORITY_SCOPE)
    profile, profile_problems = await _resolve_profile(services, members)
    webhook_problems = await check_webhook(services, members.webhook)
    reference, asset_problems = await _take_image(services, principal, body, members)
    try:
        limits, facts = profile.limits(), reference.facts
        checked = validate(members.contract, limits=limits, images=facts, others=FARM_FIELDS)
        farm_problems = [*own_problems, *asset_problems, *profile_problems, *webhook_problems]
        request = _accepted(checked, body.problems, reference, farm_problems)
        webhook, created = seal_webhook(services, members.webhook)
    except BaseException:
        reference.discard()
        raise
    submission = Submission(
        account_id=principal.account_id,
        request=request,
        profile=profile.name,
        exec_timeout_s=members.execution_timeout_s or profile.execution_timeout_s,
        retention_s=members.retention_s,
        requested_profile=members.profile,
        priority=members.priority,
        expires_in_s=members.expires_in_s,
        max_attempts=members.max_attempts,
        webhook=webhook,
        metadata=members.metadata,
        user_tag=members.user,
        notices=checked.notices,
        gpus=gpus_of(profile),
        wave_size=profile.wave_size,
        reuse=members.reuse,
        input=reference.asset,
    )
    return Intake(submission, reference.image, created, members, reference.facts)


def on_profile(intake: Intake, profile: Profile) -> Submission | None:
    """Return what would be queued had the request named this profile; None where the profile refuses it.

    What the request leaves open gets the defaults of this profile.
    """
    members = intake.members
    checked = validate(members.contract, limits=profile.limits(), images=intake.facts)
    if checked.request is None or _timeout_problems(members, profile):
        return None
    return replace(
        intake.submission,
        request=checked.request,
        profile=profile.name,
        exec_timeout_s=members.execution_timeout_s or profile.execution_timeout_s,
        notices=checked.notices,
        gpus=gpus_of(profile),
        wave_size=profile.wave_size,
    )


async def store_input(services: Services, intake: Intake) -> Submission:
    """Put the image into the store and name it in the submission; without an image there is nothing to do.

    Raises:
        StorageError: The store does not take it; nothing may be queued.
    """
    submission, image = intake.submission, intake.image
    if image is None:
        return submission
    return replace(submission, input=(await store_image(services, submission.account_id, image))[1])


async def store_image(services: Services, account_id: str, image: NormalisedImage) -> tuple[str, NewAsset]:
    """Put a normalised image into the store; return the id of its row, and what the row says.

    The row comes first: from then on the clean-up leaves the object alone.

    Raises:
        StorageError: The store does not take it.
    """
    key = input_key(account_id, image.sha256)
    asset = NewAsset(
        kind="input",
        key=key,
        bytes=image.path.stat().st_size,
        sha256=image.sha256,
        media_type=PNG,
        width=image.width,
        height=image.height,
    )
    asset_id = await services.read(keep_image, account_id, asset)
    await services.in_store(services.store.put, key, image.path, PNG)
    return asset_id, asset


async def _take_image(
    services: Services, principal: Principal, body: Body, members: Members
) -> tuple[Reference, list[Problem]]:
    """Return the image, sent along or uploaded before."""
    if members.asset_id is None:
        return await take_reference(body, members.image_url, services.image_pool), []
    try:
        asset_id = checked_id(members.asset_id, "asset", "this asset")
        image = await services.look(get_image, principal.account_id, asset_id)
    except NotFoundError:
        field, given = members.asset_field, shown(members.asset_id)
        text = f"{field} names no asset of this account (got {given}); upload it with POST /v1/assets"
        return Reference(), [Problem(field, "invalid_field", text)]
    return asset_reference(image.asset, body), []


def gpus_of(profile: Profile) -> int:
    """Return how many devices one job of a profile occupies; a profile without devices counts as one."""
    return max(1, profile.devices // profile.wave_size)


def estimated_gpu_s(
    conn: Connection, estimator: Estimator, profile: Profile, request: GenerationRequest
) -> int:
    """Return the GPU-seconds that a request will probably take.

    Before the profile has finished a clip, a quarter of its time-out stands for one: that is how the time-out
    was chosen.
    """
    clip_s = estimator.clip_s(conn, profile.name, request.tier, request.num_inference_steps)
    if clip_s is None:
        steps_share = request.num_inference_steps / profile.default_steps
        clip_s = profile.execution_timeout_s / TIMEOUT_PER_CLIP * steps_share
    return math.ceil(clip_s * gpus_of(profile))


async def resolve_profile(services: Services, name: str) -> Profile:
    """Return a profile by name, or the one that `auto` means now.

    Raises:
        RefusedError: There is none of that name.
    """
    live = await services.live_profiles()
    try:
        return services.profiles.resolve(name, live)
    except InvalidFieldError as exc:
        raise RefusedError([Problem("profile", "invalid_field", exc.message)]) from None


async def _resolve_profile(services: Services, members: Members) -> tuple[Profile, list[Problem]]:
    """Return the profile that the request is for; for an unknown one, the default's limits check the rest."""
    profiles = services.profiles
    live = await services.live_profiles()
    try:
        profile = profiles.resolve(members.profile, live)
    except InvalidFieldError as exc:
        return profiles.resolve("auto", live), [Problem("profile", "invalid_field", exc.message)]
    return profile, _timeout_problems(members, profile)


def _timeout_problems(members: Members, profile: Profile) -> list[Problem]:
    timeout_s, cap_s = members.execution_timeout_s, profile.execution_timeout_cap_s
    if timeout_s is None or timeout_s <= cap_s:
        return []
    text = f"execution_timeout_s is {timeout_s}; profile {profile.name} allows at most {cap_s}"
    return [Problem("execution_timeout_s", "invalid_field", text)]


async def check_webhook(services: Services, webhook: WebhookMember | None) -> list[Problem]:
    """Return the problem of a webhook whose host may not be called, if it has one."""
    if webhook is None or not webhook.url:
        return []
    refusal = await refusal_of(services, webhook.url)
    return [Problem("webhook.url", "invalid_field", f"webhook.url: {refusal}")] if refusal else []


def _accepted(
    checked: Validated, spelling: list[Problem], reference: Reference, farm_problems: list[Problem]
) -> GenerationRequest:
    problems = [*spelling, *checked.problems, *reference.problems, *farm_problems]
    if problems:
        is_image_first = bool(reference.problems) and problems[0] is reference.problems[0]
        first = ("image_too_large", 413) if is_image_first and reference.is_too_large else None
        raise RefusedError(problems, first=first)
    if checked.request is None:
        raise RuntimeError("the contract returned neither a request nor a problem")
    return checked.request


def seal_webhook(
    services: Services, member: WebhookMember | None
) -> tuple[JobWebhook | None, CreatedWebhook | None]:
    """Return what is stored of a webhook, and what the answer shows of it, once."""
    if member is None:
        return None, None
    secret = member.secret or new_secret()
    sealed = seal(services.secret_key, secret)
    shown = CreatedWebhook(url=member.url, events=list(member.event_types), signing_secret=secret)
    return JobWebhook(member.url, member.event_types, sealed), shown
