#include "support/compare.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "support/call.hpp"

namespace onchip::test {

namespace {

double largest(const std::vector<double>& values) {
  double result = 0.0;
  for (const double x : values) {
    if (std::isfinite(x)) result = std::max(result, std::fabs(x));
  }
  return result;
}

double epsilon(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 0x1p-52;
    case DType::f32:
      return 0x1p-23;
    case DType::f16:
      return 0x1p-10;
    default:
      return 0x1p-7;
  }
}

int smallest_exponent(DType dtype) {
  return dtype == DType::f16 ? -14 : dtype == DType::f64 ? -1022 : -126;
}

// From |value| to the next larger number of the dtype.
double ulp(double value, DType dtype) {
  int exponent = smallest_exponent(dtype);
  if (value >= std::ldexp(1.0, exponent)) exponent = std::ilogb(value);
  return std::ldexp(epsilon(dtype), exponent);
}

double largest_error(const std::vector<double>& x, const std::vector<double>& ref) {
  double result = 0.0;
  for (std::size_t i = 0; i < ref.size(); ++i) {
    const double error = std::fabs(x[i] - ref[i]);
    if (std::isfinite(error)) result = std::max(result, error);
  }
  return result;
}

// r max|y - ref| + the dtype's own term.
double rounding_bound(const std::vector<double>& ref, const std::vector<double>& y, DType dtype,
                      double r) {
  if (dtype == DType::f64) return 1e-11 * largest(ref);
  const double own = dtype == DType::f32 ? 1e-5 * largest(ref) : ulp(largest(ref), dtype);
  return r * largest_error(y, ref) + own;
}

// A reference that overflows the stored dtype is infinite there.
std::vector<double> rounded_infinities(std::vector<double> ref, DType dtype) {
  for (double& x : ref) {
    std::byte bytes[8];
    store_from_double(bytes, dtype, x);
    const double stored = load_as_double(bytes, dtype);
    if (!std::isfinite(stored)) x = stored;
  }
  return ref;
}

std::string judge_lse(const std::vector<double>& got, const std::vector<double>& wanted,
                      DType dtype) {
  const double relative = dtype == DType::f64 ? 1e-12 : 1e-5;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const double bound =
        std::isfinite(wanted[i]) ? relative * std::max(1.0, std::fabs(wanted[i])) : 0.0;
    const std::string wrong =
        disagreement("lse, element " + std::to_string(i) + " of all", {got[i]}, {wanted[i]}, bound);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

// The reference against the independent formula, in double. Where a gradient cancels, each leaves
// something of its own, in its own order.
std::string judge_reference(const std::string& name, const std::vector<double>& reference,
                            const std::vector<double>& formula, double absolute) {
  return disagreement(name + " of the reference backend in float64", reference, formula,
                      1e-11 * largest(formula) + 4.0 * absolute);
}

HostTensor compact(const Values& values, DType dtype) {
  HostTensor tensor(dtype, *values.shape);
  tensor.fill_from(values.at);
  return tensor;
}

// A call's tensors and options as float64, compact.
class Float64Call {
 public:
  explicit Float64Call(const AttentionCase& c)
      : q(compact(c.q, DType::f64)), k(compact(c.k, DType::f64)), v(compact(c.v, DType::f64)) {
    options = ONCHIP_ATTENTION_OPTIONS_INIT;
    options.scale = c.scale;
    options.softcap = c.softcap;
    options.dropout_p = c.dropout_p;
    options.window_left = c.window_left;
    options.window_right = c.window_right;
    options.causal = c.causal ? 1 : 0;
    options.alignment = c.top_left ? ONCHIP_TOP_LEFT : ONCHIP_BOTTOM_RIGHT;
    options.backend = "reference";
    options.bias = keep(c.bias, DType::f64);
    options.mask = keep(c.mask, DType::boolean);
    options.alibi_slopes = keep(c.alibi_slopes, DType::f64);
    options.q_segment_ids = keep(c.q_segment_ids, DType::i32);
    options.kv_segment_ids = keep(c.kv_segment_ids, DType::i32);
    options.sink = keep(c.sink, DType::f64);
    if (c.packed) {
      options.cu_seqlens_q = keep(c.cu_seqlens_q);
      options.cu_seqlens_kv = keep(c.cu_seqlens_kv);
    }
    const bool used = !c.seqlens_q.empty() || !c.seqlens_kv.empty();
    if (used) {
      std::vector<std::int64_t> used_q;
      std::vector<std::int64_t> used_kv;
      for (std::int64_t n = 0; n < c.num_seqs; ++n) {
        used_q.push_back(c.length_q(n));
        used_kv.push_back(c.length_kv(n));
      }
      options.seqlens_q = keep(used_q);
      options.seqlens_kv = keep(used_kv);
    }
    if (c.dropout_p > 0.0) {
      options.dropout_rng =
          keep({static_cast<std::int64_t>(c.seed), static_cast<std::int64_t>(c.offset)});
    }
    Shape o_shape = *c.q.shape;
    o_shape.back() = c.head_dim_v;
    o = HostTensor(DType::f64, o_shape);
    lse = HostTensor(DType::f64, c.packed ? Shape{c.num_heads_q, c.slot_q}
                                          : Shape{c.num_seqs, c.num_heads_q, c.slot_q});
  }

  const onchip_tensor* keep(const Values& values, DType dtype) {
    if (!values.present()) return nullptr;
    return keep(compact(values, dtype));
  }
  const onchip_tensor* keep(const std::vector<std::int64_t>& values) {
    HostTensor tensor(DType::i64, {static_cast<std::int64_t>(values.size())});
    tensor.fill_integers(values);
    return keep(std::move(tensor));
  }
  const onchip_tensor* keep(HostTensor tensor) {
    kept_.push_back(std::make_unique<HostTensor>(std::move(tensor)));
    return kept_.back()->abi();
  }

  void forward() {
    onchip_attention_forward_args args = ONCHIP_ATTENTION_FORWARD_ARGS_INIT;
    args.q = q.abi();
    args.k = k.abi();
    args.v = v.abi();
    args.o = o.abi();
    args.lse = lse.abi();
    args.options = &options;
    require(call(args));
  }

  static void require(onchip_status status) {
    if (status != ONCHIP_OK) {
      throw std::runtime_error(std::string("the reference refused a legal float64 call: ") +
                               onchip_last_error());
    }
  }

  onchip_attention_options options;
  HostTensor q, k, v, o, lse;

 private:
  std::vector<std::unique_ptr<HostTensor>> kept_;
};

struct GradientName {
  const char* name;
  const onchip_tensor* onchip_attention_backward_args::* result;
  std::vector<double> PlainGradients::* values;
};

constexpr GradientName kGradients[] = {
    {"dq", &onchip_attention_backward_args::dq, &PlainGradients::dq},
    {"dk", &onchip_attention_backward_args::dk, &PlainGradients::dk},
    {"dv", &onchip_attention_backward_args::dv, &PlainGradients::dv},
    {"dbias", &onchip_attention_backward_args::dbias, &PlainGradients::dbias},
    {"dsink", &onchip_attention_backward_args::dsink, &PlainGradients::dsink},
};

// What accumulation alone may leave where the true gradient cancels. Against the true gradient,
// also what the rounding of the saved o leaves there: y has its own, but in a tensor of a few
// elements the two need not be alike.
double cancellation(const AttentionCase& c, const std::string& name, Saved saved) {
  const double dim_v = static_cast<double>(c.head_dim_v);
  const std::int64_t rows = (c.packed ? 1 : c.num_seqs) * c.slot_q;
  const double accumulation = c.dtype == DType::f64 ? 0x1p-52 : 0x1p-23;
  double ds = accumulation * std::sqrt(dim_v) * largest(c.d_o.at) * largest(c.v.at);
  if (saved == Saved::own) {
    ds += 0.5 * epsilon(c.dtype) * std::sqrt(dim_v) * largest(c.d_o.at) * largest(c.o.at);
  }
  if (name == "dq") return ds * std::fabs(c.scale) * largest(c.k.at);
  if (name == "dk") return ds * std::fabs(c.scale) * largest(c.q.at);
  if (name == "dv") return 0.0;
  double terms = static_cast<double>(rows);
  if (name == "dbias") {
    const std::int64_t pairs = rows * c.num_heads_q * c.slot_kv;
    const auto elements = static_cast<std::int64_t>(std::max<std::size_t>(c.bias.at.size(), 1));
    terms = static_cast<double>(std::max<std::int64_t>(pairs / elements, 1));
  }
  const double bound = 0.25 * epsilon(c.dtype) * std::sqrt(terms * dim_v);
  // The page's term is for narrow dtypes; what stays of fp32 and fp64 products is as in dq.
  const bool narrow = c.dtype == DType::f16 || c.dtype == DType::bf16;
  return narrow && saved == Saved::given ? bound : bound + ds * std::sqrt(terms);
}

// lse reaches backward rounded to fp32, and P = exp(S - lse) turns its absolute error into a
// relative one of every weight. That exceeds the page's 1e-5 where |lse| is beyond some hundred,
// whoever computes; in the 16-bit dtypes it vanishes in their own ulp.
double lse_rounding(const AttentionCase& c, Saved saved, const std::vector<double>& ref) {
  if (c.dtype != DType::f32 || saved == Saved::given) return 0.0;
  return 0x1p-23 * largest(c.lse.at) * largest(ref);
}

}  // namespace

std::string disagreement(const std::string& name, const std::vector<double>& got,
                         const std::vector<double>& wanted, double bound) {
  std::ostringstream text;
  text.precision(10);
  if (got.size() != wanted.size()) {
    text << name << ": " << got.size() << " elements, wanted " << wanted.size();
    return text.str();
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double x = got[i];
    const double ref = wanted[i];
    if (std::isnan(x) && std::isnan(ref)) continue;
    if (x == ref) continue;
    if (std::isfinite(x) && std::isfinite(ref) && std::fabs(x - ref) <= bound) continue;
    text << name << "[" << i << "]: got " << x << ", wanted " << ref << ", bound " << bound;
    return text.str();
  }
  return "";
}

PlainForward reference_forward(const AttentionCase& attention) {
  Float64Call copy(attention);
  copy.forward();
  return {copy.o.values(), copy.lse.values()};
}

PlainGradients reference_backward(const AttentionCase& attention, Saved saved) {
  Float64Call copy(attention);
  if (saved == Saved::given) {
    copy.o.fill_from(attention.o.at);
    copy.lse.fill_from(attention.lse.at);
  } else {
    copy.forward();
  }
  HostTensor dq(DType::f64, *attention.q.shape);
  HostTensor dk(DType::f64, *attention.k.shape);
  HostTensor dv(DType::f64, *attention.v.shape);
  HostTensor dbias;
  HostTensor dsink;
  if (attention.bias.present()) dbias = HostTensor(DType::f64, *attention.bias.shape);
  if (attention.sink.present()) dsink = HostTensor(DType::f64, *attention.sink.shape);
  onchip_attention_backward_args args = ONCHIP_ATTENTION_BACKWARD_ARGS_INIT;
  args.d_o = copy.keep(attention.d_o, DType::f64);
  args.q = copy.q.abi();
  args.k = copy.k.abi();
  args.v = copy.v.abi();
  args.o = copy.o.abi();
  args.lse = copy.lse.abi();
  args.d_lse = copy.keep(attention.d_lse, DType::f64);
  args.dq = dq.abi();
  args.dk = dk.abi();
  args.dv = dv.abi();
  args.dbias = dbias.abi();
  args.dsink = dsink.abi();
  args.options = &copy.options;
  Float64Call::require(call(args));
  return {dq.values(), dk.values(), dv.values(),
          dbias.present() ? dbias.values() : std::vector<double>{},
          dsink.present() ? dsink.values() : std::vector<double>{}};
}

std::string judge(const onchip_attention_forward_args& args) {
  const AttentionCase c = read_case(args);
  const PlainForward ref = reference_forward(c);
  const PlainForward formula = plain_forward(c, Arithmetic::exact());
  std::string wrong = judge_reference("o", ref.o, formula.o, 0.0);
  if (wrong.empty()) wrong = judge_lse(ref.lse, formula.lse, DType::f64);
  if (!wrong.empty()) return wrong;
  const PlainForward y = plain_forward(c, Arithmetic::plain(c.dtype));
  const double r = c.softcap > 0.0 ? 3.0 : 2.0;
  wrong = disagreement("o", read_values(*args.o), rounded_infinities(ref.o, c.dtype),
                       rounding_bound(ref.o, y.o, c.dtype, r));
  if (wrong.empty() && args.lse != nullptr) {
    wrong = judge_lse(read_values(*args.lse),
                      rounded_infinities(ref.lse, static_cast<DType>(args.lse->dtype)), c.dtype);
  }
  return wrong;
}

std::string judge(const onchip_attention_backward_args& args, Saved saved) {
  const AttentionCase c = read_case(args);
  const PlainGradients ref = reference_backward(c, saved);
  const PlainGradients formula = plain_backward(c, Arithmetic::exact(), saved);
  const PlainGradients y = plain_backward(c, Arithmetic::plain(c.dtype), saved);
  const double r = c.softcap > 0.0 ? 3.0 : 2.0;
  AttentionCase exact = c;
  exact.dtype = DType::f64;
  for (const GradientName& gradient : kGradients) {
    const std::vector<double>& wanted = ref.*gradient.values;
    std::string wrong = judge_reference(gradient.name, wanted, formula.*gradient.values,
                                        cancellation(exact, gradient.name, saved));
    if (!wrong.empty()) return wrong;
    const onchip_tensor* result = args.*gradient.result;
    if (result == nullptr) continue;
    const auto dtype = static_cast<DType>(result->dtype);
    // A gradient has its own input's dtype: what is stored in it can be no better than its ulp.
    const DType coarser = epsilon(dtype) > epsilon(c.dtype) ? dtype : c.dtype;
    wrong =
        disagreement(gradient.name, read_values(*result), rounded_infinities(wanted, dtype),
                     rounding_bound(wanted, y.*gradient.values, coarser, r) +
                         cancellation(c, gradient.name, saved) + lse_rounding(c, saved, wanted));
    if (!wrong.empty()) return wrong;
  }
  return "";
}

std::string judge(const onchip_attention_merge_args& args) {
  const auto read = [](const onchip_tensor* t) {
    return Values{static_cast<DType>(t->dtype), Shape(t->shape, t->shape + t->rank),
                  read_values(*t)};
  };
  const Values o1 = read(args.o1);
  const Values lse1 = read(args.lse1);
  const Values o2 = read(args.o2);
  const Values lse2 = read(args.lse2);
  const PlainForward ref = plain_merge(o1, lse1, o2, lse2, Arithmetic::exact());
  const PlainForward y = plain_merge(o1, lse1, o2, lse2, Arithmetic::plain(o1.dtype));
  std::string wrong = disagreement("o", read_values(*args.o), rounded_infinities(ref.o, o1.dtype),
                                   rounding_bound(ref.o, y.o, o1.dtype, 2.0));
  if (wrong.empty() && args.lse != nullptr) {
    wrong = judge_lse(read_values(*args.lse), ref.lse, o1.dtype);
  }
  return wrong;
}

}  // namespace onchip::test
