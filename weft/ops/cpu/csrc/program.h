// A recorded sequence of operator calls, run without Python, which dominates the time of a decode step with few rows.
//
//   registers  values made by calls; a register is emptied by the last call that reads it
//   call       operator, arguments (constants and registers, in the order of its schema), registers for its results
//
// weft/runner/graphs/programs.py builds a program as numbers (`Code`), because a call from Python takes as long as a
// small operator, and a program has a thousand arguments. A program belongs to one thread: two threads may not call
// `run` at the same time. If a call throws, the registers are emptied and the exception passes; the program can run
// again.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <torch/custom_class.h>

#include <deque>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "crew.h"
#include "torch.h"

namespace weft {
namespace {

constexpr int64_t kConstant = -1, kList = -2;

struct Argument {
  int64_t source = kConstant;     // a register, kConstant or kList
  c10::IValue value;              // the constant
  std::vector<Argument> entries;  // the entries of a list
  bool optional_entries = false;  // true for a list of optional tensors
};

struct Call {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  std::vector<int64_t> results;  // a register for each, or -1
  bool list;                     // true if the results are one list of tensors
  std::vector<int64_t> dead;     // registers without a reader after this call
  bool reads = true;             // true if the call itself reads results of earlier calls
};

// Kinds of arguments, each with the numbers that follow. A place is an index in the lists of values beside the code.
enum Code : int64_t {
  kNone = 0,
  kTensor = 1,    // place
  kRead = 2,      // register
  kInt = 3,       // value
  kFloat = 4,     // place
  kBool = 5,      // value
  kString = 6,    // place
  kInts = 7,      // count, values
  kType = 8,      // place of a tensor of the type
  kDevice = 9,    // place of a tensor on the device
  kObject = 10,   // place
  kTensors = 11,  // whether optional, count, arguments
};

struct Values {
  std::vector<at::Tensor> tensors;
  std::vector<double> floats;
  std::vector<std::string> strings;
};

constexpr int64_t kHeldBytes = 1 << 20;

// True if an operation reads its inputs at the call, not in a loop (crew.h). Others make views, or memory.
bool reads_memory(const c10::OperatorHandle& op) {
  static const std::set<std::string> later = {"aten::empty",
                                              "aten::empty_like",
                                              "aten::empty_strided",
                                              "aten::new_empty",
                                              "aten::_unsafe_view",
                                              "weft_cpu::linear",
                                              "weft_cpu::linear_coded",
                                              "weft_cpu::linear_parts",
                                              "weft_cpu::rms_norm",
                                              "weft_cpu::add_rms_norm_",
                                              "weft_cpu::qkv_rope_cache",
                                              "weft_cpu::gated",
                                              "weft_cpu::sigmoid_gate",
                                              "weft_cpu::delta_net",
                                              "weft_cpu::mamba",
                                              "weft_cpu::mamba1_convolve",
                                              "weft_cpu::mamba1_scan",
                                              "weft_cpu::attend",
                                              "weft_cpu::moe",
                                              "weft_cpu::latent_rope_cache",
                                              "weft_cpu::latent_absorbed",
                                              "weft_cpu::latent_multiply"};
  const auto& schema = op.schema();
  if (later.count(schema.name())) return false;
  const auto& returns = schema.returns();
  const bool view = returns.size() == 1 && returns[0].alias_info() && !returns[0].alias_info()->isWrite();
  return !view || schema.is_mutable() || schema.name() == "aten::contiguous" || schema.name() == "aten::reshape" ||
         schema.name() == "aten::to";
}

// Products that ATen divides over threads. ATen does not divide inside a region.
bool is_heavy(const c10::OperatorHandle& op) {
  static const std::set<std::string> heavy = {"aten::mm",
                                              "aten::addmm",
                                              "aten::bmm",
                                              "aten::baddbmm",
                                              "aten::addbmm",
                                              "aten::mv",
                                              "aten::addmv",
                                              "aten::_scaled_mm",
                                              "aten::_int_mm",
                                              "aten::convolution",
                                              "aten::linear",
                                              "aten::matmul",
                                              "aten::_scaled_dot_product_flash_attention_for_cpu"};
  return heavy.count(op.schema().name()) > 0;
}

class Program : public torch::CustomClassHolder {
 public:
  // Adds an object of the extension, for kObject. Call before `load`, in the order of places.
  void object(c10::IValue value) { objects_.push_back(std::move(value)); }

  // operators: "name.overload" of each called operator. code, for each call: index of the operator; number of
  // arguments, arguments; number of results, register of each (-1: unused); number of registers without later readers,
  // registers.
  void load(std::vector<std::string> operators, std::vector<int64_t> code, std::vector<at::Tensor> tensors,
            std::vector<double> floats, std::vector<std::string> strings) {
    const Values values{std::move(tensors), std::move(floats), std::move(strings)};
    std::vector<c10::OperatorHandle> handles;
    handles.reserve(operators.size());
    for (const std::string& full : operators) {
      const size_t dot = full.find('.');
      const std::string overload = dot == std::string::npos ? "" : full.substr(dot + 1);
      handles.push_back(c10::Dispatcher::singleton().findSchemaOrThrow(full.substr(0, dot).c_str(), overload.c_str()));
    }
    code_ = code;
    while (!code_.empty()) {
      const auto& op = handles.at(next());
      const auto& returns = op.schema().returns();
      const bool list = returns.size() == 1 && returns[0].type()->isSubtypeOf(*c10::ListType::ofTensors());
      Call call{op, {}, {}, list, {}, reads_memory(op)};
      crewed_ = crewed_ && !is_heavy(op);
      call.arguments.resize(next());
      WEFT_CHECK(call.arguments.size() == op.schema().arguments().size(), op.schema().name(), " takes ",
                 op.schema().arguments().size(), " arguments, not ", call.arguments.size());
      for (Argument& argument : call.arguments) argument = read(values);
      call.results = registers();
      call.dead = registers();
      calls_.push_back(std::move(call));
    }
  }

  void run() {
    const int threads = use_crews && crewed_ ? team() : 1;
    try {
      if (threads == 1)
        for (const Call& call : calls_) run_call(call);
      else
        for (size_t at = 0; at < calls_.size();)
          Crew::lead(threads, [&](Crew& crew) {
            while (at < calls_.size() && !crew.full()) run_call(calls_[at++], crew);
          });
    } catch (...) {
      held_.clear(), held_bytes_ = 0;
      for (auto& value : registers_) value = c10::IValue();
      throw;
    }
    held_.clear(), held_bytes_ = 0;
  }

  int64_t size() const { return int64_t(calls_.size()); }

 private:
  int64_t next() {
    WEFT_CHECK(!code_.empty(), "the program ends in the middle of a call");
    const int64_t number = code_.front();
    code_ = code_.subspan(1);
    return number;
  }

  std::vector<int64_t> registers() {
    std::vector<int64_t> made(next());
    for (int64_t& number : made) {
      number = next();
      if (number >= int64_t(registers_.size())) registers_.resize(number + 1);
    }
    return made;
  }

  Argument read(const Values& values) {
    const int64_t kind = next();
    switch (kind) {
      case kNone:
        return {};
      case kTensor:
        return {kConstant, values.tensors.at(next())};
      case kRead:
        return {next()};
      case kInt:
        return {kConstant, next()};
      case kFloat:
        return {kConstant, values.floats.at(next())};
      case kBool:
        return {kConstant, next() != 0};
      case kString:
        return {kConstant, values.strings.at(next())};
      case kInts: {
        std::vector<int64_t> ints(next());
        for (int64_t& number : ints) number = next();
        return {kConstant, c10::IValue(ints)};
      }
      case kType:
        return {kConstant, static_cast<int64_t>(values.tensors.at(next()).scalar_type())};
      case kDevice:
        return {kConstant, values.tensors.at(next()).device()};
      case kObject:
        return {kConstant, objects_.at(next())};
      case kTensors: {
        Argument list{kList};
        list.optional_entries = next() != 0;
        list.entries.resize(next());
        for (Argument& entry : list.entries) entry = read(values);
        return list;
      }
      default:
        WEFT_CHECK(false, "an argument of kind ", kind);
    }
  }

  const c10::IValue& value_of(const Argument& argument) const {
    return argument.source >= 0 ? registers_[argument.source] : argument.value;
  }

  c10::IValue list_of(const Argument& argument) const {
    if (!argument.optional_entries) {
      c10::List<at::Tensor> made;
      for (const Argument& entry : argument.entries) made.push_back(value_of(entry).toTensor());
      return made;
    }
    c10::List<std::optional<at::Tensor>> made;
    for (const Argument& entry : argument.entries) {
      const c10::IValue& value = value_of(entry);
      made.push_back(value.isNone() ? std::nullopt : std::optional<at::Tensor>(value.toTensor()));
    }
    return made;
  }

  // The same with calls that leave loops behind: values without readers live until the loops have ended.
  void run_call(const Call& call, Crew& crew) {
    if (call.reads) crew.drain();
    make(call);
    const uint32_t jobs = crew.made();
    for (size_t i = 0; i < std::min(call.results.size(), stack_.size()); ++i)  // empty if the operator returns nothing
      if (call.results[i] < 0) hold(std::move(stack_[i]), jobs);
    for (int64_t number : call.dead) hold(std::move(registers_[number]), jobs), registers_[number] = c10::IValue();
    for (Tensor& kept : crew.take_kept()) hold(torch_tensor(std::move(kept)), jobs);
    while (!held_.empty()) {
      if (held_.front().jobs <= crew.ended()) {
        held_bytes_ -= held_.front().bytes;
        held_.pop_front();
      } else if (held_bytes_ > kHeldBytes) {
        crew.advance();
      } else {
        break;
      }
    }
  }

  struct Held {
    c10::IValue value;
    uint32_t jobs;  // number of jobs that may use the value
    int64_t bytes;
  };

  void hold(c10::IValue value, uint32_t jobs) {
    if (!value.isTensor() || !value.toTensor().defined()) return;
    const int64_t bytes = int64_t(value.toTensor().nbytes());
    held_.push_back({std::move(value), jobs, bytes});
    held_bytes_ += bytes;
  }

  // Replaces the list on the stack by its tensors.
  void spread(const Call& call) {
    const c10::List<at::Tensor> made = stack_.at(0).toTensorList();
    WEFT_CHECK(made.size() == call.results.size(), call.op.schema().name(), " made ", made.size(), " tensors, and ",
               call.results.size(), " when it was captured");
    stack_.clear();
    for (size_t i = 0; i < made.size(); ++i) stack_.push_back(made.get(i));
  }

  void run_call(const Call& call) {
    make(call);
    for (int64_t number : call.dead) registers_[number] = c10::IValue();
  }

  void make(const Call& call) {
    stack_.clear();
    for (const Argument& argument : call.arguments)
      stack_.push_back(argument.source == kList ? list_of(argument) : value_of(argument));
    call.op.callBoxed(&stack_);
    if (call.list) spread(call);
    for (size_t i = 0; i < call.results.size(); ++i)
      if (call.results[i] >= 0) registers_[call.results[i]] = std::move(stack_[i]);
  }

  std::vector<Call> calls_;
  std::vector<c10::IValue> objects_;
  std::span<const int64_t> code_;  // the rest of the code, in `load`
  std::vector<c10::IValue> registers_;
  torch::jit::Stack stack_;
  bool crewed_ = true;
  std::deque<Held> held_;
  int64_t held_bytes_ = 0;
};

// Describes the class for Python.
void describe_program(torch::Library& m) {
  m.class_<Program>("Program")
      .def(torch::init<>())
      .def("object", &Program::object)
      .def("load", &Program::load)
      .def("run", &Program::run)
      .def("size", &Program::size);
}

}  // namespace

}  // namespace weft
