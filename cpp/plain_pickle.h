// A reader of pickles that hold plain values alone, without running what they say: numbers, texts, None,
// booleans, lists, dicts and tuples, as protocols 2 to 5 write them. Every other opcode is refused. Values
// stay in tables of this reader; nothing here calls itself, so that nesting costs no stack, and what a file
// may make it take is bounded by the file's size.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "watch.h"

namespace tightship {

class PlainPickle {
  public:
    // Kinds of values; the number beside a kind is an integer, or an index of a table.
    enum Kind : std::uint8_t {
        kMissing,
        kNone,
        kBoolean,
        kInteger,
        kReal,
        kText,
        kList,
        kDict,
        kTuple,
        kWide
    };

    struct Refused : std::runtime_error {
        using std::runtime_error::runtime_error;
    };

    // `data` must outlive the reader. Raises Refused, with the byte and the reason.
    explicit PlainPickle(std::string_view data);

    std::pair<Kind, i64> root() const { return unpacked(root_); }
    // What a list, a tuple or a dict (keys and values in turn) holds.
    const std::vector<std::uint64_t>& items(i64 container) const {
        return containers_.at(static_cast<std::size_t>(container));
    }
    std::pair<Kind, i64> unpacked(std::uint64_t value) const;
    std::string_view text(i64 k) const { return texts_.at(static_cast<std::size_t>(k)); }
    double real(i64 k) const { return reals_.at(static_cast<std::size_t>(k)); }
    // The text's number, -1 where the file does not have it.
    i64 find(std::string_view text) const;
    // The value of a key of a dict, the last one that was set; kMissing without, and for what is no dict.
    std::pair<Kind, i64> at(std::uint64_t dict, i64 key) const;

  private:
    using Value = std::uint64_t;

    static Value packed(Kind kind, std::uint64_t number) { return number << 4 | kind; }
    [[noreturn]] void refuse(const std::string& fault) const;
    void take(std::size_t bytes);
    std::string_view bytes(std::uint64_t count);
    std::uint64_t little(int count);
    void run();
    bool step(std::uint8_t opcode);
    void push(Value value);
    void integer(std::int64_t value);
    void longer(std::uint64_t count);
    void text(std::uint64_t count);
    void container(Kind kind, std::size_t count);
    void extend(Kind kind, std::size_t from);
    std::size_t mark();
    void put(std::uint64_t k);
    void get(std::uint64_t k);

    std::string_view data_;
    std::size_t at_ = 0, began_ = 0, used_ = 0, limit_ = 0;
    Value root_ = 0;
    std::vector<Value> stack_, memo_;
    std::vector<std::size_t> marks_;
    std::vector<std::vector<Value>> containers_;
    std::vector<std::string_view> texts_;
    std::unordered_map<std::string_view, std::uint64_t> known_;
    std::vector<double> reals_;
    std::vector<std::int64_t> wide_;
};

}  // namespace tightship
