// Headers that most sources include. The build compiles these headers once, for all sources (weft/ops/cpu/build.py). No
// source depends on this file: each source includes what the source uses.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "crew.h"
#include "operators.h"
#include "vector.h"
