"""The page of the model says what the calculator and the profiles say."""

import re

from farm.commands.doctor_layouts import layout_of
from farm.profiles import load_profiles
from farm.settings import SHIPPED_PROFILES
from magi2.parallel.memory import GIB, released_plan
from tests.architecture.tree import text_of

PROFILES = load_profiles(SHIPPED_PROFILES)
QUALIFIED = ("released weights", "random weights on a GPU", "CPU", "configuration only")


def rows() -> dict[str, list[str]]:
    section = text_of("docs/models/magi-2-preview.md").split("## Profiles\n")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_every_profile_has_a_row_with_its_devices_and_clips() -> None:
    assert set(rows()) == set(PROFILES.by_name)
    for name, (devices, clips, *_, qualified) in rows().items():
        profile = PROFILES.get(name)
        assert (int(devices), int(clips)) == (profile.devices, profile.wave_size), name
        assert qualified.startswith(QUALIFIED), name


def test_memory_is_that_of_the_calculator() -> None:
    for name, (_, _, device, host, pinned, _) in rows().items():
        profile = PROFILES.get(name)
        if not profile.devices:
            continue
        plan = released_plan(layout_of(profile))
        assert device == f"{plan.device / GIB:.1f}", name
        assert host == f"{plan.pinned_node / GIB:.0f}", name
        assert pinned == (f"{plan.pinned / GIB:.1f}" if plan.pinned else "0"), name


def test_the_page_names_revision_folders_and_size() -> None:
    text = text_of("docs/models/magi-2-preview.md")
    assert text.count("2dea51b64db47ee5b4402d36fd90829a0c58913b") >= 2
    assert "274 GiB" in text
    folders = re.findall(r"--include '([\w.-]+)/\*'", text)
    assert len(folders) == 5
    assert all(f"`{folder}/" in text for folder in folders)
