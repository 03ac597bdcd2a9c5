"""Breaks of F-50: what keeps strangers and other sites out of the dashboard."""

from tests.mutants.mutant import Mutant

ACCESS = "tests/service/api/dashboard/test_access.py"
ADMINS = "tests/service/farm/test_admins.py"
KEYS = "tests/service/api/test_keys.py"
RENDER = "tests/unit/api/dashboard/test_render.py"

DASHBOARD = (
    Mutant(
        "F-50", "a change without the token of its session", "api/dashboard/access.py",
        " or not session.is_csrf(given)", "",
        f"{ACCESS}::test_change_needs_session_token_and_own_origin",
    ),
    Mutant(
        "F-50", "a change from another site", "api/dashboard/access.py",
        "    if session is None or not is_own_origin(request) or", "    if session is None or",
        f"{ACCESS}::test_change_needs_session_token_and_own_origin",
    ),
    Mutant(
        "F-50", "a login form of another site", "api/dashboard/login.py",
        "    if not is_own_origin(request):\n        raise ForgedRequestError\n", "",
        f"{ACCESS}::test_login_form_of_another_site_is_refused",
    ),
    Mutant(
        "F-50", "roles are not looked at", "api/dashboard/access.py",
        "    if not session.role.includes(needed):\n        raise RoleError(needed)\n", "",
        f"{ACCESS}::test_roles_bound_what_a_login_may_do",
    ),
    Mutant(
        "F-50", "any key is an admin key", "api/dashboard/access.py",
        "    if _SCOPES[needed] not in principal.scopes:\n        raise ScopeError(_SCOPES[needed])\n", "",
        f"{ACCESS}::test_admin_key_needs_no_token_and_only_works_with_its_scope",
    ),
    Mutant(
        "F-50", "tries are not counted", "api/dashboard/login.py",
        "    if not verdict.is_allowed:", "    if verdict.limit == 0:",
        f"{ACCESS}::test_login_tries_are_bounded_per_address_and_name",
    ),
    Mutant(
        "F-50", "wrong passwords lock nothing", "farm/admins.py",
        "    if row is None or row.failures < MAX_FAILURES:", "    if row is None or row.failures:",
        f"{ADMINS}::test_too_many_wrong_passwords_lock_a_login_for_a_while",
    ),
    Mutant(
        "F-50", "scripts may read the cookie", "api/dashboard/access.py",
        "        httponly=True,\n", "",
        f"{ACCESS}::test_cookie_is_for_us_alone",
    ),
    Mutant(
        "F-50", "a new session id whose cookie is lost", "api/dashboard/access.py",
        "    return Visitor(session.name, session.role, actor, client_ip(request), session)\n",
        "    found = Visitor(session.name, session.role, actor, client_ip(request), session)\n"
        "    return await renewed(request, found)\n",
        f"{ACCESS}::test_session_takes_a_new_cookie_once_in_a_while",
    ),
    Mutant(
        "F-50", "inline scripts run", "api/dashboard/render.py",
        "script-src 'self'; ", "script-src 'self' 'unsafe-inline'; ",
        f"{ACCESS}::test_answers_forbid_scripts_of_others_frames_and_copies",
    ),
    Mutant(
        "F-50", "pages escape nothing", "api/dashboard/render.py",
        "        autoescape=True,\n", "",
        f"{RENDER}::test_user_text_is_escaped_everywhere_a_macro_puts_it",
    ),
    Mutant(
        "F-50", "a login leads to any site", "api/dashboard/access.py",
        "    return path if is_ours and is_plain else HOME", "    return path or HOME",
        f"{ACCESS}::test_login_form_of_another_site_is_refused",
    ),
    Mutant(
        "F-50", "the audit log can be rewritten", "migrations/versions/0006_dashboard.py",
        "    op.execute(GUARD)\n", "",
        f"{ADMINS}::test_audit_log_is_append_only",
    ),
    Mutant(
        "F-50", "secrets get into the audit log", "farm/audit.py",
        "MASK if _is_secret(name) else _plain(value)", "_plain(value)",
        f"{ADMINS}::test_audit_entry_keeps_before_and_after_without_secrets",
    ),
    Mutant(
        "F-50", "changes are not written down", "api/dashboard/changes.py",
        "        audit.record(conn, self.visitor.actor, action, target, before, after, ip=self.visitor.ip)",
        "        return",
        f"{ACCESS}::test_what_changes_is_written_down_with_before_and_after",
    ),
    Mutant(
        "F-50", "keys rotated over HTTP are not written down", "farm/keys.py",
        '    audit.record(conn, _actor(principal), "key.rotate", id8, before, after, ip=ip)\n', "",
        f"{KEYS}::test_changes_of_keys_are_written_down_once_and_without_secrets",
    ),
)  # fmt: skip
