// What ends a search of the core: a deadline, or Ctrl-C.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <limits>

#include "watch.h"

namespace tightship {

// Between the parts of what is prepared with the interpreter locked: Ctrl-C is raised at once.
inline void raise_signals() {
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
}

template <class Work> auto unlocked(Work work) {
    const nanobind::gil_scoped_release free;
    return work();
}

// Takes note of Ctrl-C instead of raising it: what was found by then is not lost. From then on it rings at
// once.
class Alarm {
  public:
    bool interrupted() const { return interrupted_; }
    // For work of which a part is worth nothing: Ctrl-C is raised after all.
    void raise() const {
        if (!interrupted_) return;
        PyErr_SetNone(PyExc_KeyboardInterrupt);
        throw nanobind::python_error();
    }

    Watch set(double seconds = std::numeric_limits<double>::infinity()) {
        began_ = polled_ = Clock::now();
        seconds_ = seconds;
        return [this] { return rings(); };
    }

    // What a function of Python's answers, with the interpreter locked; true where Ctrl-C ended it, or came
    // before.
    template <class Ask> bool call(Ask ask) {
        nanobind::gil_scoped_acquire locked;
        try {
            raise_signals();
            return ask();
        } catch (nanobind::python_error& raised) {
            if (!raised.matches(PyExc_KeyboardInterrupt)) throw;
            return interrupted_ = true;
        }
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
        return call([] { return false; });
    }
};

}  // namespace tightship
