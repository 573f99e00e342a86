"""The meter's peak is the exact peak of torch's allocator, however meters nest."""

import threading

import pytest

torch = pytest.importorskip("torch")

from support.blocks import KB, block  # noqa: E402
from tightship.execute.allocator import Meter  # noqa: E402


class TestMeter:
    def test_peak_and_level_are_exact(self) -> None:
        with Meter() as meter:
            a = block(10)
            b = block(20)
            del a
            c = block(5)
            assert (meter.peak, meter.current) == (30 * KB, 25 * KB)
            del b, c
        assert (meter.peak, meter.current) == (30 * KB, 0)

    def test_requests_are_rounded_up_to_64(self) -> None:
        with Meter() as meter:
            kept = [torch.empty(n, dtype=torch.uint8) for n in (1, 64, 65, 0)]
            assert meter.peak == 64 + 64 + 128
        del kept

    def test_what_is_freed_lowers_the_level_but_not_the_peak(self) -> None:
        before = block(10)
        with Meter() as meter:
            del before
            assert (meter.peak, meter.current) == (0, -10 * KB)
            again = block(12)
            assert (meter.peak, meter.current) == (2 * KB, 2 * KB)
        del again

    def test_nested_and_overlapping_meters_do_not_disturb_each_other(self) -> None:
        outer, inner, late = Meter(), Meter(), Meter()
        with outer:
            block(50)
            kept = block(10)
            with inner:
                block(7)
                late.__enter__()
            block(30)
        assert (outer.peak, inner.peak) == (50 * KB, 7 * KB)
        block(40)
        assert late.peak == 40 * KB
        late.__exit__(None, None, None)
        block(60)
        assert late.peak == 40 * KB
        del kept

    def test_counts_all_threads_and_temporaries_of_ops(self) -> None:
        a, b = torch.ones(4, 1, 64, 32), torch.ones(4, 32, 64)
        with Meter() as meter:
            thread = threading.Thread(target=lambda: block(100))
            thread.start()
            thread.join()
        assert meter.peak == 100 * KB
        with Meter() as meter:
            out = torch.matmul(a, b)  # expands both operands into memory first
        assert meter.peak == 16 * 4 * (64 * 32 + 32 * 64 + 64 * 64)
        assert meter.current == out.nbytes

    def test_a_running_meter_cannot_be_entered_again(self) -> None:
        meter = Meter()
        with meter, pytest.raises(RuntimeError, match="already running"):
            meter.__enter__()
        with meter:
            block(3)
        assert meter.peak == 3 * KB
