// Checks whose messages have values, without C++ streams.
//
// TORCH_CHECK(condition, "text ", number) writes the message through a std::ostringstream inside this library. Such a
// message ends the process where two copies of libstdc++ meet: the stream of one copy then asks the locale of the
// other. So a check with values is a WEFT_CHECK, and a check with constant text may be a TORCH_CHECK. Both raise
// c10::Error, which Python gets as a RuntimeError; a WEFT_CHECK_INDEX raises an IndexError.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#define WEFT_CHECK(condition, ...)                                                                         \
  do {                                                                                                     \
    if (C10_UNLIKELY(!(condition))) ::weft::fail({__func__, __FILE__, uint32_t(__LINE__)}, {__VA_ARGS__}); \
  } while (false)

#define WEFT_CHECK_INDEX(condition, ...)                                                                         \
  do {                                                                                                           \
    if (C10_UNLIKELY(!(condition))) ::weft::fail_index({__func__, __FILE__, uint32_t(__LINE__)}, {__VA_ARGS__}); \
  } while (false)

namespace weft {

// A part of a message. Refers to texts and sizes, so it lives as long as the expression that makes it.
class MessagePart {
 public:
  MessagePart(const char* text) : text_(text) {}
  MessagePart(const std::string& text) : text_(text) {}
  MessagePart(at::ScalarType type) : text_(at::toString(type)) {}
  MessagePart(std::integral auto number) : kind_(Kind::integer), integer_(int64_t(number)) {}
  MessagePart(double number) : kind_(Kind::real), real_(number) {}
  MessagePart(at::IntArrayRef sizes) : kind_(Kind::sizes), sizes_(sizes) {}

  void append_to(std::string& message) const;

 private:
  enum class Kind { text, integer, real, sizes };
  Kind kind_ = Kind::text;
  union {
    std::string_view text_;
    int64_t integer_;
    double real_;
    at::IntArrayRef sizes_;
  };
};

[[noreturn]] void fail(c10::SourceLocation where, std::initializer_list<MessagePart> parts);
[[noreturn]] void fail_index(c10::SourceLocation where, std::initializer_list<MessagePart> parts);

}  // namespace weft
