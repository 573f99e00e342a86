// What ends a long search from outside.
#pragma once

#include <cstdint>
#include <functional>

namespace tightship {

using i32 = std::int32_t;
using i64 = std::int64_t;

// Asked again and again while the core works, in the calling thread; true: stop, with the best so far. May
// throw.
using Watch = std::function<bool()>;

}  // namespace tightship
