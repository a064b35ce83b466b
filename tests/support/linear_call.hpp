// Legal calls of linear attention, drawn at random: any operator, forward, backward or step.
#pragma once

#include "ops/linear_table.hpp"
#include "support/drawn_call.hpp"

namespace onchip::test {

enum class LinearPhase { forward, backward, step };

// What a call is drawn from; bounds are included.
struct LinearDraw {
  std::int32_t op = ONCHIP_SIMPLE_GLA;
  LinearPhase phase = LinearPhase::forward;
  DType dtype = DType::f32;
  std::int64_t most_heads = 2;
  std::int64_t widest = 5;
  std::int64_t longest = 20;
};

constexpr std::int32_t kLinearOperators = ONCHIP_RWKV4;  // they are numbered from 1

class LinearCall : public DrawnCall {
 public:
  LinearCall(Random& random, const LinearDraw& draw);

  onchip_status plan(onchip_plan& planned) override;
  onchip_status run(const onchip_plan& planned, void* workspace) override;
  std::string run_forced(cpu::Isa isa) override;
  void force_backend(const char* name) override { options_.backend = name; }
  bool mutate_option() override;
  bool names(const std::string& message) const override;

  const ops::LinearRow& row() const { return row_; }

 protected:
  double draw_number(const std::string& name) override;

 private:
  void draw_options();
  void draw_lengths();
  void draw_tensors();
  void draw_outputs();
  void draw_forward(const Shape& values);
  void draw_backward(const Shape& values);
  void draw_step(const Shape& values);
  bool skipped(const ops::LinearTensorRow& tensor, bool raw);
  DType tensor_dtype(const ops::LinearTensorRow& tensor);
  Shape shape_of(ops::LinearShape shape) const;
  bool is_scan() const { return row_.traits.engine == LinearEngine::scan; }
  void add_state(const char* name, const onchip_tensor* (&parts)[ONCHIP_LINEAR_STATE_PARTS],
                 std::int64_t count, DType dtype, bool output, std::size_t most);

  static constexpr std::int64_t kSlots = 3;

  LinearDraw draw_;
  const ops::LinearRow& row_;
  onchip_linear_options options_ = ONCHIP_LINEAR_OPTIONS_INIT;
  onchip_linear_tensors inputs_ = ONCHIP_LINEAR_TENSORS_INIT;
  onchip_linear_tensors gradients_ = ONCHIP_LINEAR_TENSORS_INIT;
  onchip_linear_forward_args forward_ = ONCHIP_LINEAR_FORWARD_ARGS_INIT;
  onchip_linear_backward_args backward_ = ONCHIP_LINEAR_BACKWARD_ARGS_INIT;
  onchip_linear_step_args step_ = ONCHIP_LINEAR_STEP_ARGS_INIT;
  DType state_dtype_ = DType::f32;
  std::int64_t heads_k_ = 1, heads_v_ = 1, dk_ = 1, dv_ = 1, num_seqs_ = 1, length_ = 1;
  bool packed_ = false;
  bool one_group_ = false;  // mamba1's B and C have no axis of groups
};

}  // namespace onchip::test
