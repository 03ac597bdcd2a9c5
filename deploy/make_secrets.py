"""Draw the secrets of compose.yaml into a folder, once: `python3 deploy/make_secrets.py [FOLDER]`.

Needs nothing but Python. What exists is kept, so it is safe to run again. The folder is closed to others; the
files in it must be readable for the users of the containers, which are not yours.
"""

import json
import secrets
import sys
from pathlib import Path


def draw() -> dict[str, str]:
    """Return all secrets by file name."""
    password, access_key, secret_key = secrets.token_hex(24), secrets.token_hex(10), secrets.token_hex(24)
    credentials = [{"accessKey": access_key, "secretKey": secret_key}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return {
        "postgres_password": password,
        "database_url": f"postgresql://farm:{password}@postgres:5432/farm",
        "s3_access_key": access_key,
        "s3_secret_key": secret_key,
        "s3_identities": json.dumps(
            {"identities": [{"name": "farm", "credentials": credentials, "actions": actions}]}
        ),
        "secret_key": secrets.token_hex(32),
        "key_pepper": secrets.token_hex(32),
        "metrics_token": secrets.token_hex(24),
    }


def main(folder: Path) -> None:
    """Write what is missing; half of a set would not fit the other half, so it is all or nothing."""
    drawn = draw()
    found = [name for name in drawn if (folder / name).exists()]
    if len(found) == len(drawn):
        sys.stderr.write(f"{folder} has all secrets; nothing was changed\n")
        return
    if found:
        sys.exit(f"{folder} has only {', '.join(found)}; restore the others or remove the folder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for name, text in drawn.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o444)
    sys.stderr.write(f"wrote {len(drawn)} secrets to {folder}; keep a copy of secret_key and key_pepper\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "secrets"))
