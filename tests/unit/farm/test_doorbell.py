from types import SimpleNamespace

import pytest

from farm.doorbell import TASK, make_celery, queue_of

SETTINGS = SimpleNamespace(redis_url="redis://127.0.0.1:1/0")


@pytest.fixture
def app():
    app = make_celery(SETTINGS, ring=lambda *_: None)
    yield app
    app.close()


def test_settings_are_those_that_the_design_rests_on(app):
    conf = app.conf
    assert (conf.worker_pool, conf.worker_concurrency) == ("threads", 1)
    assert (conf.task_acks_late, conf.worker_prefetch_multiplier) == (True, 1)
    assert conf.task_reject_on_worker_lost is False
    assert conf.worker_cancel_long_running_tasks_on_connection_loss is False
    assert (conf.task_ignore_result, conf.result_backend) == (True, None)
    assert (conf.broker_connection_retry_on_startup, conf.broker_connection_max_retries) == (True, None)
    assert (conf.worker_enable_remote_control, conf.worker_send_task_events) == (True, False)
    assert (conf.task_serializer, conf.accept_content) == ("json", ["json"])


def test_listener_keeps_its_connection_and_publisher_gives_up_soon(app):
    options = app.conf.broker_transport_options
    assert (options["visibility_timeout"], options["socket_timeout"]) == (3600, 30)
    assert (options["health_check_interval"], options["socket_keepalive"]) == (25, True)
    publisher = make_celery(SETTINGS)
    options = publisher.conf.broker_transport_options
    assert (options["socket_timeout"], options["socket_connect_timeout"], options["max_retries"]) == (2, 2, 0)
    publisher.close()


def test_task_only_rings():
    rings = []
    app = make_celery(SETTINGS, ring=lambda job_id, profile: rings.append((job_id, profile)))
    assert app.tasks[TASK](job_id="video_a", profile="sp4") is None
    assert rings == [("video_a", "sp4")]
    app.close()


def test_app_knows_one_task_of_its_own(app):
    assert [name for name in app.tasks if not name.startswith("celery.")] == [TASK]


def test_every_profile_has_a_queue():
    assert queue_of("sp4") == "magi2.render.sp4"
