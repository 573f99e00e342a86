// What ends a search of the core: a deadline, or Ctrl-C.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>

#include "place.h"

namespace tightship::place {

// Between the parts of what is prepared with the interpreter locked: Ctrl-C is raised at once.
inline void raise_signals() {
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
}

// Takes note of Ctrl-C instead of raising it: what was found by then is not lost. From then on it rings at once.
class Alarm {
  public:
    bool interrupted() const { return interrupted_; }
    // For work of which a part is worth nothing.
    void raise() const {
        if (!interrupted_) return;
        PyErr_SetNone(PyExc_KeyboardInterrupt);
        throw nanobind::python_error();
    }

    Watch set(double seconds) {
        began_ = polled_ = Clock::now();
        seconds_ = seconds;
        return [this] { return rings(); };
    }

  private:
    using Clock = std::chrono::steady_clock;
    static constexpr auto kPollEvery = std::chrono::milliseconds(10);

    Clock::time_point began_, polled_;
    double seconds_ = 0;
    bool interrupted_ = false;

    bool rings() {
        const auto now = Clock::now();
        if (interrupted_ || std::chrono::duration<double>(now - began_).count() >= seconds_) return true;
        if (now - polled_ < kPollEvery) return false;
        polled_ = now;
        nanobind::gil_scoped_acquire locked;
        if (PyErr_CheckSignals() == 0) return false;
        if (!PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) throw nanobind::python_error();
        PyErr_Clear();
        return interrupted_ = true;
    }
};

}  // namespace tightship::place
