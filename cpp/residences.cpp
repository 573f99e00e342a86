#include "residences.h"

namespace tightship {

namespace {

class Lives {
  public:
    Lives(const Uses& u, const std::vector<i64>& size, const std::vector<i64>& state,
          const std::vector<i64>& block, const Requests& q, const PlanSteps& p)
        : u_(u), size_(size), state_(state), block_(block), q_(q), p_(p), saved_(state.size(), -1) {
        for (auto& form : since_) form.assign(size.size(), -1);
        event_.assign(size.size(), -1), packed_.assign(size.size(), 0);
    }

    Residences found() {
        const auto count = static_cast<i64>(p_.kind.size());
        for (i64 i = 0; i < count && out_.wrong < 0; ++i)
            if (!step(i)) out_.wrong = i;
        for (i64 s = 0; s < static_cast<i64>(size_.size()) && out_.wrong < 0; ++s)
            for (const PlanForm form : {kFullForm, kPackedForm, kHostForm})
                if (since_[form][s] >= 0) end(s, form, count, false);
        return std::move(out_);
    }

  private:
    const Uses& u_;
    const std::vector<i64>&size_, &state_, &block_;
    const Requests& q_;
    const PlanSteps& p_;
    std::vector<i64> since_[3], saved_, event_, packed_;
    Residences out_;

    void add(i64 storage, i64 start, i64 end, i64 size, PlanForm form, i64 request, i64 first, i64 last) {
        out_.storage.push_back(storage), out_.start.push_back(start), out_.end.push_back(end);
        out_.size.push_back(size), out_.request.push_back(request), out_.first.push_back(first);
        out_.last.push_back(last), out_.form.push_back(form);
    }

    bool end(i64 s, PlanForm form, i64 i, bool empty) {
        if (since_[form][s] < 0) return false;
        const i64 size = form == kPackedForm ? packed_[s] : size_[s];
        if (size || empty) add(s, since_[form][s], i, size, form, -1, form == kFullForm ? event_[s] : -1, -1);
        since_[form][s] = -1;
        return true;
    }

    void begin(i64 s, PlanForm form, i64 i, i64 event) {
        since_[form][s] = i;
        if (form == kFullForm) event_[s] = event;
        if (form == kPackedForm) packed_[s] = p_.nbytes[i];
    }

    bool step(i64 i) {
        const std::uint8_t kind = p_.kind[i];
        if (kind <= kRecomputes) return op(i, p_.op[i], kind == kRecomputes);
        if (kind == kFrees && p_.form[i] == kStateForm) {
            const i64 k = p_.op[i];
            if (k < 0 || saved_[k] < 0) return false;
            add(-1, saved_[k], i, state_[k], kStateForm, k, -1, -1);
            saved_[k] = -1;
            return true;
        }
        for (const i32 s : p_.storages[i])
            if (kind == kFrees) {
                if (!end(s, static_cast<PlanForm>(p_.form[i]), i, false)) return false;
            } else {
                begin(s,
                      kind == kOffloads     ? kHostForm
                      : kind == kCompresses ? kPackedForm
                                            : kFullForm,
                      i, -1);
            }
        return true;
    }

    bool op(i64 i, i64 k, bool again) {
        const auto reuses = p_.reuses[i];
        for (const i32* pair = reuses.begin(); pair != reuses.end(); pair += 2)
            if (!end(pair[0], kFullForm, i, true)) return false;
        const i64 from = q_.start[k], to = q_.start[k + 1];
        i64 j = 0;
        for (const i32 s : u_.defines[k]) {
            i64 event = -1;
            for (i64 q = from; q < to; ++q)
                if (q_.storage[q] == j) event = q_.begin[q];
            for (const i32* pair = reuses.begin(); pair != reuses.end(); pair += 2)
                if (pair[1] == s) event = -1;
            if (!again || p_.storages.has(i, s)) begin(s, kFullForm, i, event);
            else if (size_[s]) add(s, i, i + 1, size_[s], kFullForm, -1, event, -1);
            ++j;
        }
        for (i64 q = from; q < to; ++q)
            if (q_.storage[q] < 0 && q_.size[q])
                add(-1, i, i + 1, q_.size[q], kFullForm, q - from, q_.begin[q], q_.end[q]);
        if (block_[k]) add(-1, i, i + 1, block_[k], kFullForm, -1, -1, -1);
        if (p_.saves[i]) saved_[k] = i;
        else if (again && state_[k]) add(-1, i, i + 1, state_[k], kStateForm, k, -1, -1);
        return true;
    }
};

}  // namespace

Residences residences(const Uses& u, const std::vector<i64>& size, const std::vector<i64>& state,
                      const std::vector<i64>& block, const Requests& requests, const PlanSteps& steps) {
    return Lives(u, size, state, block, requests, steps).found();
}

}  // namespace tightship
