"""Pages of accounts and their keys, and what admins change about them.

The text of a new key is in the answer to its making and nowhere else: that page is not kept, not logged and
cannot be reached again.
"""

from typing import Any

from sqlalchemy import Connection
from starlette.responses import JSONResponse, Response

from api.dashboard import render
from api.dashboard.access import desk_of
from api.dashboard.changes import Change, Done, change_route
from api.dashboard.pages import Ask, Context, Page
from farm.account_control import LIMITS, set_limits, set_suspended
from farm.accounts import SCOPES, USER_SCOPES, create_key, ensure_account, revoke_key
from farm.admins import Role
from farm.errors import InvalidFieldError, NotFoundError
from farm.keys import list_keys
from farm.watch.service import accounts, get_account, owner_of_key

MAX_NAME = 120


async def load_accounts(ask: Ask) -> Context:
    """Read all accounts."""
    return {"accounts": await ask.services.look(accounts, ask.services.settings.rules())}


async def load_account(ask: Ask) -> Context:
    """Read one account and its keys."""
    account_id, rules = ask.part("account_id"), ask.services.settings.rules()
    return {
        "account": await ask.services.look(get_account, rules, account_id),
        "keys": await ask.services.look(list_keys, account_id),
        "scopes": SCOPES,
        "user_scopes": USER_SCOPES,
        "quota": ask.services.settings.quota,
    }


async def make_account(change: Change) -> Done:
    """Make an account, or find the one of that name."""
    name = change.word("name")
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise InvalidFieldError("name", f"a name has 1 to {MAX_NAME} printable characters")

    def work(conn: Connection) -> str:
        account_id = ensure_account(conn, name)
        change.note(conn, "account.create", account_id, None, {"name": name})
        return account_id

    account_id = await change.services.read(work)
    return Done(
        "The account is ready. Make a key for it.", f"/admin/accounts/{account_id}", {"id": account_id}
    )


async def suspend(change: Change) -> Done:
    """Let no key of an account open anything."""
    await _set_suspended(change, is_suspended=True)
    return Done("Suspended. Its keys stop working within five seconds; its jobs go on.")


async def resume(change: Change) -> Done:
    """Let the keys of an account work again."""
    await _set_suspended(change, is_suspended=False)
    return Done("Active again.")


async def _set_suspended(change: Change, *, is_suspended: bool) -> None:
    account_id = change.part("account_id")
    action = "account.suspend" if is_suspended else "account.resume"

    def work(conn: Connection) -> None:
        before, after = set_suspended(conn, account_id, is_suspended=is_suspended)
        change.note(conn, action, account_id, {"status": before}, {"status": after})

    await change.services.read(work)


async def limits(change: Change) -> Done:
    """Set the limits of an account; what is left empty is the farm's own."""
    account_id = change.part("account_id")
    wanted = {name: change.number(name) for name in LIMITS}

    def work(conn: Connection) -> None:
        before, after = set_limits(conn, account_id, wanted)
        change.note(conn, "account.limits", account_id, before, after)

    await change.services.read(work)
    return Done("The limits hold from the next submit on.")


async def make_key(change: Change) -> Done | Response:
    """Make a key and show it, this once."""
    account_id, services = change.part("account_id"), change.services
    name = change.word("name")[:MAX_NAME]
    scopes = [scope for scope in SCOPES if change.word(f"scope:{scope}")]
    scopes += [scope for scope in change.word("scopes").split(",") if scope]
    if not scopes:
        raise InvalidFieldError("scopes", "choose at least one scope")

    def work(conn: Connection) -> tuple[Any, Any]:
        account = get_account(conn, services.settings.rules(), account_id)
        key = create_key(conn, account_id, services.key_pepper, name=name, scopes=scopes)
        change.note(
            conn, "key.create", key.id8, None, {"account": account_id, "name": name, "scopes": scopes}
        )
        return account, key

    account, key = await services.read(work)
    if change.visitor.session is None:
        return JSONResponse({"id": key.id8, "key": key.text})
    return render.page(
        change.request,
        "key.html",
        change.visitor,
        section="accounts",
        account=account,
        key=key.text,
        id8=key.id8,
        name=name,
        scopes=scopes,
    )


async def revoke(change: Change) -> Done:
    """Close a key for ever."""
    id8 = change.part("id8")

    def work(conn: Connection) -> None:
        owner = owner_of_key(conn, id8)
        if not revoke_key(conn, owner, id8):
            raise NotFoundError(f"an open key {id8}")
        change.note(
            conn, "key.revoke", id8, {"account": owner, "open": True}, {"account": owner, "open": False}
        )

    await change.services.read(work)
    desk_of(change.request).keys.forget(id8)
    return Done("Revoked. It stops working within five seconds everywhere.", members={"id": id8})


PAGES = (
    Page("/accounts", "accounts", "accounts", load_accounts, regions=("account_list",), every_s=3.0),
    Page("/accounts/{account_id}", "account", "accounts", load_account),
)
CHANGES = (
    change_route("/accounts", make_account, Role.ADMIN),
    change_route("/accounts/{account_id}/suspend", suspend, Role.ADMIN),
    change_route("/accounts/{account_id}/resume", resume, Role.ADMIN),
    change_route("/accounts/{account_id}/limits", limits, Role.ADMIN),
    change_route("/accounts/{account_id}/keys", make_key, Role.ADMIN),
    change_route("/keys/{id8}/revoke", revoke, Role.ADMIN),
)
