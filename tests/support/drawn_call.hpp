// A legal call of the C ABI drawn at random, its tensors in guarded memory; running it on any
// backend and instruction set, and fuzzing it.
#pragma once

#include <onchip/onchip.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/backend.hpp"
#include "core/settings.hpp"
#include "cpu/cpu_features.hpp"
#include "ops/call.hpp"
#include "support/host_tensor.hpp"
#include "support/random.hpp"

namespace onchip::test {

class DrawnCall {
 public:
  struct Argument {
    std::string name;
    const onchip_tensor** field;
    HostTensor memory;
    onchip_tensor tensor;
    bool output;
  };

  explicit DrawnCall(Random& random) : random_(random) {}
  virtual ~DrawnCall() = default;
  DrawnCall(const DrawnCall&) = delete;
  DrawnCall& operator=(const DrawnCall&) = delete;

  virtual onchip_status plan(onchip_plan& planned) = 0;
  virtual onchip_status run(const onchip_plan& planned, void* workspace) = 0;
  // By the CPU backend with one instruction set, whatever the settings say, in a poisoned workspace
  // of exactly the planned size between forbidden pages. "" or why not.
  virtual std::string run_forced(cpu::Isa isa) = 0;
  virtual void force_backend(const char* name) = 0;
  // Replaces an option; true if the memory at hand may not be what such a call wants.
  virtual bool mutate_option() = 0;
  // Whether a message begins with a name that this call may have.
  virtual bool names(const std::string& message) const = 0;

  // Plans and runs through the C ABI. "" or what went wrong.
  std::string run_whole();

  std::vector<Argument>& arguments() { return arguments_; }
  // What outputs hold, argument after argument.
  std::vector<std::vector<double>> output_values() const;

  void remember();
  // Every byte as remembered.
  void restore();
  // "" or what is not as it was remembered. Elements of outputs may be written by a run, bytes
  // beside them never.
  std::string changed(bool after_run) const;
  // "" or an output that is not finite everywhere: they start as NaN, and inputs give finite ones.
  std::string unwritten() const;

 protected:
  // `in_place`: an output that is read too.
  void add(const std::string& name, const onchip_tensor** field, const Shape& shape, DType dtype,
           bool output, bool in_place = false);
  void add_integers(const char* name, const onchip_tensor** field,
                    const std::vector<std::int64_t>& values);
  // Once all are added: from here on the fields point to the arguments' tensors.
  void connect();

  // A number for an input.
  virtual double draw_number(const std::string& name) = 0;

  std::int64_t any_integer();
  std::int32_t any_int32() { return static_cast<std::int32_t>(any_integer()); }
  double any_double();

  Random& random_;
  std::vector<Argument> arguments_;

 private:
  std::vector<std::vector<std::byte>> before_;
};

inline Settings forcing_isa(cpu::Isa isa) {
  Settings settings;
  settings.cpu_isa = cpu::isa_name(isa);
  return settings;
}

// Runs args on the CPU backend: `plan` and `run` are its functions for the problem that `args` is.
template <typename Args, typename Problem>
std::string run_on_cpu(const Args& args, std::string_view op, cpu::Isa isa,
                       PlanResult (*plan)(const Problem&, const Settings&),
                       void (*run)(const BackendPlan&, const Problem&, const RunContext&),
                       Problem (*normalise)(const Args&, ops::CallFacts&)) {
  ops::CallFacts facts;
  facts.op = op;
  const Problem problem = normalise(args, facts);
  const PlanResult result = plan(problem, forcing_isa(isa));
  if (const auto* reject = std::get_if<Reject>(&result)) return reject->reason;
  const auto& planned = std::get<BackendPlan>(result);
  const GuardedMemory workspace(planned.workspace_bytes, GuardedMemory::Against::end);
  run(planned, problem, {workspace.data(), nullptr});
  return "";
}

// A legal call gets 0 to 3 of its fields replaced. A refused call has changed no byte anywhere and
// has a message that names the operator; an accepted one has written the elements of its outputs,
// all of them, and nothing else, nor any byte behind the planned workspace.
struct Fuzzed {
  std::string wrong;  // "" or what went wrong
  std::string story;  // what was replaced
  bool accepted = false;
};
Fuzzed fuzz(DrawnCall& call, Random& random);

}  // namespace onchip::test
