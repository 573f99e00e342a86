"""When Python searches for garbage."""

import gc
import threading

import pytest

from tightship.garbage import garbage_apart, garbage_waits


def test_the_last_one_that_waits_ends_the_wait():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with garbage_waits():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with garbage_waits():
        thread.start()
        inside.wait()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_who_has_switched_the_search_off_keeps_it_off():
    gc.disable()
    try:
        with garbage_waits():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_leaves_nothing_behind():
    callbacks = [*gc.callbacks]
    with pytest.raises(KeyError), garbage_apart(list, lambda _: None):
        raise KeyError
    assert gc.isenabled()
    assert gc.callbacks == callbacks


def test_a_search_that_is_asked_for_is_told_of_on_its_thread_alone():
    told = []
    with garbage_apart(lambda: told.append("begins") or 7, told.append):
        gc.collect()
        elsewhere = threading.Thread(target=gc.collect)
        elsewhere.start()
        elsewhere.join()
    assert told == ["begins", 7]
