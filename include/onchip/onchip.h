/* onchip C ABI: exact (softmax) and linear attention whose intermediates stay on the chip.
 *
 * What every operator means is written in docs/semantics.md; this header states shapes, dtypes,
 * defaults and errors. Conventions:
 *
 *  - A tensor is a `const onchip_tensor*`; NULL means absent. Outputs are described the same way
 *    and written through `data`. Inputs are never written, caches excepted.
 *  - Every operator X has three steps: fill a `*_args` struct, `onchip_X_plan` (checks the whole
 *    contract, picks a backend, says how much workspace is needed; touches no tensor data on a
 *    device), `onchip_X_run` (computes on the caller's stream, in the caller's workspace).
 *    A plan may be reused for any arguments that differ from the planned ones only in addresses
 *    (with the same 16-byte alignment) and in the values stored in tensors.
 *  - Structs that may grow start with `struct_size`; initialise them with their *_INIT macro.
 *    Fields a caller's older header does not know take their defaults; a newer header's fields are
 *    refused unless zero.
 *  - Every function returns an onchip_status; `onchip_last_error()` has the message of the calling
 *    thread's last failure: operator, argument, got, wanted, nearest legal choice. A refused call
 *    writes nothing. The library never prints, aborts, exits or changes global state.
 *  - Functions may be called from any thread at the same time.
 */
#ifndef ONCHIP_ONCHIP_H_
#define ONCHIP_ONCHIP_H_

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define ONCHIP_VERSION_MAJOR 0
#define ONCHIP_VERSION_MINOR 1
#define ONCHIP_VERSION_PATCH 0

#if defined(_WIN32)
#define ONCHIP_API __declspec(dllexport)
#else
#define ONCHIP_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ---------------------------------------------------------------------------------- */

typedef int32_t onchip_status;
enum {
  ONCHIP_OK = 0,
  ONCHIP_INVALID_ARGUMENT = 1, /* the call breaks the contract: no backend could ever take it */
  ONCHIP_UNSUPPORTED = 2,      /* legal, but no (or not the forced) backend takes it */
  ONCHIP_OUT_OF_MEMORY = 3,
  ONCHIP_COMPILE_FAILED = 4, /* a GPU kernel could not be compiled or loaded */
  ONCHIP_DEVICE_ERROR = 5,   /* the device driver reported an error */
  ONCHIP_INTERNAL = 6
};

/* "onchip_status" as a word, e.g. "invalid_argument"; "unknown" for other numbers. Never NULL. */
ONCHIP_API const char* onchip_status_name(onchip_status status);

/* Message of the last call that failed on the calling thread; "" before any. Valid until that
 * thread's next failing call. Never NULL. */
ONCHIP_API const char* onchip_last_error(void);

/* "MAJOR.MINOR.PATCH" of the library that is loaded. */
ONCHIP_API const char* onchip_version(void);

/* ---- tensors --------------------------------------------------------------------------------- */

typedef int32_t onchip_dtype;
enum {
  ONCHIP_FLOAT64 = 1,
  ONCHIP_FLOAT32 = 2,
  ONCHIP_FLOAT16 = 3,
  ONCHIP_BFLOAT16 = 4,
  ONCHIP_FLOAT8_E4M3 = 5,
  ONCHIP_INT64 = 6,
  ONCHIP_INT32 = 7,
  ONCHIP_BOOL = 8 /* one byte, 0 or 1 */
};

/* Device types carry DLPack's numbers. */
enum { ONCHIP_DEVICE_CPU = 1, ONCHIP_DEVICE_CUDA = 2 };

#define ONCHIP_MAX_RANK 6

/* A strided view. This struct is frozen. The innermost stride must be 1 wherever that axis has more
 * than one element; outer strides may be anything for inputs (0, negative and overlapping views
 * included) and must not make an output overlap itself. `data` may be NULL only if some extent is
 * 0, and is aligned to the element's size. */
typedef struct onchip_tensor {
  void* data;
  int32_t dtype;       /* onchip_dtype */
  int32_t rank;        /* 0..ONCHIP_MAX_RANK */
  int32_t device_type; /* ONCHIP_DEVICE_* */
  int32_t device_id;   /* ordinal; 0 for the CPU */
  int64_t shape[ONCHIP_MAX_RANK];
  int64_t strides[ONCHIP_MAX_RANK]; /* in elements */
} onchip_tensor;

/* ---- plans ----------------------------------------------------------------------------------- */

/* What an onchip_X_plan call decided. Plain memory: copy it, keep it, drop it. */
typedef struct onchip_plan {
  size_t struct_size;
  size_t workspace_bytes;     /* what run needs; 0 = pass NULL */
  size_t workspace_alignment; /* of the workspace's address; a power of two */
  const char* backend;        /* "reference", "cpu", "cuda.sm80", "cuda.sm90"; static storage */
  const char* kernel;         /* the kernel or instruction-set unit; static storage */
  uint64_t opaque[24];
} onchip_plan;

#define ONCHIP_PLAN_INIT {sizeof(onchip_plan), 0, 1, NULL, NULL, {0}}

/* Operators, for onchip_explain. */
typedef int32_t onchip_operator;
enum {
  ONCHIP_ATTENTION_FORWARD = 1,
  ONCHIP_ATTENTION_BACKWARD = 2,
  ONCHIP_ATTENTION_MERGE = 3,
  ONCHIP_ATTENTION_DECODE = 4,
  ONCHIP_LINEAR_FORWARD = 16,
  ONCHIP_LINEAR_BACKWARD = 17,
  ONCHIP_LINEAR_STEP = 18,
  ONCHIP_CONV_FORWARD = 20,
  ONCHIP_CONV_BACKWARD = 21,
  ONCHIP_CONV_STEP = 22,
  ONCHIP_NORM_FORWARD = 24,
  ONCHIP_NORM_BACKWARD = 25
};

/* ---- exact attention (docs/semantics.md, section 2) ------------------------------------------ */

/* Where query row i stands among the keys: off = seqlen_kv - seqlen_q, or 0. */
enum { ONCHIP_BOTTOM_RIGHT = 0, ONCHIP_TOP_LEFT = 1 };

/* Arithmetic of fp32 inputs on tensor cores. The default keeps fp32 accuracy. */
enum { ONCHIP_PRECISION_DEFAULT = 0, ONCHIP_PRECISION_TF32 = 1 };

/* One struct for forward and backward. num_seqs = batch for dense tensors. "float" = any of fp64,
 * fp32, fp16, bf16. Tensors live on q's device; cu_seqlens, seqlens and dropout_rng may also be in
 * host memory. */
typedef struct onchip_attention_options {
  size_t struct_size;
  double scale;         /* of q.k; NaN = head_dim_qk^-1/2; finite */
  double softcap;       /* c > 0: c tanh(S/c); 0 = none */
  double dropout_p;     /* in [0, 1) */
  int64_t window_left;  /* keys j >= i + off - left are visible; -1 = no bound */
  int64_t window_right; /* keys j <= i + off + right are visible; -1 = no bound */
  int64_t max_seqlen_q; /* hints for packed tensors; -1 = absent; a wrong one changes no result */
  int64_t max_seqlen_kv;
  int32_t causal;            /* 0 or 1: j <= i + off */
  int32_t alignment;         /* ONCHIP_BOTTOM_RIGHT or ONCHIP_TOP_LEFT */
  int32_t precision;         /* ONCHIP_PRECISION_* */
  int32_t deterministic;     /* backward bitwise repeatable (forward always is) */
  int32_t batch_invariant;   /* a sequence's bits do not depend on what else is in the call */
  int32_t check;             /* also validate values that live on a device: synchronises */
  const char* backend;       /* force one by name; NULL picks */
  const onchip_tensor* bias; /* float [num_seqs|1, Hq|1, Sq|1, Sk|1], after softcap */
  const onchip_tensor* mask; /* bool, same shapes; true = visible */
  const onchip_tensor* alibi_slopes;   /* float [Hq] or [num_seqs, Hq] */
  const onchip_tensor* q_segment_ids;  /* int32 [batch, Sq], packed [total_q]; with the next */
  const onchip_tensor* kv_segment_ids; /* int32 [batch, Sk], packed [total_kv] */
  const onchip_tensor* sink;           /* float [Hq], natural-log units, not scaled */
  const onchip_tensor* dropout_rng;    /* int64 [2]: seed, offset (0 <= offset < 2^32) */
  const onchip_tensor* cu_seqlens_q;   /* int32 or int64 [num_seqs + 1]; makes tensors packed */
  const onchip_tensor* cu_seqlens_kv;  /* absent: as cu_seqlens_q */
  const onchip_tensor* seqlens_q;      /* int32 or int64 [num_seqs]: used rows of each slot */
  const onchip_tensor* seqlens_kv;     /* absent, with cu_seqlens_kv absent too: as seqlens_q */
} onchip_attention_options;

/* clang-format off */
#define ONCHIP_ATTENTION_OPTIONS_INIT \
  { \
    sizeof(onchip_attention_options), (double)NAN, 0.0, 0.0, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, \
        NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL \
  }
/* clang-format on */

/* O = softmax(mask(softcap(scale Q K^T) + bias - alibi)) V, tiled with an online softmax
 * (Milakov & Gimelshein 2018; Dao et al. 2022, Algorithm 1).
 *   q [batch, Sq, Hq, Dqk], k [batch, Sk, Hkv, Dqk], v [batch, Sk, Hkv, Dv], o [batch, Sq, Hq, Dv];
 *   packed (cu_seqlens_q given): rank 3, [total, heads, dim]. One float dtype for all four.
 *   lse [batch, Hq, Sq], packed [Hq, total_q]: natural log of the softmax denominator; fp64 with
 *   fp64 inputs, else fp32. NULL = not wanted. Hq is a multiple of Hkv. */
typedef struct onchip_attention_forward_args {
  size_t struct_size;
  const onchip_tensor* q;
  const onchip_tensor* k;
  const onchip_tensor* v;
  const onchip_tensor* o;
  const onchip_tensor* lse;
  const onchip_attention_options* options; /* NULL = all defaults */
} onchip_attention_forward_args;

#define ONCHIP_ATTENTION_FORWARD_ARGS_INIT \
  {sizeof(onchip_attention_forward_args), NULL, NULL, NULL, NULL, NULL, NULL}

/* Gradients by recomputation from o and lse (Dao et al. 2022, Algorithm 4), with
 * dS_ij = P_ij (dP_ij - rowsum(d_o o)_i + d_lse_i).
 *   o, lse: what forward returned for the same options. d_o as o; d_lse as lse, NULL = 0.
 *   dq, dk, dv as q, k, v; dbias as bias; dsink as sink: NULL = not wanted. */
typedef struct onchip_attention_backward_args {
  size_t struct_size;
  const onchip_tensor* d_o;
  const onchip_tensor* q;
  const onchip_tensor* k;
  const onchip_tensor* v;
  const onchip_tensor* o;
  const onchip_tensor* lse;
  const onchip_tensor* d_lse;
  const onchip_tensor* dq;
  const onchip_tensor* dk;
  const onchip_tensor* dv;
  const onchip_tensor* dbias;
  const onchip_tensor* dsink;
  const onchip_attention_options* options;
} onchip_attention_backward_args;

/* clang-format off */
#define ONCHIP_ATTENTION_BACKWARD_ARGS_INIT \
  { \
    sizeof(onchip_attention_backward_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
        NULL, NULL, NULL, NULL, NULL \
  }
/* clang-format on */

/* Two partial results over disjoint key sets into the result over their union:
 * lse = log(e^lse1 + e^lse2), o = e^(lse1-lse) o1 + e^(lse2-lse) o2; two empty parts give 0, -inf.
 *   o1, o2, o: one shape and float dtype, [batch, S, H, D] or packed [total, H, D];
 *   lse1, lse2, lse [batch, H, S] or packed [H, total]; fp64 with fp64, else fp32;
 *   lse may be NULL.
 * Python's name, and the one in messages, is merge. */
typedef struct onchip_attention_merge_args {
  size_t struct_size;
  const onchip_tensor* o1;
  const onchip_tensor* lse1;
  const onchip_tensor* o2;
  const onchip_tensor* lse2;
  const onchip_tensor* o;
  const onchip_tensor* lse;
  const char* backend; /* force one by name; NULL picks */
} onchip_attention_merge_args;

#define ONCHIP_ATTENTION_MERGE_ARGS_INIT \
  {sizeof(onchip_attention_merge_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL}

/* Attention of new queries over keys and values in a cache, to which the call may append: rotate q
 * and k_new, write k_new and v_new behind the cached rows, attend to all rows then there.
 *   q, o, lse as forward's; batch = num_seqs. "New" rows are those of k_new.
 *   k_cache [slots, capacity, Hkv, Dqk], v_cache [slots, capacity, Hkv, Dv], or, with page_table,
 *   [pages, page_size, Hkv, ..]. Written where k_new is given, and then, like outputs, apart from
 *   themselves and every other tensor; else inputs. v_cache may be k_cache's first Dv channels (one
 *   address, the same outer strides): k_new then brings both, and v_new is absent.
 *   cache_seqlens: rows in the cache before the append; Sk of every formula is the length after.
 *   k_new [batch, Sk_new, Hkv, Dqk], v_new likewise; packed [total_new, Hkv, ..]. Row t goes to
 *   cache_seqlens + t. The options' cu_seqlens_kv and seqlens_kv count new rows.
 *   cache_slot: slot n is batch row n's where absent. -1: the row is skipped (o = 0, lse = -inf,
 *   nothing else read or written). With page_table other values only say "not skipped".
 *   page_table: entry e holds keys e page_size and on; past ceil(Sk / page_size) none is read.
 *   Nobody may append to a row that another one of the call reads or writes.
 *   rotary_cos, rotary_sin: new row t stands at cache_seqlens + t, query i at q_positions or else
 *   Sk - Sq + i. Channels x, y of a pair become x cos - y sin, x sin + y cos, rounded to their
 *   dtype; pair c is channels c and c + rotary_dim/2, or, interleaved, 2c and 2c + 1. Channels past
 *   rotary_dim <= Dqk pass through.
 *   Options: no dropout. bias and mask [batch|1, Hq|1, Sq|1, Sk|1], kv_segment_ids [batch, Sk], by
 *   position in the sequence: the last axis covers the longest sequence, or more. */
typedef struct onchip_attention_decode_args {
  size_t struct_size;
  const onchip_tensor* q;
  const onchip_tensor* k_cache;
  const onchip_tensor* v_cache;
  const onchip_tensor* cache_seqlens; /* int32 [batch] */
  const onchip_tensor* k_new;         /* NULL = nothing is appended */
  const onchip_tensor* v_new;
  const onchip_tensor* page_table; /* int32 [batch, max_pages]; NULL = contiguous caches */
  const onchip_tensor* cache_slot; /* int32 [batch] */
  const onchip_tensor* rotary_cos; /* q's dtype or fp32, [max_pos, rotary_dim / 2]; with the next */
  const onchip_tensor* rotary_sin; /* as rotary_cos */
  const onchip_tensor* q_positions; /* int32 or int64 [batch, Sq], packed [total_q] */
  const onchip_tensor* o;
  const onchip_tensor* lse;
  const onchip_attention_options* options; /* NULL = all defaults */
  int32_t rotary_interleaved;              /* 0 or 1 */
  int32_t reserved;                        /* 0 */
} onchip_attention_decode_args;

/* clang-format off */
#define ONCHIP_ATTENTION_DECODE_ARGS_INIT \
  { \
    sizeof(onchip_attention_decode_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
        NULL, NULL, NULL, NULL, NULL, 0, 0 \
  }
/* clang-format on */

/* plan: `plan` is caller-initialised with ONCHIP_PLAN_INIT and filled only on success.
 * run: `workspace` is plan->workspace_bytes of q's device's memory at plan->workspace_alignment
 * (NULL if 0); its contents need not be initialised and are undefined afterwards. `stream` is a
 * CUstream / cudaStream_t for CUDA tensors (NULL = the default stream) and NULL for the CPU. */
ONCHIP_API onchip_status onchip_attention_forward_plan(const onchip_attention_forward_args* args,
                                                       onchip_plan* plan);
ONCHIP_API onchip_status onchip_attention_forward_run(const onchip_plan* plan,
                                                      const onchip_attention_forward_args* args,
                                                      void* workspace, void* stream);
ONCHIP_API onchip_status onchip_attention_backward_plan(const onchip_attention_backward_args* args,
                                                        onchip_plan* plan);
ONCHIP_API onchip_status onchip_attention_backward_run(const onchip_plan* plan,
                                                       const onchip_attention_backward_args* args,
                                                       void* workspace, void* stream);
ONCHIP_API onchip_status onchip_attention_merge_plan(const onchip_attention_merge_args* args,
                                                     onchip_plan* plan);
ONCHIP_API onchip_status onchip_attention_merge_run(const onchip_plan* plan,
                                                    const onchip_attention_merge_args* args,
                                                    void* workspace, void* stream);
ONCHIP_API onchip_status onchip_attention_decode_plan(const onchip_attention_decode_args* args,
                                                      onchip_plan* plan);
ONCHIP_API onchip_status onchip_attention_decode_run(const onchip_plan* plan,
                                                     const onchip_attention_decode_args* args,
                                                     void* workspace, void* stream);

/* ---- linear attention (docs/semantics.md, section 3) -----------------------------------------
 *
 * Every operator is a row of one table: it turns its tensors into q, k, v, log_decay and erase
 * vectors of one of five engines, whose state S in R^{dk x dv} per (sequence, value head) follows
 *   S_t = T_t S_{t-1} + k_t v_t^T,  o_t = scale S_t^T q_t,
 * and may normalise or gate what it read; or of a scan, whose state is a row of numbers a channel.
 * `op` in the options names the row. */

typedef int32_t onchip_linear_operator;
enum {
  ONCHIP_LINEAR_ATTENTION = 1,     /* S = S + k v^T */
  ONCHIP_RETENTION = 2,            /* S = alpha_h S + k v^T, log alpha_h = log(1 - 2^(-5-h)) */
  ONCHIP_LIGHTNING_ATTENTION = 3,  /* S = alpha_h S + k v^T, alpha_h given */
  ONCHIP_SIMPLE_GLA = 4,           /* S = alpha_t S + k v^T */
  ONCHIP_MAMBA2 = 5,               /* S = e^(dt' A) S + dt' B x^T, y = (S^T C + D x) silu(z) */
  ONCHIP_MLSTM = 6,                /* S = f S + i k v^T, normalised */
  ONCHIP_GLA = 7,                  /* S = Diag(alpha_t) S + k v^T */
  ONCHIP_RWKV6 = 8,                /* the same, o = (S_{t-1} + Diag(u) k v^T)^T r */
  ONCHIP_HGRN2 = 9,                /* gla with k = 1 - alpha_t */
  ONCHIP_DELTA_RULE = 10,          /* S = S + beta k (v - S^T k)^T */
  ONCHIP_GATED_DELTA_RULE = 11,    /* the same on alpha_t S */
  ONCHIP_KDA = 12,                 /* the same on Diag(alpha_t) S */
  ONCHIP_COMBA = 13,               /* S = alpha_t S_{t-1} + beta k (v - S_{t-1}^T p)^T */
  ONCHIP_GDN2 = 14,                /* S' = Diag(alpha_t) S, S = S' + k (w v - S'^T (b k))^T */
  ONCHIP_GATED_DELTA_PRODUCT = 15, /* num_householder delta rules a token */
  ONCHIP_RWKV7 = 16,               /* S = Diag(alpha_t) S + b (a^T S) + k v^T */
  ONCHIP_IPLR = 17,                /* S = S + b (a^T S) + k v^T */
  ONCHIP_GSA = 18,
  /* gsa: K = K Diag(alpha_t) + k s^T, V = Diag(alpha_t) V + s v^T, o = V^T softmax(K^T q) */
  ONCHIP_HGRN = 19,   /* h = alpha_t h + x */
  ONCHIP_MAMBA1 = 20, /* h = e^(delta' A) h + delta' B u, y = (C . h + D u) silu(z) */
  ONCHIP_RWKV4 = 21   /* o = (P_{t-1} + e^(u+k) v) / (Q_{t-1} + e^(u+k)), P = e^log_decay P + e^k v,
                         Q = e^log_decay Q + e^k */
};

/* The tensors of an operator by their role, and its gradients likewise; absent ones NULL. "rows" is
 * [batch, T, ..], packed [total, ..], of one step [batch, ..]. q, k, v have one float dtype, every
 * other tensor any float dtype. Hv is a multiple of Hk: value head h reads head h / (Hv / Hk).
 *
 *   operator             q  k  v  gate            beta            further
 *   linear_attention     q  k  v
 *   retention            q  k  v
 *   lightning_attention  q  k  v  log_decay [Hv]
 *   simple_gla           q  k  v  log_decay
 *   mamba2               C  B  x  dt                              rate: A, dt_bias, skip: D, z
 *   mlstm                q  k  v  f               i
 *   gla                  q  k  v  log_decay [dk]
 *   rwkv6                r  k  v  log_decay [dk]                  u
 *   hgrn2                q     v  log_decay [dk]
 *   delta_rule           q  k  v                  beta
 *   gated_delta_rule     q  k  v  log_decay       beta            rate: A_log, dt_bias
 *   kda                  q  k  v  log_decay [dk]  beta            rate: A_log, dt_bias
 *   comba                q  k  v  log_decay       beta            a: p
 *   gdn2                 q  k  v  log_decay [dk]                  a: b, b: w
 *   gated_delta_product  q  k  v  log_decay       beta
 *   rwkv7                r  k  v  log_decay [dk]                  a, b
 *   iplr                 q  k  v                                  a, b
 *   gsa                  q  k  v  log_decay [M]                   a: s [M]
 *   hgrn                       x  log_decay
 *   mamba1               C  B  u  delta                           rate: A, dt_bias: delta_bias,
 *                                                                 skip: D, z
 *   rwkv4                      v  log_decay [D]   k               u
 *
 * The last three are scans: they have D channels and no heads. x, u, v, k, delta, z, hgrn's
 * log_decay and o are rows [D]; rwkv4's log_decay and u, delta_bias and D are [D]; A is [D, N]; B
 * and C are rows [N], or [groups, N], where channel d reads group d / (D / groups). delta' =
 * softplus(delta + delta_bias), or with dt_softplus = 0 delta + delta_bias.
 *
 * log_decay is rows [Hv], or a number a head, or absent (no decay); [dk]: rows [Hv, dk]; that of
 * lightning_attention a number a head. With A_log, log_decay and beta are raw: log_decay' =
 * -e^A_log softplus(log_decay + dt_bias), or with lower_bound lower_bound sigmoid(e^A_log
 * (log_decay + dt_bias)); beta' = sigmoid(beta), twice that with allow_neg_eigval. k, v, beta of
 * gated_delta_product have num_householder rows a token: [batch, T num_householder, ..], packed
 * [total num_householder, ..], of a step [batch, num_householder, ..]; cu_seqlens and seqlens count
 * tokens; the decay comes before a token's first row and the read after its last. */
typedef struct onchip_linear_tensors {
  size_t struct_size;
  const onchip_tensor* q;       /* rows [Hk, dk] */
  const onchip_tensor* k;       /* rows [Hk, dk] */
  const onchip_tensor* v;       /* rows [Hv, dv] */
  const onchip_tensor* gate;    /* rows [Hv], or as the table says */
  const onchip_tensor* beta;    /* rows [Hv] */
  const onchip_tensor* a;       /* rows [Hk, dk]; gdn2's [Hv, dk], gsa's [Hv, M] */
  const onchip_tensor* b;       /* rows [Hk, dk]; gdn2's [Hv, dv] */
  const onchip_tensor* u;       /* [Hv, dk] */
  const onchip_tensor* rate;    /* A [Hv], or A_log, which may be absent */
  const onchip_tensor* dt_bias; /* [Hv]; kda's [Hv, dk]; may be absent */
  const onchip_tensor* skip;    /* D [Hv] or [Hv, dv]; may be absent */
  const onchip_tensor* z;       /* rows [Hv, dv]; may be absent */
} onchip_linear_tensors;

#define ONCHIP_LINEAR_TENSORS_INIT \
  {sizeof(onchip_linear_tensors),  \
   NULL,                           \
   NULL,                           \
   NULL,                           \
   NULL,                           \
   NULL,                           \
   NULL,                           \
   NULL,                           \
   NULL,                           \
   NULL,                           \
   NULL,                           \
   NULL,                           \
   NULL}

/* Order of the state's matrix: [N, Hv, dk, dv] or [N, Hv, dv, dk]; of mamba1 [num_seqs, N, D] or
 * [num_seqs, D, N]; hgrn and rwkv4 have none. Default: kv; vk for mamba1 and mamba2. */
enum { ONCHIP_STATE_DEFAULT = 0, ONCHIP_STATE_KV = 1, ONCHIP_STATE_VK = 2 };

/* mlstm's input gate. */
enum { ONCHIP_GATE_EXP = 0, ONCHIP_GATE_SIGMOID = 1 };

/* One struct for forward, backward and step. A field that the operator does not have must keep its
 * default. */
typedef struct onchip_linear_options {
  size_t struct_size;
  double scale;              /* of the read; NaN = dk^-1/2, 1 for mamba2, rwkv7, scans; finite */
  double eps;                /* mlstm: added to the denominator; >= 0 */
  double dt_min;             /* mamba2: dt' = clamp(softplus(dt + dt_bias), dt_min, dt_max) */
  double dt_max;             /* INFINITY = no bound */
  double lower_bound;        /* with A_log: of log_decay, finite and below 0; NaN = none */
  int64_t chunk_len;         /* backward keeps a state every so many tokens: a multiple of 16, or
                                0 = pick. Memory against recomputation; changes no result */
  int64_t num_householder;   /* gated_delta_product: rows a token, at least 1 */
  int32_t op;                /* onchip_linear_operator */
  int32_t state_layout;      /* ONCHIP_STATE_* */
  int32_t normalize;         /* linear_attention: 0 (default) or 1; mlstm: 0 or 1, default 1 with
                                the exponential gate, 0 with the sigmoid; -1 = default */
  int32_t gate;              /* mlstm: ONCHIP_GATE_* */
  int32_t detach_normalizer; /* mlstm's backward: the denominator is a constant */
  int32_t dt_softplus;       /* mamba1, mamba2: 0 = dt' = clamp(dt + dt_bias) */
  int32_t qk_l2norm;         /* the delta rules: q, k / sqrt(|.|^2 + 1e-6) first */
  int32_t allow_neg_eigval;  /* with A_log: beta' in (0, 2) */
  int32_t check;             /* refuse log_decay > 0, A > 0 and NaN; on a device: also lengths */
  const char* backend;       /* force one by name; NULL picks */
  const onchip_tensor* cu_seqlens; /* int32 or int64 [num_seqs + 1]; makes tensors packed */
  const onchip_tensor* seqlens;    /* int32 or int64 [num_seqs]: used rows of each slot */
} onchip_linear_options;

/* clang-format off */
#define ONCHIP_LINEAR_OPTIONS_INIT \
  { \
    sizeof(onchip_linear_options), (double)NAN, 0.0, 0.0, (double)INFINITY, (double)NAN, 0, 1, 0, \
        0, -1, 0, 0, 1, 0, 0, 0, NULL, NULL, NULL \
  }
/* clang-format on */

/* States are arrays of up to three parts, the rest NULL: the matrix; with a normaliser its vector
 * [N, Hv, dk]; of gsa a second matrix, [N, Hv, dk, M] and [N, Hv, M, dv]; with mlstm's exponential
 * gate the stabiliser [N, Hv]. Of hgrn one vector [N, D]; of rwkv4 numerator, denominator and
 * stabiliser, each [N, D], absent (0, 0, -inf). fp32, fp64 with fp64 inputs.
 * N = batch, packed num_seqs. */
enum { ONCHIP_LINEAR_STATE_PARTS = 3 };

/* o: rows [Hv, dv], of a scan [D], in v's dtype. initial_state all NULL = zeros; final_state all
 * NULL = not wanted. An empty sequence's final state is its initial one. */
typedef struct onchip_linear_forward_args {
  size_t struct_size;
  const onchip_linear_tensors* inputs;
  const onchip_tensor* o;
  const onchip_tensor* initial_state[ONCHIP_LINEAR_STATE_PARTS];
  const onchip_tensor* final_state[ONCHIP_LINEAR_STATE_PARTS];
  const onchip_linear_options* options; /* required: names the operator */
} onchip_linear_forward_args;

/* clang-format off */
#define ONCHIP_LINEAR_FORWARD_ARGS_INIT \
  {sizeof(onchip_linear_forward_args), NULL, NULL, {NULL, NULL, NULL}, {NULL, NULL, NULL}, NULL}
/* clang-format on */

/* gradients: each as its input; NULL = not wanted. d_final_state, dinitial_state: parts as the
 * state's; NULL = zero, not wanted. The stabiliser m of mlstm and rwkv4 counts as a constant:
 * d_final_state has no third part, and dinitial_state's is <C_0, dC_0> + <n_0, dn_0>. */
typedef struct onchip_linear_backward_args {
  size_t struct_size;
  const onchip_linear_tensors* inputs;
  const onchip_tensor* d_o;
  const onchip_tensor* initial_state[ONCHIP_LINEAR_STATE_PARTS];
  const onchip_tensor* d_final_state[ONCHIP_LINEAR_STATE_PARTS];
  const onchip_linear_tensors* gradients;
  const onchip_tensor* dinitial_state[ONCHIP_LINEAR_STATE_PARTS];
  const onchip_linear_options* options;
} onchip_linear_backward_args;

/* clang-format off */
#define ONCHIP_LINEAR_BACKWARD_ARGS_INIT \
  { \
    sizeof(onchip_linear_backward_args), NULL, NULL, {NULL, NULL, NULL}, {NULL, NULL, NULL}, \
        NULL, {NULL, NULL, NULL}, NULL \
  }
/* clang-format on */

/* One token a sequence, for decoding. inputs have no time axis: q [batch, Hk, dk], log_decay
 * [batch, Hv], .. ; o [batch, Hv, dv], of a scan [batch, D].
 *   state: pools [slots, Hv, ..], read and written in place; fp32, bf16 or fp16 (fp64 with fp64).
 *   state_indices int32 [batch]: each row's slot, no slot twice; -1 = skip: o is 0, no state
 *   changes. NULL = slot n for row n, slots = batch. */
typedef struct onchip_linear_step_args {
  size_t struct_size;
  const onchip_linear_tensors* inputs;
  const onchip_tensor* o;
  const onchip_tensor* state[ONCHIP_LINEAR_STATE_PARTS];
  const onchip_tensor* state_indices;
  const onchip_linear_options* options;
} onchip_linear_step_args;

#define ONCHIP_LINEAR_STEP_ARGS_INIT \
  {sizeof(onchip_linear_step_args), NULL, NULL, {NULL, NULL, NULL}, NULL, NULL}

ONCHIP_API onchip_status onchip_linear_forward_plan(const onchip_linear_forward_args* args,
                                                    onchip_plan* plan);
ONCHIP_API onchip_status onchip_linear_forward_run(const onchip_plan* plan,
                                                   const onchip_linear_forward_args* args,
                                                   void* workspace, void* stream);
ONCHIP_API onchip_status onchip_linear_backward_plan(const onchip_linear_backward_args* args,
                                                     onchip_plan* plan);
ONCHIP_API onchip_status onchip_linear_backward_run(const onchip_plan* plan,
                                                    const onchip_linear_backward_args* args,
                                                    void* workspace, void* stream);
ONCHIP_API onchip_status onchip_linear_step_plan(const onchip_linear_step_args* args,
                                                 onchip_plan* plan);
ONCHIP_API onchip_status onchip_linear_step_run(const onchip_plan* plan,
                                                const onchip_linear_step_args* args,
                                                void* workspace, void* stream);

/* ---- short causal convolution (docs/semantics.md, section 3) --------------------------------- */

/* Functions of one number: of a convolution's sum, of a norm's gate. */
enum { ONCHIP_ACTIVATION_NONE = 0, ONCHIP_ACTIVATION_SILU = 1, ONCHIP_ACTIVATION_SIGMOID = 2 };

/* y_t = f(bias + sum_j weight[j] x_(t - W + 1 + j)) in each channel by itself; inputs before the
 * first are those of the state, whose slot s is x_(s - W), or 0. The final state has the last W.
 *   x, y [batch, T, D], packed [total, D], one float dtype; weight [D, W], W >= 1, and bias [D]
 *   (may be NULL) any float dtype; states [N, D, W], x's dtype.
 * options apply to forward, backward and step. */
typedef struct onchip_conv_options {
  size_t struct_size;
  int32_t activation;              /* ONCHIP_ACTIVATION_NONE or _SILU */
  const char* backend;             /* force one by name; NULL picks */
  const onchip_tensor* cu_seqlens; /* int32 or int64 [num_seqs + 1]; makes tensors packed */
  const onchip_tensor* seqlens;    /* int32 or int64 [num_seqs]: used rows of each slot */
} onchip_conv_options;

#define ONCHIP_CONV_OPTIONS_INIT {sizeof(onchip_conv_options), 0, NULL, NULL, NULL}

typedef struct onchip_conv_forward_args {
  size_t struct_size;
  const onchip_tensor* x;
  const onchip_tensor* weight;
  const onchip_tensor* bias;
  const onchip_tensor* initial_state; /* NULL = zeros */
  const onchip_tensor* y;
  const onchip_tensor* final_state;   /* NULL = not wanted */
  const onchip_conv_options* options; /* NULL = all defaults */
} onchip_conv_forward_args;

#define ONCHIP_CONV_FORWARD_ARGS_INIT \
  {sizeof(onchip_conv_forward_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL}

/* Gradients as their tensors; NULL = not wanted. d_final_state NULL = zero. */
typedef struct onchip_conv_backward_args {
  size_t struct_size;
  const onchip_tensor* d_y;
  const onchip_tensor* x;
  const onchip_tensor* weight;
  const onchip_tensor* bias;
  const onchip_tensor* initial_state;
  const onchip_tensor* d_final_state;
  const onchip_tensor* dx;
  const onchip_tensor* dweight;
  const onchip_tensor* dbias;
  const onchip_tensor* dinitial_state;
  const onchip_conv_options* options;
} onchip_conv_backward_args;

/* clang-format off */
#define ONCHIP_CONV_BACKWARD_ARGS_INIT \
  { \
    sizeof(onchip_conv_backward_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
        NULL, NULL \
  }
/* clang-format on */

/* One row a sequence: x, y [batch, D]; state [slots, D, W], read and written in place;
 * state_indices int32 [batch], each slot once, -1 = skip: y is 0, no state changes; NULL = slot n
 * for row n, slots = batch. */
typedef struct onchip_conv_step_args {
  size_t struct_size;
  const onchip_tensor* x;
  const onchip_tensor* weight;
  const onchip_tensor* bias;
  const onchip_tensor* state;
  const onchip_tensor* state_indices;
  const onchip_tensor* y;
  const onchip_conv_options* options;
} onchip_conv_step_args;

#define ONCHIP_CONV_STEP_ARGS_INIT \
  {sizeof(onchip_conv_step_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL}

ONCHIP_API onchip_status onchip_conv_forward_plan(const onchip_conv_forward_args* args,
                                                  onchip_plan* plan);
ONCHIP_API onchip_status onchip_conv_forward_run(const onchip_plan* plan,
                                                 const onchip_conv_forward_args* args,
                                                 void* workspace, void* stream);
ONCHIP_API onchip_status onchip_conv_backward_plan(const onchip_conv_backward_args* args,
                                                   onchip_plan* plan);
ONCHIP_API onchip_status onchip_conv_backward_run(const onchip_plan* plan,
                                                  const onchip_conv_backward_args* args,
                                                  void* workspace, void* stream);
ONCHIP_API onchip_status onchip_conv_step_plan(const onchip_conv_step_args* args,
                                               onchip_plan* plan);
ONCHIP_API onchip_status onchip_conv_step_run(const onchip_plan* plan,
                                              const onchip_conv_step_args* args, void* workspace,
                                              void* stream);

/* ---- norms (docs/semantics.md, section 3) ---------------------------------------------------- */

/* Over the last axis of x [.., D], D split into groups of group_size:
 *   ONCHIP_NORM_L2: y = x / sqrt(sum x^2 + eps);
 *   ONCHIP_NORM_RMS: y = x / sqrt(mean x^2 + eps) weight g(gate), or, with gate_first, the same of
 *   x g(gate) without a gate behind it. */
enum { ONCHIP_NORM_L2 = 0, ONCHIP_NORM_RMS = 1 };

typedef struct onchip_norm_options {
  size_t struct_size;
  double eps;         /* finite, above 0 */
  int64_t group_size; /* divides D; 0 = D */
  int32_t kind;       /* ONCHIP_NORM_* */
  int32_t activation; /* g, with a gate: ONCHIP_ACTIVATION_SILU or _SIGMOID; else _NONE */
  int32_t gate_first; /* 0 or 1 */
  const char* backend;
} onchip_norm_options;

#define ONCHIP_NORM_OPTIONS_INIT {sizeof(onchip_norm_options), 1e-6, 0, 0, 0, 0, NULL}

/* x, y, gate [.., D], rank 1 to 6: x, y one float dtype, gate any; weight [D], any float dtype.
 * gate and weight belong to ONCHIP_NORM_RMS; each may be NULL. */
typedef struct onchip_norm_forward_args {
  size_t struct_size;
  const onchip_tensor* x;
  const onchip_tensor* gate;
  const onchip_tensor* weight;
  const onchip_tensor* y;
  const onchip_norm_options* options; /* NULL = all defaults */
} onchip_norm_forward_args;

#define ONCHIP_NORM_FORWARD_ARGS_INIT \
  {sizeof(onchip_norm_forward_args), NULL, NULL, NULL, NULL, NULL}

/* Gradients as their tensors; NULL = not wanted. */
typedef struct onchip_norm_backward_args {
  size_t struct_size;
  const onchip_tensor* d_y;
  const onchip_tensor* x;
  const onchip_tensor* gate;
  const onchip_tensor* weight;
  const onchip_tensor* dx;
  const onchip_tensor* dgate;
  const onchip_tensor* dweight;
  const onchip_norm_options* options;
} onchip_norm_backward_args;

#define ONCHIP_NORM_BACKWARD_ARGS_INIT \
  {sizeof(onchip_norm_backward_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL}

ONCHIP_API onchip_status onchip_norm_forward_plan(const onchip_norm_forward_args* args,
                                                  onchip_plan* plan);
ONCHIP_API onchip_status onchip_norm_forward_run(const onchip_plan* plan,
                                                 const onchip_norm_forward_args* args,
                                                 void* workspace, void* stream);
ONCHIP_API onchip_status onchip_norm_backward_plan(const onchip_norm_backward_args* args,
                                                   onchip_plan* plan);
ONCHIP_API onchip_status onchip_norm_backward_run(const onchip_plan* plan,
                                                  const onchip_norm_backward_args* args,
                                                  void* workspace, void* stream);

/* ---- looking inside -------------------------------------------------------------------------- */

/* Which backend and kernel would take this call, and why each other one would not: text, one
 * backend a line. `args` is the operator's args struct. Writes at most `capacity` bytes, the
 * terminating NUL included; `*length` (may be NULL) gets the whole text's length without it. A call
 * that breaks the contract fails as plan would; one that no backend takes succeeds and says so. */
ONCHIP_API onchip_status onchip_explain(onchip_operator op, const void* args, char* text,
                                        size_t capacity, size_t* length);

/* The library as JSON text: version, compiler, backends with availability and reason, instruction
 * set, threads, settings with their values and origin. Same buffer rule as onchip_explain. */
ONCHIP_API onchip_status onchip_describe(char* text, size_t capacity, size_t* length);

/* Threads that CPU backends use at most, caller included. Starts at ONCHIP_NUM_THREADS or else the
 * number of CPUs this process may use (affinity and cgroup quota). Results never depend on it.
 * Setting 0 restores that start; negative or over 1024 is refused. */
ONCHIP_API onchip_status onchip_set_num_threads(int32_t num_threads);
ONCHIP_API int32_t onchip_get_num_threads(void);

/* ---- GPU kernels ahead of their first call ------------------------------------------------------
 *
 * A GPU kernel is compiled at its first use and kept on disk (docs/settings.md, ONCHIP_CACHE_DIR).
 * These do it ahead of time for the registered ones: a kernel, the values it is compiled for, an
 * architecture. `filter` picks those whose name contains it; NULL or "" picks all. No GPU is
 * needed, only NVRTC. Text is JSON, same buffer rule as onchip_explain. */

/* {"kernels": [{"name", "kernel", "architecture", "spec": {field: value}}]}. Compiles nothing. */
ONCHIP_API onchip_status onchip_kernels_list(const char* filter, char* text, size_t capacity,
                                             size_t* length);

/* Compiles them into the kernel cache. Fails with ONCHIP_UNSUPPORTED where nothing can be kept. */
ONCHIP_API onchip_status onchip_kernels_warm(const char* filter);

/* {"kernels": [{"name", "origin", "compiler", "registers", "spill_store_bytes", "spill_load_bytes",
 * "stack_bytes", "static_shared_bytes", "dynamic_shared_bytes", "barriers", "advisories",
 * "cubin_bytes"}]}: origin is "archive", "disk" or "compiler"; advisories counts the compiler's
 * notes on lost performance (wgmma serialised, ...). */
ONCHIP_API onchip_status onchip_kernels_resources(const char* filter, char* text, size_t capacity,
                                                  size_t* length);

/* Writes them to an archive file at `path`. The library reads the file onchip_kernels.bin in its
 * own folder: kernels in it need no NVRTC. */
ONCHIP_API onchip_status onchip_kernels_build(const char* filter, const char* path);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ONCHIP_ONCHIP_H_ */
