"""The shipped table of profiles, and what a broken one is told."""

from dataclasses import replace

import pytest

from farm.errors import InvalidFieldError, SettingsError
from farm.profiles import load_profiles
from farm.settings import SHIPPED_PROFILES
from magi2.contract import GenerationRequest

GOOD = """
deterministic: true
auto: [big, small]
profiles:
  big: {devices: 4, ulysses: 4, roomier: small}
  small: {devices: 1, layerwise: true, max_tier: 272p, default_tier: 272p, default_steps: 4, max_steps: 20}
"""


@pytest.fixture
def shipped():
    return load_profiles(SHIPPED_PROFILES)


@pytest.fixture
def load(tmp_path):
    def load_text(text):
        path = tmp_path / "profiles.yaml"
        path.write_text(text)
        return load_profiles(path)

    return load_text


def test_the_shipped_file_has_the_six_profiles(shipped):
    names = ["sp4", "dlo-sp4", "dlo-dp4", "dlo-dp2sp2", "layerwise-1gpu", "tiny-cpu"]
    assert list(shipped.by_name) == names
    assert [shipped.get(name).devices for name in names] == [4, 4, 4, 4, 1, 0]
    assert [shipped.get(name).wave_size for name in names] == [1, 1, 4, 2, 1, 1]


def test_the_embedded_profile_is_small_and_capped(shipped):
    limits = shipped.get("tiny-cpu").limits()
    assert (limits.default_tier, limits.max_tier) == ("272p", "272p")
    assert (limits.default_steps, limits.max_steps) == (4, 20)
    assert limits.accelerations == ("off",)


def test_a_profile_that_says_nothing_takes_the_engines_defaults(shipped):
    limits = shipped.get("sp4").limits()
    assert (limits.default_tier, limits.max_tier, limits.default_steps, limits.max_steps) == (
        "540p",
        "540p",
        100,
        200,
    )


@pytest.mark.parametrize(
    ("row", "accelerations", "default"),
    [
        ("", ("off", "cache_dit"), "off"),
        (", cache_dit: allowed", ("off", "cache_dit"), "off"),
        (", cache_dit: on", ("off", "cache_dit"), "cache_dit"),
        (', cache_dit: "on"', ("off", "cache_dit"), "cache_dit"),
        (", cache_dit: forbidden", ("off",), "off"),
    ],
)
def test_a_profile_says_which_accelerations_it_takes(load, row, accelerations, default):
    limits = load(GOOD.replace("ulysses: 4", f"ulysses: 4{row}")).get("big").limits()
    assert (limits.accelerations, limits.default_acceleration) == (accelerations, default)


def test_a_wave_takes_no_acceleration_unasked(shipped):
    assert shipped.get("dlo-dp4").limits().accelerations == ("off",)


def test_numbers_of_the_cache_go_along_with_the_layout(load):
    profile = load(GOOD.replace("ulysses: 4", "ulysses: 4, cache_threshold: 0.1")).get("big")
    assert profile.layout["cache_threshold"] == 0.1
    assert "cache_warmup_steps" not in profile.layout


def test_time_outs_lie_between_their_floor_and_their_cap(shipped):
    for profile in shipped.by_name.values():
        assert 900 <= profile.execution_timeout_s <= profile.execution_timeout_cap_s == 14_400


@pytest.mark.parametrize(
    ("live", "chosen"),
    [
        ({"sp4", "dlo-sp4", "tiny-cpu"}, "sp4"),
        ({"dlo-sp4", "layerwise-1gpu"}, "dlo-sp4"),
        ({"layerwise-1gpu", "dlo-dp4"}, "layerwise-1gpu"),
        ({"tiny-cpu"}, "tiny-cpu"),
        (set(), "sp4"),
    ],
)
def test_auto_takes_the_first_live_profile_in_order(shipped, live, chosen):
    assert shipped.resolve("auto", live).name == chosen
    assert shipped.resolve(None, live).name == chosen


def test_only_live_waves_of_the_file_are_there_for_batches(shipped, load):
    everything = set(shipped.by_name)
    assert [profile.name for profile in shipped.live_waves(everything)] == ["dlo-dp4"]
    assert shipped.live_waves(everything - {"dlo-dp4"}) == []
    assert load(GOOD).live_waves({"big", "small"}) == []


def test_a_profile_asked_for_by_name_is_taken_live_or_not(shipped):
    assert shipped.resolve("dlo-dp4", set()).name == "dlo-dp4"


def test_an_unknown_profile_is_refused_with_the_list_and_a_guess(shipped):
    with pytest.raises(InvalidFieldError, match=r"one of sp4, .*did you mean dlo-sp4") as failure:
        shipped.resolve("dlo-spp4", set())
    assert (failure.value.http_status, failure.value.errors[0].loc) == (422, "profile")


def test_deterministic_holds_for_all_rows(load):
    assert all(profile.deterministic for profile in load(GOOD).by_name.values())


def test_a_job_that_ran_out_of_memory_finds_a_roomier_live_profile_that_takes_it(load):
    profiles = load(GOOD)
    fits = GenerationRequest(prompt="x", tier="272p", num_inference_steps=4, seed=1, deterministic=True)
    too_large = GenerationRequest(prompt="x", tier="540p", num_inference_steps=4, seed=1, deterministic=True)
    assert profiles.roomier("big", {"big", "small"}, fits) == "small"
    assert profiles.roomier("big", {"big"}, fits) is None
    assert profiles.roomier("big", {"big", "small"}, too_large) is None
    assert profiles.roomier("small", {"big", "small"}, fits) is None


def test_profiles_that_point_at_each_other_do_not_turn_in_circles(load):
    profiles = load(GOOD.replace("layerwise: true,", "layerwise: true, roomier: big,"))
    request = GenerationRequest(prompt="x", tier="540p", num_inference_steps=4, seed=1, deterministic=True)
    assert profiles.roomier("big", {"small"}, request) is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ulysses: 4", "ulysses: 2", r"big: tp x ulysses x .* is 2, but devices is 4"),
        ("auto: [big", "auto_waves: [none]\nauto: [big", r"none is named in auto, auto_waves, "),
        ("auto: [big", "auto_waves: [big]\nauto: [big", r"big is named in auto_waves but runs one job"),
        ("ulysses: 4", "ulises: 4", r"big\.ulises: Extra inputs"),
        (
            "ulysses: 4",
            "ulysses: 4, vae_patch_parallel: 2",
            r"big: --vae-patch-parallel 2: .*set it to 1 or 4",
        ),
        ("devices: 4, ulysses: 4", "devices: 5, ulysses: 5", "big: 24 attention heads do not divide by"),
        ("layerwise: true", "layerwise: true, hsdp: true", "small: --hsdp with .* gives a tensor two owners"),
        ("devices: 1", "devices: many", r"small\.devices"),
        ("max_tier: 272p", "max_tier: 1080p", r"small: tier 1080p does not exist; there are 272p, 540p"),
        ("default_tier: 272p", "default_tier: 540p", "small: default_tier 540p is above max_tier 272p"),
        ("default_steps: 4", "default_steps: 40", "small: default_steps 40 is above max_steps 20"),
        ("layerwise: true", "deterministic: false", "small says deterministic: False, the farm True"),
        ("layerwise: true", "cache_dit: maybe", r"small\.cache_dit: Input should be 'forbidden'"),
        ("layerwise: true", "cache_threshold: 2", "small: the cache's threshold must lie between 0 and 1"),
        ("ulysses: 4", "data_parallel: 4, cache_dit: on", "big: cache_dit: on with data_parallel 4"),
        (
            "roomier: small",
            "roomier: tiny",
            "tiny is named in auto, auto_waves, roomier or spill but has no row",
        ),
        ("[big, small]", "[huge]", "huge is named in auto, auto_waves, roomier or spill but has no row"),
        ("[big, small]", "[]", "auto: List should have at least 1 item"),
        ("deterministic: true\n", "", "deterministic: Field required"),
        ("big:", "auto:", "no profile can be named auto|big is named"),
        ("profiles:", "profiles", "is not YAML"),
    ],
)
def test_a_broken_file_is_refused_with_row_and_member(load, old, new, said):
    with pytest.raises(SettingsError, match=said):
        load(GOOD.replace(old, new, 1))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"^FARM_PROFILES_FILE .*absent\.yaml cannot be read"):
        load_profiles(tmp_path / "absent.yaml")


def test_a_job_spills_to_what_its_row_lists_and_only_auto_jobs_to_the_farms_order(shipped):
    request = GenerationRequest("A fox.", "540p", 100, seed=1)

    def target(name, *usable, is_auto=False, asked=request):
        found = shipped.spill(name, set(usable), asked, is_auto=is_auto)
        return found.name if found else None

    assert target("dlo-dp4", "layerwise-1gpu", "dlo-sp4") == "dlo-sp4"
    assert target("sp4", "layerwise-1gpu") is None
    assert target("sp4", "layerwise-1gpu", is_auto=True) == "layerwise-1gpu"
    assert target("sp4", "sp4", is_auto=True) is None
    assert target("sp4", "tiny-cpu", is_auto=True) is None  # its caps refuse the job
    small = replace(request, tier="272p", num_inference_steps=4)
    assert target("sp4", "tiny-cpu", is_auto=True, asked=small) == "tiny-cpu"


def test_waves_are_known_by_their_slots_and_a_member_occupies_its_share(shipped):
    assert shipped.wave_sizes == {"dlo-dp4": 4, "dlo-dp2sp2": 2}
    assert [shipped.get(name).gpus for name in ("sp4", "dlo-dp4", "dlo-dp2sp2", "tiny-cpu")] == [4, 1, 2, 1]
