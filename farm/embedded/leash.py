"""Become another program that dies with the process that started it: run as a script, never imported.

`python -I -S leash.py SIGNAL PARENT_PID USER PROGRAM ARGS...` asks the kernel for SIGNAL at the death of
its parent (Linux; elsewhere it only executes), drops root for USER where one is named, and executes
PROGRAM. A script and not a `preexec_fn`, because that runs Python code between fork and exec, which may
deadlock under threads; and as a script it reads itself before it drops root, so that it works in a folder
that only root may enter.
"""

import ctypes
import os
import pwd
import sys

PR_SET_PDEATHSIG = 1
NOT_STARTED = 126  # the shell's code for "found, but could not be executed"


def _drop_root(user: str) -> None:
    entry = pwd.getpwnam(user)
    os.setgroups([])
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)


def main(arguments: list[str]) -> None:
    """Set the parent-death signal, drop root if asked, and execute the program; never returns normally."""
    death_signal, parent_pid, user, *command = arguments
    if user != "-":
        _drop_root(user)  # first: a change of user clears the parent-death signal
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != int(parent_pid):  # the parent died before the signal was armed
            sys.exit(NOT_STARTED)
    try:
        os.execv(command[0], command)  # noqa: S606 -- the whole point: no shell, an argument list
    except OSError as error:
        sys.exit(f"cannot execute {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
