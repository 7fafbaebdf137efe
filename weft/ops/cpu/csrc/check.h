// Checks of arguments, without torch's headers and without C++ streams.
//
// TORCH_CHECK(condition, "text ", number) writes the message through a std::ostringstream inside this library. Such a
// message ends the process where two copies of libstdc++ meet: the stream of one copy then asks the locale of the
// other. So every check of an operation is a WEFT_CHECK. A WEFT_CHECK raises c10::Error, which Python gets as a
// RuntimeError; a WEFT_CHECK_INDEX raises an IndexError. torch.h defines how.
#pragma once

#include "tensor.h"

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#define WEFT_CHECK(condition, ...)                                                                  \
  do {                                                                                              \
    if (!(condition)) [[unlikely]]                                                                  \
      ::weft::fail({__func__, __FILE__, uint32_t(__LINE__), ::weft::Raised::error}, {__VA_ARGS__}); \
  } while (false)

#define WEFT_CHECK_INDEX(condition, ...)                                                            \
  do {                                                                                              \
    if (!(condition)) [[unlikely]]                                                                  \
      ::weft::fail({__func__, __FILE__, uint32_t(__LINE__), ::weft::Raised::index}, {__VA_ARGS__}); \
  } while (false)

namespace weft {

const char* name_of(Dtype type);

// A part of a message. Refers to texts and sizes, so it lives as long as the expression that makes it.
class MessagePart {
 public:
  MessagePart(const char* text) : text_(text) {}
  MessagePart(const std::string& text) : text_(text) {}
  MessagePart(Dtype type) : text_(name_of(type)) {}
  MessagePart(std::integral auto number) : kind_(Kind::integer), integer_(int64_t(number)) {}
  MessagePart(double number) : kind_(Kind::real), real_(number) {}
  MessagePart(Sizes sizes) : kind_(Kind::sizes), sizes_(sizes) {}

  void append_to(std::string& message) const;

 private:
  enum class Kind { text, integer, real, sizes };
  Kind kind_ = Kind::text;
  union {
    std::string_view text_;
    int64_t integer_;
    double real_;
    Sizes sizes_;
  };
};

enum class Raised { error, index };

struct Place {
  const char *function, *file;
  uint32_t line;
  Raised raised;
};

[[noreturn]] void fail(Place place, std::initializer_list<MessagePart> parts);
// Raises a failure of a group of ranks (torch's DistError).
[[noreturn]] void fail_group(const char* text);
// In a handler: raises the present error of an operation as a failure of the group, and passes other exceptions on.
[[noreturn]] void fail_group();

}  // namespace weft
