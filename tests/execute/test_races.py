"""The checker of copies' order finds what nothing orders, and nothing else."""

from support.races import Record, Sync, Wait, Work, races

OUT = Work(1, reads=((0, 512),), name="out")
OVER = Work(0, writes=((256, 768),), name="over")


def test_works_of_two_streams_on_the_same_bytes_are_a_race_whichever_is_asked_for_first():
    assert races([OUT, OVER]) == [("out", "over")]
    assert races([OVER, OUT]) == [("over", "out")]


def test_reading_together_and_touching_other_bytes_is_none():
    assert not races([OUT, Work(0, reads=((0, 512),))])
    assert not races([OUT, Work(0, writes=((512, 768),))])


def test_an_event_orders_what_was_asked_for_before_it_was_recorded():
    assert not races([OUT, Record(1, 9), Wait(0, 9), OVER])
    assert races([Record(1, 9), OUT, Wait(0, 9), OVER])
    assert races([OUT, Record(1, 9), Wait(2, 9), OVER])
    assert races([OUT, Record(1, 9), Record(1, 8), OVER, Wait(0, 9)])


def test_waiting_is_passed_on():
    assert not races([OUT, Record(1, 9), Wait(2, 9), Record(2, 8), Wait(0, 8), OVER])
    assert not races([OUT, Sync(), OVER])
    assert not races([OUT, Sync(), Work(3, writes=((0, 8),))])
    assert races([OUT, Sync(), OUT, OVER]) == [("out", "over")]
