// The messages of check.h. Integers, sizes and real numbers read as a std::ostream writes them.
#include "check.h"

#include <cstdio>

namespace weft {
namespace {

std::string joined(std::initializer_list<MessagePart> parts) {
  std::string message;
  for (const MessagePart& part : parts) part.append_to(message);
  return message;
}

}  // namespace

void MessagePart::append_to(std::string& message) const {
  switch (kind_) {
    case Kind::text:
      message += text_;
      return;
    case Kind::integer:
      message += std::to_string(integer_);
      return;
    case Kind::real: {
      char digits[32];
      std::snprintf(digits, sizeof(digits), "%g", real_);
      message += digits;
      return;
    }
    case Kind::sizes:
      message += '[';
      for (size_t dim = 0; dim < sizes_.size(); ++dim) {
        if (dim > 0) message += ", ";
        message += std::to_string(sizes_[dim]);
      }
      message += ']';
  }
}

void fail(c10::SourceLocation where, std::initializer_list<MessagePart> parts) {
  throw c10::Error(where, joined(parts));
}

void fail_index(c10::SourceLocation where, std::initializer_list<MessagePart> parts) {
  throw c10::IndexError(where, joined(parts));
}

}  // namespace weft
