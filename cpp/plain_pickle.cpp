// Opcodes and their meaning: Python's Lib/pickletools.py; PyTorch's own writer (torch/csrc/jit/serialization/
// pickler.cpp) uses a part of them.

#include "plain_pickle.h"

#include <bit>

namespace tightship {

namespace {

constexpr std::size_t kPerByte = 16;  // memory for each byte of the file, several times what snapshots take
constexpr std::size_t kBeside = 1 << 20;  // and beside
constexpr std::size_t kMarks = 256;       // marks at one time: containers that are being filled
constexpr std::size_t kTextBytes = 96;    // an entry of a table of texts, and of the map to it
constexpr std::int64_t kInline = std::int64_t{1} << 59;

std::string name_of(std::uint8_t opcode) {
    static const std::unordered_map<std::uint8_t, const char*> names = {{'c', "GLOBAL"},
                                                                        {0x93, "STACK_GLOBAL"},
                                                                        {'R', "REDUCE"},
                                                                        {'b', "BUILD"},
                                                                        {'i', "INST"},
                                                                        {'o', "OBJ"},
                                                                        {0x81, "NEWOBJ"},
                                                                        {0x92, "NEWOBJ_EX"},
                                                                        {'P', "PERSID"},
                                                                        {'Q', "BINPERSID"},
                                                                        {0x82, "EXT1"},
                                                                        {0x83, "EXT2"},
                                                                        {0x84, "EXT4"},
                                                                        {'B', "BINBYTES"},
                                                                        {'C', "SHORT_BINBYTES"},
                                                                        {0x8e, "BINBYTES8"},
                                                                        {0x96, "BYTEARRAY8"},
                                                                        {0x97, "NEXT_BUFFER"},
                                                                        {0x98, "READONLY_BUFFER"},
                                                                        {0x8f, "EMPTY_SET"},
                                                                        {0x90, "ADDITEMS"},
                                                                        {0x91, "FROZENSET"},
                                                                        {'0', "POP"},
                                                                        {'1', "POP_MARK"},
                                                                        {'2', "DUP"},
                                                                        {'U', "SHORT_BINSTRING"},
                                                                        {'T', "BINSTRING"},
                                                                        {'S', "STRING"},
                                                                        {'V', "UNICODE"},
                                                                        {'I', "INT"},
                                                                        {'L', "LONG"},
                                                                        {'F', "FLOAT"},
                                                                        {'d', "DICT"},
                                                                        {'l', "LIST"},
                                                                        {'g', "GET"},
                                                                        {'p', "PUT"}};
    const auto found = names.find(opcode);
    static const char digits[] = "0123456789abcdef";
    const std::string code = std::string("0x") + digits[opcode >> 4] + digits[opcode & 15];
    return found == names.end() ? code : found->second;
}

}  // namespace

PlainPickle::PlainPickle(std::string_view data) : data_(data), limit_(kBeside + kPerByte * data.size()) {
    run();
}

void PlainPickle::refuse(const std::string& fault) const {
    throw Refused("at byte " + std::to_string(began_) + ": " + fault);
}

void PlainPickle::take(std::size_t bytes) {
    used_ += bytes;
    if (used_ > limit_) refuse("its values need far more memory than those of a file of its size");
}

std::string_view PlainPickle::bytes(std::uint64_t count) {
    if (count > data_.size() - at_) refuse("the file ends here: it is incomplete");
    const std::string_view found = data_.substr(at_, count);
    at_ += count;
    return found;
}

std::uint64_t PlainPickle::little(int count) {
    std::uint64_t value = 0;
    const std::string_view found = bytes(static_cast<std::uint64_t>(count));
    for (int k = 0; k < count; ++k)
        value |= static_cast<std::uint64_t>(static_cast<std::uint8_t>(found[static_cast<std::size_t>(k)]))
                 << 8 * k;
    return value;
}

void PlainPickle::run() {
    if (little(1) != 0x80) refuse("no pickle of protocol 2 or later begins like this");
    if (const auto protocol = little(1); protocol < 2 || protocol > 5)
        refuse("it is a pickle of protocol " + std::to_string(protocol) + ", not 2 to 5");
    do began_ = at_;
    while (step(static_cast<std::uint8_t>(little(1))));
    if (stack_.size() != 1 || !marks_.empty())
        refuse("it ends with " + std::to_string(stack_.size()) + " values");
    root_ = stack_.back();
    if (at_ != data_.size())
        refuse("it ends here, but " + std::to_string(data_.size() - at_) + " bytes follow");
    stack_ = memo_ = {};
}

// Does what an opcode says; false at the end.
bool PlainPickle::step(std::uint8_t opcode) {
    switch (opcode) {
        case '.':
            return false;
        case 0x95:
            if (little(8) > data_.size() - at_) refuse("the file ends within a frame: it is incomplete");
            break;
        case '(':
            if (marks_.size() == kMarks) refuse("values are nested deeper than those of a snapshot");
            marks_.push_back(stack_.size());
            break;
        case 'N':
            push(packed(kNone, 0));
            break;
        case 0x88:
            push(packed(kBoolean, 1));
            break;
        case 0x89:
            push(packed(kBoolean, 0));
            break;
        case 'K':
            integer(static_cast<std::int64_t>(little(1)));
            break;
        case 'M':
            integer(static_cast<std::int64_t>(little(2)));
            break;
        case 'J':
            integer(static_cast<std::int32_t>(little(4)));
            break;
        case 0x8a:
            longer(little(1));
            break;
        case 0x8b:
            longer(little(4));
            break;
        case 'G': {
            const std::string_view found = bytes(8);
            std::uint64_t bits = 0;
            for (const char c : found) bits = bits << 8 | static_cast<std::uint8_t>(c);
            take(sizeof(double));
            reals_.push_back(std::bit_cast<double>(bits));
            push(packed(kReal, reals_.size() - 1));
            break;
        }
        case 0x8c:
            text(little(1));
            break;
        case 'X':
            text(little(4));
            break;
        case 0x8d:
            text(little(8));
            break;
        case ']':
            container(kList, 0);
            break;
        case '}':
            container(kDict, 0);
            break;
        case ')':
            container(kTuple, 0);
            break;
        case 0x85:
            container(kTuple, 1);
            break;
        case 0x86:
            container(kTuple, 2);
            break;
        case 0x87:
            container(kTuple, 3);
            break;
        case 't': {
            const std::size_t from = mark();
            container(kTuple, stack_.size() - from);
            break;
        }
        case 'a':
            if (stack_.size() < 2) refuse("it appends to nothing");
            extend(kList, stack_.size() - 1);
            break;
        case 'e':
            extend(kList, mark());
            break;
        case 's':
            if (stack_.size() < 3) refuse("it sets an item of nothing");
            extend(kDict, stack_.size() - 2);
            break;
        case 'u':
            extend(kDict, mark());
            break;
        case 'q':
            put(little(1));
            break;
        case 'r':
            put(little(4));
            break;
        case 0x94:
            put(memo_.size());
            break;
        case 'h':
            get(little(1));
            break;
        case 'j':
            get(little(4));
            break;
        default:
            refuse("the opcode " + name_of(opcode) +
                   ", which no snapshot has; what may run code is not read");
    }
    return true;
}

void PlainPickle::push(Value value) {
    const std::size_t before = stack_.capacity();
    stack_.push_back(value);
    take((stack_.capacity() - before) * sizeof(Value));
}

void PlainPickle::integer(std::int64_t value) {
    if (value >= -kInline && value < kInline) {
        push(packed(kInteger, static_cast<std::uint64_t>(value)));
        return;
    }
    take(sizeof(value));
    wide_.push_back(value);
    push(packed(kWide, wide_.size() - 1));
}

// Two's complement of so many bytes. Addresses of some devices fill 64 bits; they wrap around.
void PlainPickle::longer(std::uint64_t count) {
    if (count > 9) refuse("an integer of " + std::to_string(count) + " bytes: at most 8 are read");
    const std::string_view found = bytes(count);
    if (count == 9 && found[8] != 0) refuse("an integer of more than 64 bits");
    std::uint64_t value = 0;
    for (std::size_t k = 0; k < count && k < 8; ++k)
        value |= static_cast<std::uint64_t>(static_cast<std::uint8_t>(found[k])) << 8 * k;
    if (count && count < 8 && static_cast<std::uint8_t>(found[count - 1]) & 0x80)
        value |= ~std::uint64_t{0} << 8 * count;
    integer(static_cast<std::int64_t>(value));
}

void PlainPickle::text(std::uint64_t count) {
    const auto [place, fresh] = known_.try_emplace(bytes(count), texts_.size());
    if (fresh) {
        take(kTextBytes);
        texts_.push_back(place->first);
    }
    push(packed(kText, place->second));
}

void PlainPickle::container(Kind kind, std::size_t count) {
    if (stack_.size() - (marks_.empty() ? 0 : marks_.back()) < count)
        refuse("a tuple of values that are not there");
    const auto first = stack_.end() - static_cast<std::ptrdiff_t>(count);
    const std::size_t before = containers_.capacity();
    containers_.emplace_back(first, stack_.end());
    // What is allocated has bytes beside its own.
    take((containers_.capacity() - before) * sizeof(containers_[0]) +
         (count ? 16 + count * sizeof(Value) : 0));
    stack_.erase(first, stack_.end());
    push(packed(kind, containers_.size() - 1));
}

// Adds what stands on the stack from there on to the container below.
void PlainPickle::extend(Kind kind, std::size_t from) {
    const std::size_t least = marks_.empty() ? 0 : marks_.back();
    if (from <= least) refuse("it fills a container that is not there");
    const Value target = stack_[from - 1];
    if (static_cast<Kind>(target & 15) != kind) refuse("it fills a container of another kind");
    if (kind == kDict && (stack_.size() - from) % 2) refuse("a key without a value");
    std::vector<Value>& items = containers_[target >> 4];
    const std::size_t before = items.capacity();
    items.insert(items.end(), stack_.begin() + static_cast<std::ptrdiff_t>(from), stack_.end());
    if (items.capacity() != before) take((items.capacity() - before) * sizeof(Value) + 16);
    stack_.resize(from);
}

std::size_t PlainPickle::mark() {
    if (marks_.empty()) refuse("no mark is there");
    const std::size_t found = marks_.back();
    marks_.pop_back();
    return found;
}

void PlainPickle::put(std::uint64_t k) {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back()))
        refuse("it remembers a value that is not there");
    if (k > memo_.size()) refuse("values are not remembered one after the other");
    if (k < memo_.size()) {
        memo_[k] = stack_.back();
        return;
    }
    const std::size_t before = memo_.capacity();
    memo_.push_back(stack_.back());
    take((memo_.capacity() - before) * sizeof(Value));
}

void PlainPickle::get(std::uint64_t k) {
    if (k >= memo_.size()) refuse("it recalls a value that was not remembered");
    push(memo_[k]);
}

std::pair<PlainPickle::Kind, i64> PlainPickle::unpacked(std::uint64_t value) const {
    const auto kind = static_cast<Kind>(value & 15);
    const i64 number = static_cast<i64>(value) >> 4;
    return kind == kWide ? std::pair{kInteger, static_cast<i64>(wide_[static_cast<std::size_t>(number)])}
                         : std::pair{kind, number};
}

i64 PlainPickle::find(std::string_view text) const {
    const auto found = known_.find(text);
    return found == known_.end() ? -1 : static_cast<i64>(found->second);
}

std::pair<PlainPickle::Kind, i64> PlainPickle::at(std::uint64_t dict, i64 key) const {
    if (key >= 0 && static_cast<Kind>(dict & 15) == kDict) {
        const std::vector<Value>& items = containers_[dict >> 4];
        for (std::size_t k = items.size(); k > 0; k -= 2)
            if (items[k - 2] == packed(kText, static_cast<std::uint64_t>(key))) return unpacked(items[k - 1]);
    }
    return {kMissing, 0};
}

}  // namespace tightship
