"""Every command that a page prints exists with its flags, and is run by a test or needs what no test has."""

import re
import shlex
from functools import cache
from typing import NamedTuple

import pytest
import yaml

from farm.cli import make_parser as farm_parser
from magi2.__main__ import make_parser as engine_parser
from tests.architecture.tree import ROOT, files, text_of

PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/operations.md", "docs/models/magi-2-preview.md")
BLOCK = re.compile(r"^```(?:sh|backup|restore)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = (
    "magi2-farm",
    "python",
    "python3",
    "torchrun",
    "make",
    "docker",
    "curl",
    "hf",
    "pg_dump",
    "pg_restore",
)
STARTS = (*PROGRAMS, "./magi2-farm", "MAGI2_CKPT_ROOT=")
README = "tests/service/test_readme.py"
COMPOSE = "tests/service/test_compose.py"
BACKUP = "tests/service/test_backup.py"
OPERATOR = "tests/service/farm/commands/test_operator_commands.py"
ENGINE = "tests/unit/magi2/commands/test_documented.py"
# How each command is known to work: the file of the test that runs it, or what it needs that no test has.
RUN_BY = {
    r"magi2-farm (submit|jobs list)(?!.* -o (text|image)\.mp4)": README,
    r"curl ": README,
    r"magi2-farm up": "tests/service/embedded/test_supervisor.py",
    r"magi2-farm (migrate|bucket init|key create)|docker compose run": COMPOSE,
    r"magi2-farm (api|ticker)|docker compose --profile cpu up": COMPOSE,
    r"python3 deploy/make_secrets.py": "tests/unit/deploy/test_make_secrets.py",
    r"magi2-farm admin (create|passwd|list)": README,
    r"pg_dump|pg_restore|magi2-farm bucket (export|import)": BACKUP,
    r"python -m magi2 tiny-checkpoint": ENGINE,
    r"python -m magi2 generate .*--output clip.mp4": ENGINE,
    r"python -m magi2 probe": ENGINE,
    r"magi2-farm doctor": "tests/service/farm/commands/test_doctor.py",
}
NEEDS = {
    r"magi2-farm (demo|test)|make (setup|lint types|test)$": "a clone of its own; .ci/run has one",
    r"docker compose build": "Docker and a registry",
    r"hf download": "a download of 274 GiB",
    r"python -m magi2 verify-checkpoint": "the released weights; the tiny ones are verified by a test",
    r"(python|torchrun).* magi2 generate": "the released weights and GPUs",
    r"magi2-farm worker --profile sp4": "four GPUs",
    r"magi2-farm submit .* -o (text|image)\.mp4": "a group with GPUs",
}


class Command(NamedTuple):
    """One command of a page, without its variables and its comment."""

    page: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)


@cache
def commands() -> list[Command]:
    found = []
    for page in PAGES:
        for block in BLOCK.findall(text_of(page)):
            for line in block.replace("\\\n", " ").splitlines():
                if not line.startswith(STARTS):
                    continue
                for part in line.split("&&"):
                    words = shlex.split(part.replace("./magi2-farm", "magi2-farm"), comments=True)
                    while words and re.match(r"[A-Z_0-9]+=", words[0]):
                        words.pop(0)
                    if words and words[0] in PROGRAMS:
                        found.append(Command(page, tuple(words)))
    return found


IDS = [f"{command.page}: {command.text[:60]}" for command in commands()]


def test_pages_print_commands() -> None:
    assert {command.page for command in commands()} == set(PAGES) - {"SECURITY.md"}


@pytest.mark.parametrize("command", commands(), ids=IDS)
def test_command_exists_with_its_flags(command: Command) -> None:
    program, *rest = command.words
    if program == "magi2-farm":
        farm_parser().parse_args(rest)
    elif "magi2" in rest:
        engine_parser().parse_args(rest[rest.index("magi2") + 1 :])
    elif program == "make":
        assert all(re.search(rf"^{target}:", text_of("Makefile"), re.MULTILINE) for target in rest)
    elif program == "docker":
        compose = yaml.safe_load(text_of("compose.yaml"))["services"]
        profiles = {profile for service in compose.values() for profile in service.get("profiles", ())}
        assert not ({"--profile"} & set(rest)) or rest[rest.index("--profile") + 1] in profiles
        assert "run" not in rest or rest[rest.index("--rm") + 1] in compose
    elif program == "python3":
        assert (ROOT / rest[0]).is_file()


@pytest.mark.parametrize("command", commands(), ids=IDS)
def test_command_is_run_by_a_test_or_needs_what_none_has(command: Command) -> None:
    assert any(re.match(pattern, command.text) for pattern in (*RUN_BY, *NEEDS))


def test_account_names_tests_that_exist_and_commands_that_are_printed() -> None:
    assert set(RUN_BY.values()) <= set(files())
    idle = [p for p in (*RUN_BY, *NEEDS) if not any(re.match(p, command.text) for command in commands())]
    assert idle == []
