// The attention forward plan as C functions, for the tools and tests that launch the kernel without
// the library. Arrays of int stand for the structs of attention_forward_plan.hpp, field by field.
#include "gpu/kernels/sm90/attention_forward_plan.hpp"

#include <cstring>

namespace {

using namespace onchip::sm90;

AttentionForwardSpec to_spec(const int* f) {
  return {f[0] != 0, f[1], f[2], f[3] != 0, f[4] != 0, f[5], f[6], f[7] != 0, f[8] != 0, f[9] != 0};
}

void from_spec(const AttentionForwardSpec& spec, int* f) {
  for (int i = 0; i < AttentionForwardSpec::kFields; ++i) f[i] = spec.field(i);
}

AttentionForwardShape to_shape(const int* f) {
  return {f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7] != 0, f[8] != 0};
}

AttentionForwardSplit to_split(const int* f) { return {f[0], f[1], f[2], f[3]}; }

AttentionForwardTensor to_tensor(const long long* f) {
  return {static_cast<unsigned long long>(f[0]),
          f[1],
          f[2],
          f[3],
          static_cast<int>(f[4]),
          static_cast<int>(f[5]),
          static_cast<int>(f[6]),
          static_cast<int>(f[7])};
}

}  // namespace

extern "C" {

int plan_spec_fields() { return AttentionForwardSpec::kFields; }
int plan_registered_count() { return kAttentionForwardSpecCount; }
void plan_registered(int i, int* spec) { from_spec(attention_forward_registered(i), spec); }
void plan_select(int bf16, int head_dim_qk, int head_dim_v, int causal, int varlen, int* spec) {
  from_spec(attention_forward_spec(bf16 != 0, head_dim_qk, head_dim_v, causal != 0, varlen != 0),
            spec);
}
const char* plan_entry() { return kAttentionForwardEntry; }
const char* plan_macro() { return kAttentionForwardMacro; }
const char* plan_file() { return kAttentionForwardFile; }

// {tile_m, threads, shared bytes, bytes of the parameter struct}
void plan_block(const int* spec, int* out) {
  const AttentionForwardSpec s = to_spec(spec);
  out[0] = s.tile_m();
  out[1] = attention_forward_threads(s);
  out[2] = attention_forward_smem(s).total;
  out[3] = static_cast<int>(sizeof(AttentionForwardParams));
}

const char* plan_reject(const int* spec, const int* shape) {
  return attention_forward_reject(to_spec(spec), to_shape(shape));
}
const char* plan_reject_tensor(const long long* tensor) {
  return attention_forward_reject_tensor(to_tensor(tensor));
}
// {tiles, tile blocks, share blocks, shares}
void plan_split(const int* spec, const int* shape, int multiprocessors, int batch_invariant,
                int* split) {
  const AttentionForwardSplit s = attention_forward_split(to_spec(spec), to_shape(shape),
                                                          multiprocessors, batch_invariant != 0);
  split[0] = s.tiles;
  split[1] = s.tile_blocks;
  split[2] = s.share_blocks;
  split[3] = s.shares;
}
int plan_grid(const int* spec, const int* shape, const int* split, int multiprocessors) {
  return attention_forward_grid(to_spec(spec), to_shape(shape), to_split(split), multiprocessors);
}
int plan_counter_bytes(const int* spec, const int* shape, const int* split, int grid) {
  return attention_forward_counter_bytes(to_spec(spec), to_shape(shape), to_split(split), grid);
}
long long plan_parts_bytes(const int* spec, const int* split) {
  return attention_forward_parts_bytes(to_spec(spec), to_split(split));
}

// pointers: lse, cu_seqlens_q, cu_seqlens_kv, seqlens_q, seqlens_kv, counter, parts, longest_block,
// wait_failure, and the launch's number. int64: bit i for array i of the four.
void plan_params(const int* spec, const int* shape, const int* split, double scale,
                 const unsigned long long* pointers, long long lse_batch_stride,
                 long long lse_head_stride, int int64, void* params) {
  AttentionForwardParams p =
      attention_forward_params(to_spec(spec), to_shape(shape), to_split(split), scale);
  p.lse = reinterpret_cast<float*>(pointers[0]);
  p.cu_seqlens_q = reinterpret_cast<const void*>(pointers[1]);
  p.cu_seqlens_kv = reinterpret_cast<const void*>(pointers[2]);
  p.seqlens_q = reinterpret_cast<const void*>(pointers[3]);
  p.seqlens_kv = reinterpret_cast<const void*>(pointers[4]);
  p.counter = reinterpret_cast<void*>(pointers[5]);
  p.parts = reinterpret_cast<void*>(pointers[6]);
  p.longest_block = reinterpret_cast<unsigned long long*>(pointers[7]);
  p.wait_failure = reinterpret_cast<AttentionForwardWaitFailure*>(pointers[8]);
  p.launch = pointers[9];
  p.lse_batch_stride = lse_batch_stride;
  p.lse_head_stride = lse_head_stride;
  p.cu_seqlens_q_int64 = (int64 & 1) != 0;
  p.cu_seqlens_kv_int64 = (int64 & 2) != 0;
  p.seqlens_q_int64 = (int64 & 4) != 0;
  p.seqlens_kv_int64 = (int64 & 8) != 0;
  std::memcpy(params, &p, sizeof(p));
}

// out: address, five dims, four strides, five box extents.
void plan_map(const int* spec, const int* shape, int operand, const long long* tensor,
              unsigned long long* out) {
  const AttentionForwardMap m =
      attention_forward_map(to_spec(spec), to_shape(shape),
                            static_cast<AttentionForwardOperand>(operand), to_tensor(tensor));
  *out++ = m.address;
  for (const unsigned long long d : m.dims) *out++ = d;
  for (const unsigned long long s : m.strides) *out++ = s;
  for (const unsigned b : m.box) *out++ = b;
}

}  // extern "C"
