"""Pages of groups, waves and quarantine, and what operators ask of a group."""

from datetime import timedelta

from sqlalchemy import Connection

from api.dashboard.changes import Act, Change, Done, change_route
from api.dashboard.pages import Ask, Context, Page
from farm.clock import now
from farm.groups import Wish, change_profile, fitting_profiles, get_group, list_groups, set_wanted_state
from farm.profile_control import FILLS, Control, list_controls
from farm.quarantine import list_quarantine
from farm.watch.service import busy_shares
from farm.waves import forming_waves, list_waves, num_ghosts

# What each button asks for, and the sentence about it.
WISHES: dict[str, tuple[Wish | None, str]] = {
    "drain": (Wish.DRAINING, "It claims nothing more, finishes what it holds, and leaves."),
    "leave": (Wish.LEAVING, "It gives its jobs back at once and leaves."),
    "pause": (Wish.PAUSED, "It claims nothing more until it is resumed."),
    "restart": (Wish.RESTARTING, "Its ranks start anew after the job that it holds."),
    "undrain": (None, "It works as usual."),
}


async def load_groups(ask: Ask) -> Context:
    """Read all groups with what they hold and how busy they were."""
    groups, profiles = await ask.services.look(list_groups), ask.services.profiles
    return {
        "groups": groups,
        "fitting": {group.id: fitting_profiles(group, profiles) for group in groups},
        "busy": await ask.services.look(busy_shares),
    }


async def load_waves(ask: Ask) -> Context:
    """Read which waves form and which ones ran."""
    profiles = ask.services.profiles
    sizes = {name: profile.wave_size for name, profile in profiles.by_name.items() if profile.wave_size > 1}
    controls = await ask.services.look(list_controls)
    return {
        "sizes": sizes,
        "fills": FILLS,
        "controls": {name: controls.get(name, Control(name)) for name in sizes},
        "forming": await ask.services.look(forming_waves, sizes),
        "waves": await ask.services.look(list_waves),
        "ghosts": await ask.services.look(num_ghosts, now() - timedelta(days=1)),
    }


async def load_quarantine(ask: Ask) -> Context:
    """Read the jobs in quarantine, with those that were released if asked."""
    with_released = ask.word("all") == "1"
    held = await ask.services.look(lambda conn: list_quarantine(conn, with_released=with_released))
    return {"held": held, "with_released": with_released}


def wish_for(name: str) -> Act:
    """Return what asks one thing of a group."""
    wanted, said = WISHES[name]

    async def ask_group(change: Change) -> Done:
        group_id = change.part("group_id")

        def work(conn: Connection) -> None:
            before = get_group(conn, group_id)
            after = set_wanted_state(conn, group_id, wanted, change.visitor.actor)
            was = {"state": before.state, "wanted_state": before.wanted_state}
            now_is = {"state": after.state, "wanted_state": after.wanted_state}
            change.note(conn, f"group.{name}", group_id, was, now_is)

        await change.services.read(work)
        return Done(f"{group_id}: {said}", members={"id": group_id, "wanted_state": wanted})

    return ask_group


async def change_group_profile(change: Change) -> Done:
    """Ask a group to serve another profile."""
    group_id, name = change.part("group_id"), change.word("profile")

    def work(conn: Connection) -> None:
        profiles, actor = change.services.profiles, change.visitor.actor
        before, after = change_profile(conn, group_id, name, profiles, actor)
        was = {"profile": before.profile, "wanted_state": before.wanted_state}
        change.note(
            conn, "group.profile", group_id, was, {"profile": name, "wanted_state": after.wanted_state}
        )

    await change.services.read(work)
    said = f"{group_id}: It finishes what it holds, leaves, and comes back as a group of {name}."
    return Done(said, members={"id": group_id, "wanted_state": Wish.CHANGING, "wanted_profile": name})


PAGES = (
    Page("/groups", "groups", "groups", load_groups, regions=("group_list",)),
    Page("/waves", "waves", "waves", load_waves, regions=("wave_list",)),
    Page("/quarantine", "quarantine", "quarantine", load_quarantine, regions=("quarantine_list",)),
)
CHANGES = (
    *(change_route(f"/groups/{{group_id}}/{name}", wish_for(name)) for name in WISHES),
    change_route("/groups/{group_id}/profile", change_group_profile),
)
