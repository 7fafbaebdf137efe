// Operators as torch calls them: arguments and results are boxed values on a stack.
//
// torch::Library::impl(name, function) instantiates several templates for each operator. The templates here only read
// the arguments of a signature. Python and program.h call operators with boxed values anyway.
#pragma once

#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "torch.h"

namespace weft {
namespace {

using Stack = torch::jit::Stack;

// An argument of type T, read from a boxed value. The value outlives the argument.
template <class T>
struct Given;

template <>
struct Given<Tensor> {
  explicit Given(const c10::IValue& value) : tensor(borrowed(value.toTensor())) {}
  operator Tensor&() { return tensor; }
  Tensor tensor;
};
template <>
struct Given<std::optional<Tensor>> {
  explicit Given(const c10::IValue& value) {
    if (!value.isNone()) tensor.emplace(borrowed(value.toTensor()));
  }
  operator std::optional<Tensor>&() { return tensor; }
  std::optional<Tensor> tensor;
};
template <>
struct Given<std::vector<Tensor>> {
  explicit Given(const c10::IValue& value) {
    for (const c10::IValue& one : value.toListRef()) tensors.push_back(borrowed(one.toTensor()));
  }
  operator std::vector<Tensor>&() { return tensors; }
  std::vector<Tensor> tensors;
};
template <>
struct Given<std::vector<int64_t>> {
  explicit Given(const c10::IValue& value) : numbers(value.toIntVector()) {}
  operator std::vector<int64_t>&() { return numbers; }
  std::vector<int64_t> numbers;
};
template <>
struct Given<Sizes> {
  explicit Given(const c10::IValue& value) : numbers(value.toIntVector()) {}
  operator Sizes() { return numbers; }
  std::vector<int64_t> numbers;
};
template <>
struct Given<int64_t> {
  explicit Given(const c10::IValue& value) : number(value.toInt()) {}
  operator int64_t() { return number; }
  int64_t number;
};
template <>
struct Given<double> {
  explicit Given(const c10::IValue& value) : number(value.toDouble()) {}
  operator double() { return number; }
  double number;
};
template <>
struct Given<bool> {
  explicit Given(const c10::IValue& value) : flag(value.toBool()) {}
  operator bool() { return flag; }
  bool flag;
};
template <>
struct Given<Dtype> {
  explicit Given(const c10::IValue& value) : type(Dtype(value.toScalarType())) {}
  operator Dtype() { return type; }
  Dtype type;
};

inline void push(Stack& stack, Tensor&& made) { stack.emplace_back(torch_tensor(std::move(made))); }
inline void push(Stack& stack, int64_t made) { stack.emplace_back(made); }
inline void push(Stack& stack, bool made) { stack.emplace_back(made); }
inline void push(Stack& stack, std::vector<int64_t>&& made) { stack.emplace_back(std::move(made)); }
inline void push(Stack& stack, std::vector<std::string>&& made) { stack.emplace_back(std::move(made)); }
template <class... T>
void push(Stack& stack, std::tuple<T...>&& made) {
  std::apply([&](T&... one) { (push(stack, std::move(one)), ...); }, made);
}

template <class R, class... A, size_t... at>
void call(R (*function)(A...), Stack& stack, std::index_sequence<at...>) {
  constexpr size_t count = sizeof...(A);
  const c10::IValue* const given = stack.data() + stack.size() - count;
  if constexpr (std::is_void_v<R>) {
    function(Given<std::remove_cvref_t<A>>(given[at])...);
    stack.resize(stack.size() - count);
  } else {
    R made = function(Given<std::remove_cvref_t<A>>(given[at])...);
    stack.resize(stack.size() - count);
    push(stack, std::move(made));
  }
}

template <class R, class... A>
void call(R (*function)(A...), Stack& stack) {
  call(function, stack, std::index_sequence_for<A...>());
}

// A function that takes arguments from a stack and puts results there.
class Operator : public c10::OperatorKernel {
 public:
  explicit Operator(void (*run)(Stack&)) : run_(run) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) { run_(*stack); }

 private:
  void (*run_)(Stack&);
};

template <class R, class... A>
constexpr size_t arguments_of(R (*)(A...)) {
  return sizeof...(A);
}

// `call` takes as many values from the stack as the function has arguments.
inline void add_operator(torch::Library& m, const char* text, c10::DispatchKey key, size_t arguments,
                         void (*run)(Stack&)) {
  c10::FunctionSchema schema = torch::schema(text);
  const std::string name = schema.name();
  WEFT_CHECK(schema.arguments().size() == arguments, name, ": ", schema.arguments().size(),
             " arguments in the schema, and ", arguments, " of the function");
  m.def(std::move(schema));
  m.impl(name.c_str(), torch::dispatch(key, torch::CppFunction::makeFromBoxedKernel(
                                                c10::BoxedKernel::makeFromFunctor(std::make_unique<Operator>(run)))));
}

// Adds `function` under the name in `schema`, for tensors on the CPU.
template <auto function>
void add(torch::Library& m, const char* schema) {
  add_operator(m, schema, c10::DispatchKey::CPU, arguments_of(function), [](Stack& stack) { call(function, stack); });
}

// The same for an operator without tensor arguments, or with tensors of any device.
template <auto function>
void add_anywhere(torch::Library& m, const char* schema) {
  add_operator(m, schema, c10::DispatchKey::CompositeImplicitAutograd, arguments_of(function),
               [](Stack& stack) { call(function, stack); });
}

}  // namespace
}  // namespace weft
