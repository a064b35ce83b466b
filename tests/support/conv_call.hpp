// Legal calls of short causal convolution and of the norms, drawn at random.
#pragma once

#include "support/drawn_call.hpp"

namespace onchip::test {

struct ConvDraw {
  DType dtype = DType::f32;
  std::int64_t most_channels = 6;
  std::int64_t widest = 6;
  std::int64_t longest = 12;
};

class ConvCall : public DrawnCall {
 public:
  ConvCall(Random& random, const ConvDraw& draw);

  onchip_status plan(onchip_plan& planned) override;
  onchip_status run(const onchip_plan& planned, void* workspace) override;
  std::string run_forced(cpu::Isa isa) override;
  void force_backend(const char* name) override { options_.backend = name; }
  bool mutate_option() override;
  bool names(const std::string& message) const override;

 protected:
  double draw_number(const std::string&) override { return random_.normal(); }

 private:
  enum class Phase { forward, backward, step };

  void draw_lengths(std::int64_t longest);
  void draw_forward(const Shape& rows, const Shape& state);
  void draw_backward(const Shape& rows, const Shape& state);
  void draw_step(const Shape& rows);
  DType any_float();

  Phase phase_ = Phase::forward;
  DType dtype_ = DType::f32;
  std::int64_t num_seqs_ = 1, length_ = 1, channels_ = 1, width_ = 1;
  bool packed_ = false;
  onchip_conv_options options_ = ONCHIP_CONV_OPTIONS_INIT;
  onchip_conv_forward_args forward_ = ONCHIP_CONV_FORWARD_ARGS_INIT;
  onchip_conv_backward_args backward_ = ONCHIP_CONV_BACKWARD_ARGS_INIT;
  onchip_conv_step_args step_ = ONCHIP_CONV_STEP_ARGS_INIT;
};

struct NormDraw {
  DType dtype = DType::f32;
  std::int64_t most_rank = 4;
  std::int64_t most_rows = 4;  // of an axis
  std::int64_t most_groups = 3;
  std::int64_t widest = 9;  // of a group
};

class NormCall : public DrawnCall {
 public:
  NormCall(Random& random, const NormDraw& draw);

  onchip_status plan(onchip_plan& planned) override;
  onchip_status run(const onchip_plan& planned, void* workspace) override;
  std::string run_forced(cpu::Isa isa) override;
  void force_backend(const char* name) override { options_.backend = name; }
  bool mutate_option() override;
  bool names(const std::string& message) const override;

 protected:
  double draw_number(const std::string&) override { return random_.normal(); }

 private:
  bool backward_pass_ = false;
  onchip_norm_options options_ = ONCHIP_NORM_OPTIONS_INIT;
  onchip_norm_forward_args forward_ = ONCHIP_NORM_FORWARD_ARGS_INIT;
  onchip_norm_backward_args backward_ = ONCHIP_NORM_BACKWARD_ARGS_INIT;
};

}  // namespace onchip::test
