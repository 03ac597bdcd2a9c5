import pytest

from worker.devices import (
    DeviceError,
    check_deterministic,
    check_devices,
    free_port,
    parse_devices,
    rank_environment,
)


@pytest.mark.parametrize(
    ("text", "devices"), [("", ()), ("0", (0,)), ("0,1,2,3", (0, 1, 2, 3)), (" 4 , 2 ", (4, 2))]
)
def test_device_list_is_read_in_its_order(text, devices):
    assert parse_devices(text) == devices


@pytest.mark.parametrize("text", ["a", "0,-1", "1.5", "0,0", "0;1"])
def test_device_list_that_is_none_is_refused_with_what_was_given(text):
    with pytest.raises(DeviceError, match=text.replace(".", r"\.")):
        parse_devices(text)


def test_number_of_devices_must_be_the_profiles():
    check_devices("sp4", 4, (0, 1, 2, 3))
    check_devices("tiny-cpu", 0, ())
    with pytest.raises(DeviceError, match=r"sp4 runs on 4 devices, and 2 were given \(0,1\): name them"):
        check_devices("sp4", 4, (0, 1))
    with pytest.raises(DeviceError, match=r"1 were given|0 were given \(none\)"):
        check_devices("sp4", 4, ())


@pytest.mark.parametrize("text", ["", "1", "true", "YES", "on"])
def test_environment_may_repeat_what_the_profiles_say(text):
    check_deterministic({"MAGI2_DETERMINISTIC": text}, deterministic=True)


@pytest.mark.parametrize(
    ("text", "deterministic"), [("0", True), ("1", False), ("maybe", True), ("maybe", False)]
)
def test_environment_may_not_say_otherwise_than_the_profiles(text, deterministic):
    with pytest.raises(DeviceError, match=r"MAGI2_DETERMINISTIC is .*the profiles file says"):
        check_deterministic({"MAGI2_DETERMINISTIC": text}, deterministic=deterministic)


def test_rank_keeps_the_engines_names_and_loses_the_agents():
    base = {
        "PATH": "/bin",
        "MAGI2_CKPT_ROOT": "/weights",
        "MAGI2_FLASH_ATTN_VERSION": "3",
        "DATABASE_URL": "postgresql://u:p@h/d",
        "REDIS_URL": "redis://h",
        "S3_ENDPOINT_URL": "http://h",
        "AWS_SECRET_ACCESS_KEY": "s",
        "FARM_KEY_PEPPER": "p",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5",
    }
    seen = rank_environment(base, rank=1, devices=(4, 2), world=2, port=5555, deterministic=True)
    assert seen == {
        "PATH": "/bin",
        "MAGI2_CKPT_ROOT": "/weights",
        "MAGI2_FLASH_ATTN_VERSION": "3",
        "MAGI2_DETERMINISTIC": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "5555",
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "PYTHONUNBUFFERED": "1",
    }


def test_rank_without_a_device_sees_none_of_the_hosts():
    seen = rank_environment({}, rank=0, devices=(), world=1, port=1, deterministic=False)
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["MAGI2_DETERMINISTIC"]) == ("", "0")


def test_ports_are_above_the_reserved_ones():
    assert 1024 <= free_port() <= 65535
