"""Input images: content-addressed within their account, shared by jobs, forgotten when nobody uses them.

A row is made, or its life renewed, before the object is stored and again by each use; so the clean-up never
removes what a request is about to use. An image that a job refers to stays for as long as the job does.
"""

from dataclasses import asdict, dataclass
from datetime import timedelta

from sqlalchemy import ColumnElement, Connection, ScalarSelect, func, literal_column, select, update
from sqlalchemy.dialects.postgresql import insert

from farm.clock import db_now
from farm.db.tables import asset, job
from farm.errors import FarmError, NotFoundError
from farm.ids import new_id
from farm.jobs.job import Asset, NewAsset
from farm.jobs.states import ACTIVE, State

KEEP_UNUSED = timedelta(days=7)


class AssetInUseError(FarmError):
    """A job that has not ended needs the image."""

    def __init__(self, asset_id: str, num_jobs: int) -> None:
        message = (
            f"{asset_id} is used by {num_jobs} videos that have not ended; wait for them, or cancel them"
        )
        super().__init__("asset_in_use", 409, message)


@dataclass(frozen=True)
class Image:
    """An input image, and how many visible jobs refer to it."""

    asset: Asset
    num_refs: int


def keep_image(conn: Connection, account_id: str, image: NewAsset) -> str:
    """Return the row of an image of an account, made or renewed: it lives for seven more days, unused."""
    values = {**asdict(image), "id": new_id("asset"), "account_id": account_id}
    row = insert(asset).values(**values, expires_at=func.now() + KEEP_UNUSED)
    row = row.on_conflict_do_update(
        index_elements=[asset.c.account_id, asset.c.sha256],
        index_where=(asset.c.kind == literal_column("'input'")) & asset.c.deleted_at.is_(None),
        set_={"key": row.excluded.key, "expires_at": row.excluded.expires_at},
    )
    asset_id: str = conn.execute(row.returning(asset.c.id)).scalar_one()
    return asset_id


def get_image(conn: Connection, account_id: str, asset_id: str) -> Image:
    """Return an image of this account.

    Raises:
        NotFoundError: Unknown, deleted, expired, or of another account.
    """
    query = select(asset, _num_refs().label("num_refs")).where(_is_visible(account_id, asset_id))
    row = conn.execute(query).mappings().one_or_none()
    if row is None:
        raise NotFoundError(asset_id)
    values = dict(row)
    num_refs = values.pop("num_refs")
    return Image(Asset(**values), num_refs)


def delete_image(conn: Connection, account_id: str, asset_id: str) -> None:
    """Hide an image; its object goes once no job refers to it any more.

    Raises:
        NotFoundError: Unknown, deleted, expired, or of another account.
        AssetInUseError: Jobs that have not ended need it.
    """
    query = select(asset.c.id).where(_is_visible(account_id, asset_id)).with_for_update()
    if conn.execute(query).one_or_none() is None:
        raise NotFoundError(asset_id)
    open_jobs = select(func.count()).where(
        job.c.input_asset_id == asset_id, job.c.state.in_([State.QUEUED, *ACTIVE])
    )
    num_jobs = conn.execute(open_jobs).scalar_one()
    if num_jobs:
        raise AssetInUseError(asset_id, num_jobs)
    conn.execute(update(asset).where(asset.c.id == asset_id).values(expires_at=db_now()))


def _is_visible(account_id: str, asset_id: str) -> ColumnElement[bool]:
    return (
        (asset.c.id == asset_id)
        & (asset.c.account_id == account_id)
        & (asset.c.kind == "input")
        & asset.c.deleted_at.is_(None)
        & (asset.c.expires_at.is_(None) | (asset.c.expires_at > db_now()))
    )


def _num_refs() -> ScalarSelect[int]:
    visible = (job.c.input_asset_id == asset.c.id) & job.c.deleted_at.is_(None)
    return select(func.count()).select_from(job).where(visible).correlate(asset).scalar_subquery()
