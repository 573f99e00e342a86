#include "linear_bound.h"

#include <algorithm>
#include <cmath>

namespace tightship {

namespace {

using Numbers = std::vector<double>;

constexpr i64 kLook = 40;  // rounds between two looks at how good the prices are
constexpr i64 kIdle = 480,
              kPart = 8;  // rounds, and the part of all, without a part more of `kLittle` that end it
constexpr double kLittle = 5e-4;
constexpr double kRestart = 0.4;  // a restart comes when the distance is this part of what it was
constexpr double kLong = 0.36;    // or when the rounds since the last one are this part of all
constexpr double kStep = 0.99;
constexpr double kRounding = 1e-11;  // part of all terms of a sum that rounding may come to, by far

double length(const Numbers& a) {
    double sum = 0;
    for (const double x : a) sum += x * x;
    return std::sqrt(sum);
}

double apart(const Numbers& a, const Numbers& b) {
    double sum = 0;
    for (std::size_t k = 0; k < a.size(); ++k) sum += (a[k] - b[k]) * (a[k] - b[k]);
    return std::sqrt(sum);
}

// The entries of the scaled matrix by row and by column.
class Matrix {
  public:
    explicit Matrix(const Linear& p)
        : first_(p.first), column_(p.column), value_(p.coefficient), by_row_(p.rows(), 1),
          by_column_(p.columns(), 1) {
        for (int turn = 0; turn < 8; ++turn) scale(false);
        scale(true);
        transpose(p.columns());
    }

    const Numbers& row_scale() const { return by_row_; }
    const Numbers& column_scale() const { return by_column_; }

    // out = A x
    void times(const Numbers& x, Numbers& out) const {
        for (std::size_t i = 0; i + 1 < first_.size(); ++i) {
            double sum = 0;
            for (i64 e = first_[i]; e < first_[i + 1]; ++e) sum += value_[e] * x[column_[e]];
            out[i] = sum;
        }
    }

    // out = cost + y A
    void priced(const Numbers& y, const Numbers& cost, Numbers& out) const {
        for (std::size_t j = 0; j + 1 < from_.size(); ++j) {
            double sum = cost[j];
            for (i64 e = from_[j]; e < from_[j + 1]; ++e) sum += across_[e] * y[row_[e]];
            out[j] = sum;
        }
    }

  private:
    std::vector<i64> first_, from_;
    std::vector<i32> column_, row_;
    Numbers value_, across_, by_row_, by_column_;

    // By the roots of the largest entries (Ruiz 2001), or of the sums.
    void scale(bool sums) {
        Numbers rows(by_row_.size(), 0), columns(by_column_.size(), 0);
        auto add = [&](double& to, double x) { to = sums ? to + x : std::max(to, x); };
        for (std::size_t i = 0; i + 1 < first_.size(); ++i)
            for (i64 e = first_[i]; e < first_[i + 1]; ++e)
                add(rows[i], std::abs(value_[e])), add(columns[column_[e]], std::abs(value_[e]));
        for (double& x : rows) x = x > 0 ? 1 / std::sqrt(x) : 1;
        for (double& x : columns) x = x > 0 ? 1 / std::sqrt(x) : 1;
        for (std::size_t i = 0; i + 1 < first_.size(); ++i) {
            by_row_[i] *= rows[i];
            for (i64 e = first_[i]; e < first_[i + 1]; ++e) value_[e] *= rows[i] * columns[column_[e]];
        }
        for (std::size_t j = 0; j < columns.size(); ++j) by_column_[j] *= columns[j];
    }

    void transpose(i64 columns) {
        from_.assign(columns + 1, 0), row_.resize(value_.size()), across_.resize(value_.size());
        for (const i32 c : column_) ++from_[c + 1];
        for (i64 j = 0; j < columns; ++j) from_[j + 1] += from_[j];
        std::vector<i64> next(from_.begin(), from_.end() - 1);
        for (std::size_t i = 0; i + 1 < first_.size(); ++i)
            for (i64 e = first_[i]; e < first_[i + 1]; ++e) {
                const i64 at = next[column_[e]]++;
                row_[at] = static_cast<i32>(i), across_[at] = value_[e];
            }
    }
};

// Points of the program and of its dual, moved round by round.
class Gradient {
  public:
    explicit Gradient(const Linear& p) : a_(p), cost_(p.cost), low_(p.low), high_(p.high), limit_(p.limit) {
        for (std::size_t j = 0; j < cost_.size(); ++j) {
            const double scale = a_.column_scale()[j];
            cost_[j] *= scale, low_[j] /= scale, high_[j] /= scale;
        }
        for (std::size_t i = 0; i < limit_.size(); ++i) limit_[i] *= a_.row_scale()[i];
        now_ = start_ = {low_, Numbers(limit_.size(), 0)};
        reduced_.resize(cost_.size()), reached_.resize(limit_.size()), ahead_.resize(cost_.size());
        const double of_cost = length(cost_), of_limit = length(limit_);
        weight_ = of_cost > 0 && of_limit > 0 ? of_cost / of_limit : 1;
        begin();
    }

    void round() {
        a_.priced(now_.y, cost_, reduced_);
        for (std::size_t j = 0; j < cost_.size(); ++j) {
            const double to = std::clamp(now_.x[j] - kStep / weight_ * reduced_[j], low_[j], high_[j]);
            ahead_[j] = 2 * to - now_.x[j], now_.x[j] = to, sum_.x[j] += to;
        }
        a_.times(ahead_, reached_);
        for (std::size_t i = 0; i < limit_.size(); ++i) {
            now_.y[i] = std::max(0.0, now_.y[i] + kStep * weight_ * (reached_[i] - limit_[i]));
            sum_.y[i] += now_.y[i];
        }
        ++rounds_, ++since_;
    }

    // The better bound of the point there is and of the mean since the last restart, which comes where it is
    // time; `best` is where it is better than that.
    void look(Bound& best) {
        Point mean = sum_;
        for (double& x : mean.x) x /= static_cast<double>(since_);
        for (double& y : mean.y) y /= static_cast<double>(since_);
        const auto [bound, far] = judged(now_);
        const auto [of_mean, far_mean] = judged(mean);
        const double least = std::min(far, far_mean);
        if (std::max(bound, of_mean) > best.value) {
            best.value = std::max(bound, of_mean);
            best.prices = bound >= of_mean ? now_.y : mean.y;
            for (std::size_t i = 0; i < limit_.size(); ++i) best.prices[i] *= a_.row_scale()[i];
        }
        if (distance_ < 0) distance_ = least;
        if (least < kRestart * distance_ ||
            static_cast<double>(since_) >= kLong * static_cast<double>(rounds_)) {
            if (far_mean < far) now_ = std::move(mean);
            const double x = apart(now_.x, start_.x), y = apart(now_.y, start_.y);
            if (x > 1e-12 && y > 1e-12) weight_ = std::sqrt(y / x * weight_);
            start_ = now_, distance_ = least;
            begin();
        }
    }

  private:
    struct Point {
        Numbers x, y;
    };
    Matrix a_;
    Numbers cost_, low_, high_, limit_, reduced_, reached_, ahead_;
    Point now_, start_, sum_;
    double weight_ = 1, distance_ = -1;
    i64 rounds_ = 0, since_ = 0;

    void begin() {
        sum_ = {Numbers(cost_.size(), 0), Numbers(limit_.size(), 0)};
        since_ = 0;
    }

    // What the prices of a point prove, and how far it is from being a solution.
    std::pair<double, double> judged(const Point& at) {
        a_.priced(at.y, cost_, reduced_);
        a_.times(at.x, reached_);
        double value = 0, terms = 0, cost = 0, over = 0;
        auto add = [&](double term) { value += term, terms += std::abs(term); };
        for (std::size_t j = 0; j < cost_.size(); ++j) {
            add(std::min(reduced_[j] * low_[j], reduced_[j] * high_[j]));
            cost += cost_[j] * at.x[j];
        }
        for (std::size_t i = 0; i < limit_.size(); ++i) {
            add(-at.y[i] * limit_[i]);
            const double excess = std::max(0.0, reached_[i] - limit_[i]);
            over += excess * excess;
        }
        return {value - kRounding * terms, std::sqrt(over) * weight_ + std::max(0.0, cost - value)};
    }
};

}  // namespace

Bound linear_bound(const Linear& program, i64 rounds, double enough, const Watch& watch) {
    Gradient gradient(program);
    Bound best{0, Numbers(program.limit.size(), 0)};
    double known = 0;
    i64 since = 0;
    for (i64 k = 1; k <= rounds; ++k) {
        gradient.round();
        if (k % kLook) continue;
        gradient.look(best);
        if (best.value > known * (1 + kLittle)) known = best.value, since = k;
        if (best.value >= enough || k - since >= std::max(kIdle, rounds / kPart) || watch()) break;
    }
    return best;
}

}  // namespace tightship
