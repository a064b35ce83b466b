// onchip C++ API: a header-only wrapper over the C ABI of <onchip/onchip.h>. Errors are exceptions,
// tensors are views built from pointers, plans are values. C++20.
//
//   onchip::Tensor q = onchip::tensor(q_data, {batch, seqlen_q, heads, dim});
//   onchip::attention_forward({.q = q, .k = k, .v = v, .o = o, .lse = lse}, {.causal = true});
//
// What every operator means, with shapes, dtypes and defaults, stands in onchip.h and in
// docs/semantics.md. A default-constructed Tensor is absent.
#ifndef ONCHIP_ONCHIP_HPP_
#define ONCHIP_ONCHIP_HPP_

#if !defined(__cpp_designated_initializers) || !defined(__cpp_concepts)
#error "onchip.hpp needs C++20: -std=c++20, or CXX_STANDARD 20"
#endif

#include <onchip/onchip.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace onchip {

// ---- errors -------------------------------------------------------------------------------------

class Exception : public std::runtime_error {
 public:
  Exception(onchip_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  onchip_status status() const noexcept { return status_; }

 private:
  onchip_status status_;
};

// The call breaks the contract.
class InvalidArgument : public Exception {
 public:
  using Exception::Exception;
};

// A legal call that no (or not the forced) backend takes; the message has every reason.
class Unsupported : public Exception {
 public:
  using Exception::Exception;
};

inline void check(onchip_status status) {
  switch (status) {
    case ONCHIP_OK:
      return;
    case ONCHIP_INVALID_ARGUMENT:
      throw InvalidArgument(status, onchip_last_error());
    case ONCHIP_UNSUPPORTED:
      throw Unsupported(status, onchip_last_error());
    case ONCHIP_OUT_OF_MEMORY:
      throw std::bad_alloc();
    default:
      throw Exception(status, onchip_last_error());
  }
}

// ---- tensors ------------------------------------------------------------------------------------

// A view with `present` beside it, so that optional tensors need no pointers.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(const onchip_tensor& raw) : raw_(raw), present_(true) {}

  bool present() const noexcept { return present_; }
  const onchip_tensor* get() const noexcept { return present_ ? &raw_ : nullptr; }
  onchip_tensor& raw() noexcept { return raw_; }

 private:
  onchip_tensor raw_{};
  bool present_ = false;
};

struct Device {
  std::int32_t type = ONCHIP_DEVICE_CPU;
  std::int32_t id = 0;
};

// A view of any dtype; `strides` in elements, empty = contiguous (row major).
inline Tensor tensor(const void* data, onchip_dtype dtype, std::span<const std::int64_t> shape,
                     std::span<const std::int64_t> strides = {}, Device device = {}) {
  if (shape.size() > ONCHIP_MAX_RANK || (!strides.empty() && strides.size() != shape.size())) {
    throw InvalidArgument(ONCHIP_INVALID_ARGUMENT,
                          "tensor: got rank " + std::to_string(shape.size()) + " with " +
                              std::to_string(strides.size()) +
                              " strides, wanted rank 0..6 and as many strides or none");
  }
  onchip_tensor raw{};
  raw.data = const_cast<void*>(data);
  raw.dtype = dtype;
  raw.rank = static_cast<std::int32_t>(shape.size());
  raw.device_type = device.type;
  raw.device_id = device.id;
  std::int64_t next = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    raw.shape[i] = shape[i];
    raw.strides[i] = strides.empty() ? next : strides[i];
    next *= shape[i];
  }
  return Tensor(raw);
}

template <typename T>
struct DtypeOf;
template <>
struct DtypeOf<double> {
  static constexpr onchip_dtype value = ONCHIP_FLOAT64;
};
template <>
struct DtypeOf<float> {
  static constexpr onchip_dtype value = ONCHIP_FLOAT32;
};
template <>
struct DtypeOf<std::int64_t> {
  static constexpr onchip_dtype value = ONCHIP_INT64;
};
template <>
struct DtypeOf<std::int32_t> {
  static constexpr onchip_dtype value = ONCHIP_INT32;
};
template <>
struct DtypeOf<bool> {
  static constexpr onchip_dtype value = ONCHIP_BOOL;
};

// A contiguous view typed by its pointer: tensor(ptr, {2, 128, 8, 64}).
template <typename T>
Tensor tensor(T* data, std::initializer_list<std::int64_t> shape) {
  return tensor(data, DtypeOf<std::remove_const_t<T>>::value,
                std::span<const std::int64_t>(shape.begin(), shape.size()));
}

// ---- exact attention ----------------------------------------------------------------------------

struct AttentionOptions {
  double scale = std::numeric_limits<double>::quiet_NaN();  // NaN: head_dim_qk^-1/2
  double softcap = 0.0;
  double dropout_p = 0.0;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  std::int64_t max_seqlen_q = -1;
  std::int64_t max_seqlen_kv = -1;
  bool causal = false;
  std::int32_t alignment = ONCHIP_BOTTOM_RIGHT;
  std::int32_t precision = ONCHIP_PRECISION_DEFAULT;
  bool deterministic = false;
  bool batch_invariant = false;
  bool check = false;
  std::string backend{};  // empty: pick
  Tensor bias{}, mask{}, alibi_slopes{}, q_segment_ids{}, kv_segment_ids{}, sink{}, dropout_rng{},
      cu_seqlens_q{}, cu_seqlens_kv{}, seqlens_q{}, seqlens_kv{};

  // A view of this object: valid while it lives unchanged.
  onchip_attention_options c_options() const {
    onchip_attention_options c = ONCHIP_ATTENTION_OPTIONS_INIT;
    c.scale = scale;
    c.softcap = softcap;
    c.dropout_p = dropout_p;
    c.window_left = window_left;
    c.window_right = window_right;
    c.max_seqlen_q = max_seqlen_q;
    c.max_seqlen_kv = max_seqlen_kv;
    c.causal = causal ? 1 : 0;
    c.alignment = alignment;
    c.precision = precision;
    c.deterministic = deterministic ? 1 : 0;
    c.batch_invariant = batch_invariant ? 1 : 0;
    c.check = check ? 1 : 0;
    c.backend = backend.empty() ? nullptr : backend.c_str();
    c.bias = bias.get();
    c.mask = mask.get();
    c.alibi_slopes = alibi_slopes.get();
    c.q_segment_ids = q_segment_ids.get();
    c.kv_segment_ids = kv_segment_ids.get();
    c.sink = sink.get();
    c.dropout_rng = dropout_rng.get();
    c.cu_seqlens_q = cu_seqlens_q.get();
    c.cu_seqlens_kv = cu_seqlens_kv.get();
    c.seqlens_q = seqlens_q.get();
    c.seqlens_kv = seqlens_kv.get();
    return c;
  }
};

struct AttentionForwardTensors {
  Tensor q{}, k{}, v{}, o{}, lse{};

  onchip_attention_forward_args c_args(const onchip_attention_options* options) const {
    onchip_attention_forward_args c = ONCHIP_ATTENTION_FORWARD_ARGS_INIT;
    c.q = q.get();
    c.k = k.get();
    c.v = v.get();
    c.o = o.get();
    c.lse = lse.get();
    c.options = options;
    return c;
  }
};

struct AttentionBackwardTensors {
  Tensor d_o{}, q{}, k{}, v{}, o{}, lse{}, d_lse{}, dq{}, dk{}, dv{}, dbias{}, dsink{};

  onchip_attention_backward_args c_args(const onchip_attention_options* options) const {
    onchip_attention_backward_args c = ONCHIP_ATTENTION_BACKWARD_ARGS_INIT;
    c.d_o = d_o.get();
    c.q = q.get();
    c.k = k.get();
    c.v = v.get();
    c.o = o.get();
    c.lse = lse.get();
    c.d_lse = d_lse.get();
    c.dq = dq.get();
    c.dk = dk.get();
    c.dv = dv.get();
    c.dbias = dbias.get();
    c.dsink = dsink.get();
    c.options = options;
    return c;
  }
};

// Python's name, and the one in messages, is merge.
struct AttentionMergeTensors {
  Tensor o1{}, lse1{}, o2{}, lse2{}, o{}, lse{};

  onchip_attention_merge_args c_args(const char* backend) const {
    onchip_attention_merge_args c = ONCHIP_ATTENTION_MERGE_ARGS_INIT;
    c.o1 = o1.get();
    c.lse1 = lse1.get();
    c.o2 = o2.get();
    c.lse2 = lse2.get();
    c.o = o.get();
    c.lse = lse.get();
    c.backend = backend;
    return c;
  }
};

// rotary_interleaved stands with the tensors it belongs to.
struct AttentionDecodeTensors {
  Tensor q{}, k_cache{}, v_cache{}, cache_seqlens{}, k_new{}, v_new{}, page_table{}, cache_slot{},
      rotary_cos{}, rotary_sin{}, q_positions{}, o{}, lse{};
  bool rotary_interleaved = false;

  onchip_attention_decode_args c_args(const onchip_attention_options* options) const {
    onchip_attention_decode_args c = ONCHIP_ATTENTION_DECODE_ARGS_INIT;
    c.q = q.get();
    c.k_cache = k_cache.get();
    c.v_cache = v_cache.get();
    c.cache_seqlens = cache_seqlens.get();
    c.k_new = k_new.get();
    c.v_new = v_new.get();
    c.page_table = page_table.get();
    c.cache_slot = cache_slot.get();
    c.rotary_cos = rotary_cos.get();
    c.rotary_sin = rotary_sin.get();
    c.q_positions = q_positions.get();
    c.o = o.get();
    c.lse = lse.get();
    c.options = options;
    c.rotary_interleaved = rotary_interleaved ? 1 : 0;
    return c;
  }
};

// ---- linear attention ---------------------------------------------------------------------------

// By role, as in onchip_linear_tensors.
struct LinearTensors {
  Tensor q{}, k{}, v{}, gate{}, beta{}, a{}, b{}, u{}, rate{}, dt_bias{}, skip{}, z{};

  onchip_linear_tensors c_tensors() const {
    onchip_linear_tensors c = ONCHIP_LINEAR_TENSORS_INIT;
    c.q = q.get();
    c.k = k.get();
    c.v = v.get();
    c.gate = gate.get();
    c.beta = beta.get();
    c.a = a.get();
    c.b = b.get();
    c.u = u.get();
    c.rate = rate.get();
    c.dt_bias = dt_bias.get();
    c.skip = skip.get();
    c.z = z.get();
    return c;
  }
};

struct LinearOptions {
  double scale = std::numeric_limits<double>::quiet_NaN();  // NaN: the operator's default
  double eps = 0.0;
  double dt_min = 0.0;
  double dt_max = std::numeric_limits<double>::infinity();
  double lower_bound = std::numeric_limits<double>::quiet_NaN();  // NaN: none
  std::int64_t chunk_len = 0;                                     // 0: pick
  std::int64_t num_householder = 1;
  std::int32_t op = 0;  // ONCHIP_SIMPLE_GLA, ..
  std::int32_t state_layout = ONCHIP_STATE_DEFAULT;
  std::int32_t normalize = -1;  // the operator's default
  std::int32_t gate = ONCHIP_GATE_EXP;
  bool detach_normalizer = false;
  bool dt_softplus = true;
  bool qk_l2norm = false;
  bool allow_neg_eigval = false;
  bool check = false;
  std::string backend{};  // empty: pick
  Tensor cu_seqlens{}, seqlens{};

  // A view of this object: valid while it lives unchanged.
  onchip_linear_options c_options() const {
    onchip_linear_options c = ONCHIP_LINEAR_OPTIONS_INIT;
    c.scale = scale;
    c.eps = eps;
    c.dt_min = dt_min;
    c.dt_max = dt_max;
    c.lower_bound = lower_bound;
    c.chunk_len = chunk_len;
    c.num_householder = num_householder;
    c.op = op;
    c.state_layout = state_layout;
    c.normalize = normalize;
    c.gate = gate;
    c.detach_normalizer = detach_normalizer ? 1 : 0;
    c.dt_softplus = dt_softplus ? 1 : 0;
    c.qk_l2norm = qk_l2norm ? 1 : 0;
    c.allow_neg_eigval = allow_neg_eigval ? 1 : 0;
    c.check = check ? 1 : 0;
    c.backend = backend.empty() ? nullptr : backend.c_str();
    c.cu_seqlens = cu_seqlens.get();
    c.seqlens = seqlens.get();
    return c;
  }
};

// Matrix, normaliser, stabiliser: as many as the operator's state has.
using LinearState = std::array<Tensor, ONCHIP_LINEAR_STATE_PARTS>;

namespace detail {

inline void set_state(const onchip_tensor* (&parts)[ONCHIP_LINEAR_STATE_PARTS],
                      const LinearState& state) {
  for (std::size_t part = 0; part < state.size(); ++part) parts[part] = state[part].get();
}

}  // namespace detail

struct LinearForwardTensors {
  LinearTensors inputs{};
  Tensor o{};
  LinearState initial_state{};
  LinearState final_state{};

  // Views of this object and the options: valid while they live unchanged.
  struct C {
    onchip_linear_tensors inputs;
    onchip_linear_options options;
    onchip_linear_forward_args args;

    C(const LinearForwardTensors& tensors, const LinearOptions& given)
        : inputs(tensors.inputs.c_tensors()),
          options(given.c_options()),
          args(ONCHIP_LINEAR_FORWARD_ARGS_INIT) {
      args.inputs = &inputs;
      args.o = tensors.o.get();
      detail::set_state(args.initial_state, tensors.initial_state);
      detail::set_state(args.final_state, tensors.final_state);
      args.options = &options;
    }
    C(const C&) = delete;
    C& operator=(const C&) = delete;
  };
};

struct LinearBackwardTensors {
  LinearTensors inputs{};
  Tensor d_o{};
  LinearState initial_state{};
  LinearState d_final_state{};
  LinearTensors gradients{};
  LinearState dinitial_state{};

  // Views of this object and the options: valid while they live unchanged.
  struct C {
    onchip_linear_tensors inputs;
    onchip_linear_tensors gradients;
    onchip_linear_options options;
    onchip_linear_backward_args args;

    C(const LinearBackwardTensors& tensors, const LinearOptions& given)
        : inputs(tensors.inputs.c_tensors()),
          gradients(tensors.gradients.c_tensors()),
          options(given.c_options()),
          args(ONCHIP_LINEAR_BACKWARD_ARGS_INIT) {
      args.inputs = &inputs;
      args.d_o = tensors.d_o.get();
      detail::set_state(args.initial_state, tensors.initial_state);
      detail::set_state(args.d_final_state, tensors.d_final_state);
      args.gradients = &gradients;
      detail::set_state(args.dinitial_state, tensors.dinitial_state);
      args.options = &options;
    }
    C(const C&) = delete;
    C& operator=(const C&) = delete;
  };
};

struct LinearStepTensors {
  LinearTensors inputs{};
  Tensor o{};
  LinearState state{};
  Tensor state_indices{};

  // Views of this object and the options: valid while they live unchanged.
  struct C {
    onchip_linear_tensors inputs;
    onchip_linear_options options;
    onchip_linear_step_args args;

    C(const LinearStepTensors& tensors, const LinearOptions& given)
        : inputs(tensors.inputs.c_tensors()),
          options(given.c_options()),
          args(ONCHIP_LINEAR_STEP_ARGS_INIT) {
      args.inputs = &inputs;
      args.o = tensors.o.get();
      detail::set_state(args.state, tensors.state);
      args.state_indices = tensors.state_indices.get();
      args.options = &options;
    }
    C(const C&) = delete;
    C& operator=(const C&) = delete;
  };
};

// ---- short causal convolution, norms ------------------------------------------------------------

struct ConvOptions {
  std::int32_t activation = ONCHIP_ACTIVATION_NONE;
  std::string backend{};  // empty: pick
  Tensor cu_seqlens{}, seqlens{};

  // A view of this object: valid while it lives unchanged.
  onchip_conv_options c_options() const {
    onchip_conv_options c = ONCHIP_CONV_OPTIONS_INIT;
    c.activation = activation;
    c.backend = backend.empty() ? nullptr : backend.c_str();
    c.cu_seqlens = cu_seqlens.get();
    c.seqlens = seqlens.get();
    return c;
  }
};

struct NormOptions {
  double eps = 1e-6;
  std::int64_t group_size = 0;  // 0: all
  std::int32_t kind = ONCHIP_NORM_L2;
  std::int32_t activation = ONCHIP_ACTIVATION_NONE;
  bool gate_first = false;
  std::string backend{};

  // A view of this object: valid while it lives unchanged.
  onchip_norm_options c_options() const {
    onchip_norm_options c = ONCHIP_NORM_OPTIONS_INIT;
    c.eps = eps;
    c.group_size = group_size;
    c.kind = kind;
    c.activation = activation;
    c.gate_first = gate_first ? 1 : 0;
    c.backend = backend.empty() ? nullptr : backend.c_str();
    return c;
  }
};

struct ConvForwardTensors {
  Tensor x{}, weight{}, bias{}, initial_state{}, y{}, final_state{};

  onchip_conv_forward_args c_args(const onchip_conv_options* options) const {
    onchip_conv_forward_args c = ONCHIP_CONV_FORWARD_ARGS_INIT;
    c.x = x.get();
    c.weight = weight.get();
    c.bias = bias.get();
    c.initial_state = initial_state.get();
    c.y = y.get();
    c.final_state = final_state.get();
    c.options = options;
    return c;
  }
};

struct ConvBackwardTensors {
  Tensor d_y{}, x{}, weight{}, bias{}, initial_state{}, d_final_state{}, dx{}, dweight{}, dbias{},
      dinitial_state{};

  onchip_conv_backward_args c_args(const onchip_conv_options* options) const {
    onchip_conv_backward_args c = ONCHIP_CONV_BACKWARD_ARGS_INIT;
    c.d_y = d_y.get();
    c.x = x.get();
    c.weight = weight.get();
    c.bias = bias.get();
    c.initial_state = initial_state.get();
    c.d_final_state = d_final_state.get();
    c.dx = dx.get();
    c.dweight = dweight.get();
    c.dbias = dbias.get();
    c.dinitial_state = dinitial_state.get();
    c.options = options;
    return c;
  }
};

struct ConvStepTensors {
  Tensor x{}, weight{}, bias{}, state{}, state_indices{}, y{};

  onchip_conv_step_args c_args(const onchip_conv_options* options) const {
    onchip_conv_step_args c = ONCHIP_CONV_STEP_ARGS_INIT;
    c.x = x.get();
    c.weight = weight.get();
    c.bias = bias.get();
    c.state = state.get();
    c.state_indices = state_indices.get();
    c.y = y.get();
    c.options = options;
    return c;
  }
};

struct NormForwardTensors {
  Tensor x{}, gate{}, weight{}, y{};

  onchip_norm_forward_args c_args(const onchip_norm_options* options) const {
    onchip_norm_forward_args c = ONCHIP_NORM_FORWARD_ARGS_INIT;
    c.x = x.get();
    c.gate = gate.get();
    c.weight = weight.get();
    c.y = y.get();
    c.options = options;
    return c;
  }
};

struct NormBackwardTensors {
  Tensor d_y{}, x{}, gate{}, weight{}, dx{}, dgate{}, dweight{};

  onchip_norm_backward_args c_args(const onchip_norm_options* options) const {
    onchip_norm_backward_args c = ONCHIP_NORM_BACKWARD_ARGS_INIT;
    c.d_y = d_y.get();
    c.x = x.get();
    c.gate = gate.get();
    c.weight = weight.get();
    c.dx = dx.get();
    c.dgate = dgate.get();
    c.dweight = dweight.get();
    c.options = options;
    return c;
  }
};

// ---- plan and run -------------------------------------------------------------------------------

// plan() of each operator, for callers who own the workspace (required for CUDA tensors).
inline onchip_plan plan(const AttentionForwardTensors& tensors,
                        const AttentionOptions& options = {}) {
  const onchip_attention_options c_options = options.c_options();
  const onchip_attention_forward_args args = tensors.c_args(&c_options);
  onchip_plan result = ONCHIP_PLAN_INIT;
  check(onchip_attention_forward_plan(&args, &result));
  return result;
}

inline onchip_plan plan(const AttentionBackwardTensors& tensors,
                        const AttentionOptions& options = {}) {
  const onchip_attention_options c_options = options.c_options();
  const onchip_attention_backward_args args = tensors.c_args(&c_options);
  onchip_plan result = ONCHIP_PLAN_INIT;
  check(onchip_attention_backward_plan(&args, &result));
  return result;
}

inline onchip_plan plan(const AttentionMergeTensors& tensors, const std::string& backend = {}) {
  const onchip_attention_merge_args args =
      tensors.c_args(backend.empty() ? nullptr : backend.c_str());
  onchip_plan result = ONCHIP_PLAN_INIT;
  check(onchip_attention_merge_plan(&args, &result));
  return result;
}

inline onchip_plan plan(const AttentionDecodeTensors& tensors,
                        const AttentionOptions& options = {}) {
  const onchip_attention_options c_options = options.c_options();
  const onchip_attention_decode_args args = tensors.c_args(&c_options);
  onchip_plan result = ONCHIP_PLAN_INIT;
  check(onchip_attention_decode_plan(&args, &result));
  return result;
}

inline void run(const onchip_plan& planned, const AttentionForwardTensors& tensors,
                const AttentionOptions& options, void* workspace, void* stream = nullptr) {
  const onchip_attention_options c_options = options.c_options();
  const onchip_attention_forward_args args = tensors.c_args(&c_options);
  check(onchip_attention_forward_run(&planned, &args, workspace, stream));
}

inline void run(const onchip_plan& planned, const AttentionBackwardTensors& tensors,
                const AttentionOptions& options, void* workspace, void* stream = nullptr) {
  const onchip_attention_options c_options = options.c_options();
  const onchip_attention_backward_args args = tensors.c_args(&c_options);
  check(onchip_attention_backward_run(&planned, &args, workspace, stream));
}

inline void run(const onchip_plan& planned, const AttentionMergeTensors& tensors,
                const std::string& backend, void* workspace, void* stream = nullptr) {
  const onchip_attention_merge_args args =
      tensors.c_args(backend.empty() ? nullptr : backend.c_str());
  check(onchip_attention_merge_run(&planned, &args, workspace, stream));
}

inline void run(const onchip_plan& planned, const AttentionDecodeTensors& tensors,
                const AttentionOptions& options, void* workspace, void* stream = nullptr) {
  const onchip_attention_options c_options = options.c_options();
  const onchip_attention_decode_args args = tensors.c_args(&c_options);
  check(onchip_attention_decode_run(&planned, &args, workspace, stream));
}

inline onchip_plan plan(const LinearForwardTensors& tensors, const LinearOptions& options) {
  const LinearForwardTensors::C c(tensors, options);
  onchip_plan result = ONCHIP_PLAN_INIT;
  check(onchip_linear_forward_plan(&c.args, &result));
  return result;
}

inline void run(const onchip_plan& planned, const LinearForwardTensors& tensors,
                const LinearOptions& options, void* workspace, void* stream = nullptr) {
  const LinearForwardTensors::C c(tensors, options);
  check(onchip_linear_forward_run(&planned, &c.args, workspace, stream));
}

inline onchip_plan plan(const LinearBackwardTensors& tensors, const LinearOptions& options) {
  const LinearBackwardTensors::C c(tensors, options);
  onchip_plan result = ONCHIP_PLAN_INIT;
  check(onchip_linear_backward_plan(&c.args, &result));
  return result;
}

inline void run(const onchip_plan& planned, const LinearBackwardTensors& tensors,
                const LinearOptions& options, void* workspace, void* stream = nullptr) {
  const LinearBackwardTensors::C c(tensors, options);
  check(onchip_linear_backward_run(&planned, &c.args, workspace, stream));
}

inline onchip_plan plan(const LinearStepTensors& tensors, const LinearOptions& options) {
  const LinearStepTensors::C c(tensors, options);
  onchip_plan result = ONCHIP_PLAN_INIT;
  check(onchip_linear_step_plan(&c.args, &result));
  return result;
}

inline void run(const onchip_plan& planned, const LinearStepTensors& tensors,
                const LinearOptions& options, void* workspace, void* stream = nullptr) {
  const LinearStepTensors::C c(tensors, options);
  check(onchip_linear_step_run(&planned, &c.args, workspace, stream));
}

inline onchip_plan plan(const ConvForwardTensors& tensors, const ConvOptions& options = {}) {
  const onchip_conv_options c_options = options.c_options();
  const onchip_conv_forward_args args = tensors.c_args(&c_options);
  onchip_plan result = ONCHIP_PLAN_INIT;
  check(onchip_conv_forward_plan(&args, &result));
  return result;
}

inline void run(const onchip_plan& planned, const ConvForwardTensors& tensors,
                const ConvOptions& options, void* workspace, void* stream = nullptr) {
  const onchip_conv_options c_options = options.c_options();
  const onchip_conv_forward_args args = tensors.c_args(&c_options);
  check(onchip_conv_forward_run(&planned, &args, workspace, stream));
}

inline onchip_plan plan(const ConvBackwardTensors& tensors, const ConvOptions& options = {}) {
  const onchip_conv_options c_options = options.c_options();
  const onchip_conv_backward_args args = tensors.c_args(&c_options);
  onchip_plan result = ONCHIP_PLAN_INIT;
  check(onchip_conv_backward_plan(&args, &result));
  return result;
}

inline void run(const onchip_plan& planned, const ConvBackwardTensors& tensors,
                const ConvOptions& options, void* workspace, void* stream = nullptr) {
  const onchip_conv_options c_options = options.c_options();
  const onchip_conv_backward_args args = tensors.c_args(&c_options);
  check(onchip_conv_backward_run(&planned, &args, workspace, stream));
}

inline onchip_plan plan(const ConvStepTensors& tensors, const ConvOptions& options = {}) {
  const onchip_conv_options c_options = options.c_options();
  const onchip_conv_step_args args = tensors.c_args(&c_options);
  onchip_plan result = ONCHIP_PLAN_INIT;
  check(onchip_conv_step_plan(&args, &result));
  return result;
}

inline void run(const onchip_plan& planned, const ConvStepTensors& tensors,
                const ConvOptions& options, void* workspace, void* stream = nullptr) {
  const onchip_conv_options c_options = options.c_options();
  const onchip_conv_step_args args = tensors.c_args(&c_options);
  check(onchip_conv_step_run(&planned, &args, workspace, stream));
}

inline onchip_plan plan(const NormForwardTensors& tensors, const NormOptions& options = {}) {
  const onchip_norm_options c_options = options.c_options();
  const onchip_norm_forward_args args = tensors.c_args(&c_options);
  onchip_plan result = ONCHIP_PLAN_INIT;
  check(onchip_norm_forward_plan(&args, &result));
  return result;
}

inline void run(const onchip_plan& planned, const NormForwardTensors& tensors,
                const NormOptions& options, void* workspace, void* stream = nullptr) {
  const onchip_norm_options c_options = options.c_options();
  const onchip_norm_forward_args args = tensors.c_args(&c_options);
  check(onchip_norm_forward_run(&planned, &args, workspace, stream));
}

inline onchip_plan plan(const NormBackwardTensors& tensors, const NormOptions& options = {}) {
  const onchip_norm_options c_options = options.c_options();
  const onchip_norm_backward_args args = tensors.c_args(&c_options);
  onchip_plan result = ONCHIP_PLAN_INIT;
  check(onchip_norm_backward_plan(&args, &result));
  return result;
}

inline void run(const onchip_plan& planned, const NormBackwardTensors& tensors,
                const NormOptions& options, void* workspace, void* stream = nullptr) {
  const onchip_norm_options c_options = options.c_options();
  const onchip_norm_backward_args args = tensors.c_args(&c_options);
  check(onchip_norm_backward_run(&planned, &args, workspace, stream));
}

// Host memory for a plan's workspace, at the alignment it asks for.
class HostWorkspace {
 public:
  explicit HostWorkspace(const onchip_plan& planned)
      : alignment_(planned.workspace_alignment),
        data_(planned.workspace_bytes == 0
                  ? nullptr
                  : ::operator new(planned.workspace_bytes, std::align_val_t{alignment_})) {}
  ~HostWorkspace() { ::operator delete(data_, std::align_val_t{alignment_}); }
  HostWorkspace(const HostWorkspace&) = delete;
  HostWorkspace& operator=(const HostWorkspace&) = delete;
  void* get() const noexcept { return data_; }

 private:
  std::size_t alignment_;
  void* data_;
};

namespace detail {

template <typename Tensors, typename Options>
void plan_and_run_on_host(const Tensors& tensors, const Options& options) {
  const onchip_plan planned = plan(tensors, options);
  const HostWorkspace workspace(planned);
  run(planned, tensors, options, workspace.get());
}

}  // namespace detail

// Plan, allocate the workspace, run: for CPU tensors.
inline void attention_forward(const AttentionForwardTensors& tensors,
                              const AttentionOptions& options = {}) {
  detail::plan_and_run_on_host(tensors, options);
}

inline void attention_backward(const AttentionBackwardTensors& tensors,
                               const AttentionOptions& options = {}) {
  detail::plan_and_run_on_host(tensors, options);
}

inline void attention_merge(const AttentionMergeTensors& tensors, const std::string& backend = {}) {
  detail::plan_and_run_on_host(tensors, backend);
}

inline void attention_decode(const AttentionDecodeTensors& tensors,
                             const AttentionOptions& options = {}) {
  detail::plan_and_run_on_host(tensors, options);
}

inline void linear_forward(const LinearForwardTensors& tensors, const LinearOptions& options) {
  detail::plan_and_run_on_host(tensors, options);
}

inline void linear_backward(const LinearBackwardTensors& tensors, const LinearOptions& options) {
  detail::plan_and_run_on_host(tensors, options);
}

inline void linear_step(const LinearStepTensors& tensors, const LinearOptions& options) {
  detail::plan_and_run_on_host(tensors, options);
}

inline void conv_forward(const ConvForwardTensors& tensors, const ConvOptions& options = {}) {
  detail::plan_and_run_on_host(tensors, options);
}

inline void conv_backward(const ConvBackwardTensors& tensors, const ConvOptions& options = {}) {
  detail::plan_and_run_on_host(tensors, options);
}

inline void conv_step(const ConvStepTensors& tensors, const ConvOptions& options = {}) {
  detail::plan_and_run_on_host(tensors, options);
}

inline void norm_forward(const NormForwardTensors& tensors, const NormOptions& options = {}) {
  detail::plan_and_run_on_host(tensors, options);
}

inline void norm_backward(const NormBackwardTensors& tensors, const NormOptions& options = {}) {
  detail::plan_and_run_on_host(tensors, options);
}

// ---- looking inside -----------------------------------------------------------------------------

namespace detail {

template <typename Read>
std::string read_text(Read&& read) {
  std::size_t length = 0;
  check(read(nullptr, std::size_t{0}, &length));
  std::string text(length + 1, '\0');
  check(read(text.data(), text.size(), &length));
  text.resize(length < text.size() ? length : text.size() - 1);
  return text;
}

inline std::string explain(onchip_operator op, const void* args) {
  return read_text([&](char* text, std::size_t capacity, std::size_t* length) {
    return onchip_explain(op, args, text, capacity, length);
  });
}

}  // namespace detail

inline std::string explain(const AttentionForwardTensors& tensors,
                           const AttentionOptions& options = {}) {
  const onchip_attention_options c_options = options.c_options();
  const onchip_attention_forward_args args = tensors.c_args(&c_options);
  return detail::explain(ONCHIP_ATTENTION_FORWARD, &args);
}

inline std::string explain(const AttentionBackwardTensors& tensors,
                           const AttentionOptions& options = {}) {
  const onchip_attention_options c_options = options.c_options();
  const onchip_attention_backward_args args = tensors.c_args(&c_options);
  return detail::explain(ONCHIP_ATTENTION_BACKWARD, &args);
}

inline std::string explain(const AttentionMergeTensors& tensors, const std::string& backend = {}) {
  const onchip_attention_merge_args args =
      tensors.c_args(backend.empty() ? nullptr : backend.c_str());
  return detail::explain(ONCHIP_ATTENTION_MERGE, &args);
}

inline std::string explain(const AttentionDecodeTensors& tensors,
                           const AttentionOptions& options = {}) {
  const onchip_attention_options c_options = options.c_options();
  const onchip_attention_decode_args args = tensors.c_args(&c_options);
  return detail::explain(ONCHIP_ATTENTION_DECODE, &args);
}

inline std::string explain(const LinearForwardTensors& tensors, const LinearOptions& options) {
  const LinearForwardTensors::C c(tensors, options);
  return detail::explain(ONCHIP_LINEAR_FORWARD, &c.args);
}

inline std::string explain(const LinearBackwardTensors& tensors, const LinearOptions& options) {
  const LinearBackwardTensors::C c(tensors, options);
  return detail::explain(ONCHIP_LINEAR_BACKWARD, &c.args);
}

inline std::string explain(const LinearStepTensors& tensors, const LinearOptions& options) {
  const LinearStepTensors::C c(tensors, options);
  return detail::explain(ONCHIP_LINEAR_STEP, &c.args);
}

inline std::string explain(const ConvForwardTensors& tensors, const ConvOptions& options = {}) {
  const onchip_conv_options c_options = options.c_options();
  const onchip_conv_forward_args args = tensors.c_args(&c_options);
  return detail::explain(ONCHIP_CONV_FORWARD, &args);
}

inline std::string explain(const ConvBackwardTensors& tensors, const ConvOptions& options = {}) {
  const onchip_conv_options c_options = options.c_options();
  const onchip_conv_backward_args args = tensors.c_args(&c_options);
  return detail::explain(ONCHIP_CONV_BACKWARD, &args);
}

inline std::string explain(const ConvStepTensors& tensors, const ConvOptions& options = {}) {
  const onchip_conv_options c_options = options.c_options();
  const onchip_conv_step_args args = tensors.c_args(&c_options);
  return detail::explain(ONCHIP_CONV_STEP, &args);
}

inline std::string explain(const NormForwardTensors& tensors, const NormOptions& options = {}) {
  const onchip_norm_options c_options = options.c_options();
  const onchip_norm_forward_args args = tensors.c_args(&c_options);
  return detail::explain(ONCHIP_NORM_FORWARD, &args);
}

inline std::string explain(const NormBackwardTensors& tensors, const NormOptions& options = {}) {
  const onchip_norm_options c_options = options.c_options();
  const onchip_norm_backward_args args = tensors.c_args(&c_options);
  return detail::explain(ONCHIP_NORM_BACKWARD, &args);
}

inline std::string describe() { return detail::read_text(onchip_describe); }

}  // namespace onchip

#endif  // ONCHIP_ONCHIP_HPP_
