"""compose.yaml, the Dockerfile and the examples beside them say what a deployment must have."""

import configparser
import re
from pathlib import Path

import pytest
import yaml

from farm.profiles import load_profiles
from farm.settings import SHIPPED_PROFILES
from tests.compose_file import ROOT, parse, seconds, services

SERVERS = ("postgres", "redis", "s3")
ONE_SHOT = ("migrate", "bucket")
GPU_WORKERS = ("worker-sp4", "worker-dlo-sp4", "worker-dlo-dp4")
WORKERS = (*GPU_WORKERS, "worker-tiny")
KUBERNETES = ROOT / "deploy/kubernetes"
SYSTEMD = ROOT / "deploy/systemd"


def test_file_holds_the_services_of_the_specification() -> None:
    assert set(services()) == {*SERVERS, *ONE_SHOT, "api", "ticker", *WORKERS}


def test_a_plain_start_needs_no_gpu_and_each_worker_has_its_profile() -> None:
    profiles = {name: service.get("profiles", []) for name, service in services().items()}
    assert {name: found for name, found in profiles.items() if found} == {
        "worker-tiny": ["cpu"],
        "worker-sp4": ["gpu"],
        "worker-dlo-sp4": ["dlo-sp4"],
        "worker-dlo-dp4": ["dlo-dp4"],
    }


def test_parser_refuses_a_misspelt_key(tmp_path: Path) -> None:
    text = (ROOT / "compose.yaml").read_text().replace("healthcheck:", "healthchek:", 1)
    broken = tmp_path / "compose.yaml"
    broken.write_text(text)
    assert "healthchek is not allowed" in parse(file=broken).stderr


@pytest.mark.parametrize("name", sorted(services()))
def test_service_runs_closed_in(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["user"].split(":")[0] not in {"", "0", "root"}
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert re.search(r":\d+\.\d+", service["image"]), "an image without a version"
    assert ("healthcheck" in service) is (name not in ONE_SHOT)


def test_secrets_come_from_files_and_never_from_the_environment() -> None:
    for name, service in services().items():
        for variable, value in (service.get("environment") or {}).items():
            is_secret = re.search(r"SECRET|PASSWORD|PEPPER|TOKEN|ACCESS_KEY|DATABASE_URL", variable)
            assert not is_secret or value.startswith("/run/secrets/"), (name, variable)


def test_broker_keeps_messages_and_the_store_tells_nobody() -> None:
    redis = services()["redis"]["command"]
    assert redis[redis.index("--maxmemory-policy") + 1] == "noeviction"
    assert redis[redis.index("--appendonly") + 1] == "yes"
    assert "-master.telemetry=false" in services()["s3"]["command"]


def test_only_the_api_and_the_store_are_published_and_on_loopback() -> None:
    published = {
        name: [port["host_ip"] for port in service["ports"]]
        for name, service in services().items()
        if service.get("ports")
    }
    assert published == {"api": ["127.0.0.1"], "s3": ["127.0.0.1"]}


@pytest.mark.parametrize("name", WORKERS)
def test_worker_outlives_its_drain_and_runs_a_profile_that_exists(name: str) -> None:
    service = services()[name]
    grace_s = float(service["environment"]["FARM_WORKER__DRAIN_GRACE_S"])
    assert seconds(service["stop_grace_period"]) > grace_s
    profile = service["command"][service["command"].index("--profile") + 1]
    devices = [part for part in service["environment"].get("FARM_WORKER__DEVICES", "").split(",") if part]
    assert load_profiles(SHIPPED_PROFILES).get(profile).devices == len(devices)


@pytest.mark.parametrize("name", GPU_WORKERS)
def test_gpu_worker_has_what_pinning_and_nccl_need(name: str) -> None:
    service = services()[name]
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 4, ["gpu"])
    assert service["ulimits"]["memlock"] == -1
    assert int(service["shm_size"]) >= 2**30
    [checkpoint] = [volume for volume in service["volumes"] if volume["target"] == "/models"]
    assert checkpoint["read_only"] is True
    assert service["environment"]["MAGI2_CKPT_ROOT"] == "/models"


def test_only_workers_ask_for_gpus() -> None:
    asking = [name for name, service in services().items() if "reservations" in str(service.get("deploy"))]
    assert sorted(asking) == sorted(GPU_WORKERS)


def test_every_image_is_a_stage_that_drops_root() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.M | re.S))
    targets = {service["build"]["target"] for service in services().values() if "build" in service}
    assert targets == set(stages) - {"base"}
    for target in targets:
        assert re.search(r"^USER 10001", stages[target], re.M), target
    assert "gpu" in re.search(r"\.\[([a-z,]+)\]", stages["worker-gpu"])[1].split(",")


def test_dockerfile_copies_only_what_its_ignore_file_lets_through() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    allowed = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M))
    wanted = {word for line in copied for word in line.split()}
    assert wanted == allowed
    assert all((ROOT / name).exists() for name in wanted)


def kubernetes_objects() -> list[dict]:
    return [
        found for path in sorted(KUBERNETES.glob("*.yaml")) for found in yaml.safe_load_all(path.read_text())
    ]


def test_kubernetes_example_runs_the_commands_of_compose() -> None:
    known = {tuple(service["command"]) for service in services().values() if "build" in service}
    pods = [
        found["spec"]["template"]["spec"]
        for found in kubernetes_objects()
        if "template" in found.get("spec", {})
    ]
    assert len(pods) == 4
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert tuple(container["command"]) in known
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_kubernetes_gives_a_group_one_pod_time_to_drain_and_readiness_of_its_ranks() -> None:
    [worker] = [found for found in kubernetes_objects() if found["metadata"]["name"] == "magi2-worker-sp4"]
    pod = worker["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > float(
        services()["worker-sp4"]["environment"]["FARM_WORKER__DRAIN_GRACE_S"]
    )
    [container] = pod["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4


@pytest.mark.parametrize("unit", sorted(path.name for path in SYSTEMD.glob("*.service")))
def test_systemd_unit_runs_a_command_of_compose_and_waits_for_a_drain(unit: str) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(SYSTEMD / unit)
    service = parser["Service"]
    known = {tuple(found["command"][:2]) for found in services().values() if "build" in found}
    words = service["ExecStart"].split()
    assert (Path(words[0]).name, words[1]) in known
    assert service["User"] == "magi2"
    assert service["NoNewPrivileges"] == "yes"
    if "worker" in unit:
        assert int(service["TimeoutStopSec"]) > 1200
        assert service["LimitMEMLOCK"] == "infinity"
        assert service["KillMode"] == "mixed"
