from worker.restarts import RestartPolicy


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def policy():
    clock = Clock()
    return RestartPolicy(clock=clock), clock


def test_pauses_grow_and_the_fourth_failure_in_the_window_is_too_many():
    restarts, _ = policy()
    assert [restarts.failed() for _ in range(4)] == [5.0, 15.0, 60.0, None]
    assert restarts.is_sick


def test_sick_group_stays_sick():
    restarts, clock = policy()
    for _ in range(4):
        restarts.failed()
    clock.now = 1e6
    assert restarts.failed() is None


def test_failures_far_apart_make_nobody_sick_but_long_pauses():
    restarts, clock = policy()
    pauses = []
    for _ in range(6):
        pauses.append(restarts.failed())
        clock.now += 400
    assert pauses == [5.0, 15.0, 60.0, 300.0, 300.0, 300.0]
    assert not restarts.is_sick


def test_finished_run_makes_the_next_pause_short_again():
    restarts, clock = policy()
    restarts.failed()
    restarts.failed()
    restarts.finished_run()
    clock.now += 901
    assert restarts.failed() == 5.0


def test_finished_runs_do_not_empty_the_window():
    restarts, _ = policy()
    for _ in range(3):
        restarts.failed()
        restarts.finished_run()
    assert restarts.failed() is None


def test_an_operator_who_restarts_a_sick_group_gives_it_all_its_restarts_back():
    restarts, _ = policy()
    while restarts.failed() is not None:
        pass
    restarts.recover()
    assert not restarts.is_sick
    assert [restarts.failed() for _ in range(3)] == [5.0, 15.0, 60.0]
    assert restarts.num_restarts == 6
