/* An outside program in C11 that has only what an installation gives: one query over two keys with
 * equal scores returns the mean of the values, and a logarithm of the denominator that is known. */
#include <math.h>
#include <onchip/onchip.h>
#include <stdio.h>
#include <stdlib.h>

static onchip_tensor dense(float* data, int64_t seqlen, int64_t head_dim) {
  onchip_tensor tensor = {0};
  tensor.data = data;
  tensor.dtype = ONCHIP_FLOAT32;
  tensor.rank = 4;
  tensor.device_type = ONCHIP_DEVICE_CPU;
  tensor.shape[0] = 1;
  tensor.shape[1] = seqlen;
  tensor.shape[2] = 1;
  tensor.shape[3] = head_dim;
  tensor.strides[0] = seqlen * head_dim;
  tensor.strides[1] = head_dim;
  tensor.strides[2] = head_dim;
  tensor.strides[3] = 1;
  return tensor;
}

static int fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, onchip_last_error());
  return 1;
}

int main(void) {
  float q_data[2] = {1.0f, 2.0f};
  float k_data[4] = {3.0f, 0.0f, 1.0f, 1.0f};
  float v_data[4] = {1.0f, 2.0f, 5.0f, 10.0f};
  float o_data[2] = {0.0f, 0.0f};
  float lse_data[1] = {0.0f};
  const onchip_tensor q = dense(q_data, 1, 2);
  const onchip_tensor k = dense(k_data, 2, 2);
  const onchip_tensor v = dense(v_data, 2, 2);
  const onchip_tensor o = dense(o_data, 1, 2);
  onchip_tensor lse = dense(lse_data, 1, 1);
  lse.rank = 3;

  onchip_attention_options options = ONCHIP_ATTENTION_OPTIONS_INIT;
  options.scale = 0.5;
  onchip_attention_forward_args args = ONCHIP_ATTENTION_FORWARD_ARGS_INIT;
  args.q = &q;
  args.k = &k;
  args.v = &v;
  args.o = &o;
  args.lse = &lse;
  args.options = &options;

  onchip_plan plan = ONCHIP_PLAN_INIT;
  if (onchip_attention_forward_plan(&args, &plan) != ONCHIP_OK) return fail("plan");
  size_t rounded = (plan.workspace_bytes + plan.workspace_alignment - 1) /
                   plan.workspace_alignment * plan.workspace_alignment;
  void* workspace = rounded > 0 ? aligned_alloc(plan.workspace_alignment, rounded) : NULL;
  onchip_status status = onchip_attention_forward_run(&plan, &args, workspace, NULL);
  free(workspace);
  if (status != ONCHIP_OK) return fail("run");

  /* Both scores are 0.5 * 3. */
  if (fabsf(o_data[0] - 3.0f) > 1e-6f || fabsf(o_data[1] - 6.0f) > 1e-6f ||
      fabsf(lse_data[0] - (1.5f + logf(2.0f))) > 1e-6f) {
    fprintf(stderr, "got o = (%g, %g), lse = %g\n", o_data[0], o_data[1], lse_data[0]);
    return 1;
  }
  printf("C consumer: onchip %s, backend %s\n", onchip_version(), plan.backend);
  return 0;
}
