// A recorded sequence of operator calls, run without Python: what a decode step of few rows spends most on.
//
//   registers  values that calls made; a register is emptied by the last call that reads it
//   call       operator, arguments (constants and registers, in the order of its schema), registers for its results
//
// Built by weft/runner/programs.py, argument by argument: `constant_*` and `read` append to the arguments of the
// next `call`; `begin_list` and `end_list` make the ones between them one list of tensors. A program is one
// thread's: `run` may not be called by two at a time. If a call throws, the registers are emptied and the exception
// passes; the program can run again.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <torch/custom_class.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common.h"

namespace weft {
namespace {

constexpr int64_t kConstant = -1, kList = -2;

struct Argument {
  int64_t source = kConstant;       // a register, kConstant or kList
  c10::IValue value;                // of a constant
  std::vector<Argument> entries;    // of a list
  bool optional_entries = false;    // whether the list is one of optional tensors
};

struct Call {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  std::vector<int64_t> results;  // a register for each, or -1
  std::vector<int64_t> dead;     // registers that nobody reads after this call
};

class Program : public torch::CustomClassHolder {
 public:
  void read(int64_t source) { add({source}); }
  void constant_none() { add({kConstant}); }
  void constant_tensor(Tensor value) { add({kConstant, std::move(value)}); }
  void constant_int(int64_t value) { add({kConstant, value}); }
  void constant_float(double value) { add({kConstant, value}); }
  void constant_bool(bool value) { add({kConstant, value}); }
  void constant_str(std::string value) { add({kConstant, std::move(value)}); }
  void constant_any(c10::IValue value) { add({kConstant, std::move(value)}); }  // objects of ours
  void constant_ints(std::vector<int64_t> value) { add({kConstant, c10::IValue(value)}); }
  void constant_dtype(Tensor of) { add({kConstant, static_cast<int64_t>(of.scalar_type())}); }
  void constant_device(Tensor of) { add({kConstant, of.device()}); }

  void begin_list(bool optional_entries) {
    TORCH_CHECK(!list_, "a list is open");
    list_.emplace();
    list_->source = kList;
    list_->optional_entries = optional_entries;
  }

  void end_list() {
    TORCH_CHECK(list_.has_value(), "no list is open");
    Argument made = std::move(*list_);
    list_.reset();
    add(std::move(made));
  }

  void call(const std::string& name, const std::string& overload, std::vector<int64_t> results,
            std::vector<int64_t> dead) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    TORCH_CHECK(pending_.size() == op.schema().arguments().size(), name, " takes ", op.schema().arguments().size(),
                " arguments, not ", pending_.size());
    for (const auto& registers : {results, dead})
      for (int64_t number : registers)
        if (number >= int64_t(registers_.size())) registers_.resize(number + 1);
    calls_.push_back({op, std::exchange(pending_, {}), std::move(results), std::move(dead)});
  }

  void run() {
    try {
      for (const Call& call : calls_) run_call(call);
    } catch (...) {
      for (auto& value : registers_) value = c10::IValue();
      throw;
    }
  }

  int64_t size() const { return int64_t(calls_.size()); }

 private:
  void add(Argument argument) {
    if (list_)
      list_->entries.push_back(std::move(argument));
    else
      pending_.push_back(std::move(argument));
  }

  const c10::IValue& value_of(const Argument& argument) const {
    return argument.source >= 0 ? registers_[argument.source] : argument.value;
  }

  c10::IValue list_of(const Argument& argument) const {
    if (!argument.optional_entries) {
      c10::List<Tensor> made;
      for (const Argument& entry : argument.entries) made.push_back(value_of(entry).toTensor());
      return made;
    }
    c10::List<std::optional<Tensor>> made;
    for (const Argument& entry : argument.entries) {
      const c10::IValue& value = value_of(entry);
      made.push_back(value.isNone() ? std::nullopt : std::optional<Tensor>(value.toTensor()));
    }
    return made;
  }

  void run_call(const Call& call) {
    stack_.clear();
    for (const Argument& argument : call.arguments)
      stack_.push_back(argument.source == kList ? list_of(argument) : value_of(argument));
    call.op.callBoxed(&stack_);
    for (size_t i = 0; i < call.results.size(); ++i)
      if (call.results[i] >= 0) registers_[call.results[i]] = std::move(stack_[i]);
    for (int64_t number : call.dead) registers_[number] = c10::IValue();
  }

  std::vector<Call> calls_;
  std::vector<Argument> pending_;
  std::optional<Argument> list_;
  std::vector<c10::IValue> registers_;
  torch::jit::Stack stack_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(weft_cpu, m) {
  m.class_<Program>("Program")
      .def(torch::init<>())
      .def("read", &Program::read)
      .def("constant_none", &Program::constant_none)
      .def("constant_tensor", &Program::constant_tensor)
      .def("constant_int", &Program::constant_int)
      .def("constant_float", &Program::constant_float)
      .def("constant_bool", &Program::constant_bool)
      .def("constant_str", &Program::constant_str)
      .def("constant_any", &Program::constant_any)
      .def("constant_ints", &Program::constant_ints)
      .def("constant_dtype", &Program::constant_dtype)
      .def("constant_device", &Program::constant_device)
      .def("begin_list", &Program::begin_list)
      .def("end_list", &Program::end_list)
      .def("call", &Program::call)
      .def("run", &Program::run)
      .def("size", &Program::size);
}

}  // namespace weft
