/* Attention on a 4-bit KV cache from C: on pages of this program, then on a cache of the library. Both are compared with
 * a naive implementation.
 *
 *   cc -std=c11 -I kernels-c/include kernels-c/tests/programs/attention.c libquant_kernels.a -lpthread -ldl -lm
 */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quant_kernels.h"

/* A prompt whose last QUERIES tokens are queries; two query heads share each key-value head. */
enum { TOKENS = 1500, QUERIES = 3, KV = 2, HEADS = 4, D = 64, PAGE = 64, BLOCKS = (TOKENS + PAGE - 1) / PAGE };

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            fprintf(stderr, "line %d: %s; %s\n", __LINE__, #condition, reason); \
            exit(1);                                                            \
        }                                                                       \
    } while (0)

static char reason[200] = "";
static const qz1_message message = {sizeof(qz1_message), 0, reason, sizeof reason};

static float keys[TOKENS][KV][D], values[TOKENS][KV][D], q[QUERIES][HEADS][D];
static float out[QUERIES][HEADS][D], lse[QUERIES][HEADS];
static float other[QUERIES][HEADS][D], other_lse[QUERIES][HEADS];
/* The contents of the cache: keys and values after quantization to 4 bits. */
static float stored_keys[KV][TOKENS][D], stored_values[KV][TOKENS][D];

static float noise(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 23) - 1;
}

/* Attention by definition, in double precision, on the stored keys and values. The kernel rounds queries to 8 bits.
 * This changes each entry by at most max |q| / 254, each score by at most `off`, and each probability by at most a
 * factor of exp(2 off). On processors with bf16 this adds 2^-8 of terms whose sum is at most 3 max |v|. */
static void check(size_t query, size_t head, float scale, size_t first, size_t seen) {
    static double scores[TOKENS];
    const float *x = q[query][head];
    const size_t kv = head / (HEADS / KV);
    double largest_q = 0, most = -DBL_MAX, off = 0, sum = 0, largest_v = 0;
    double expected[D] = {0}, magnitude[D] = {0};
    for (size_t i = 0; i < D; i++) {
        largest_q = fmax(largest_q, fabs(x[i]));
    }
    for (size_t t = first; t < seen; t++) {
        double keys_sum = 0;
        scores[t] = 0;
        for (size_t i = 0; i < D; i++) {
            scores[t] += (double)scale * x[i] * stored_keys[kv][t][i];
            keys_sum += fabs(stored_keys[kv][t][i]);
            largest_v = fmax(largest_v, fabs(stored_values[kv][t][i]));
        }
        most = fmax(most, scores[t]);
        off = fmax(off, scale * largest_q / 254 * keys_sum);
    }
    for (size_t t = first; t < seen; t++) {
        const double p = exp(scores[t] - most);
        sum += p;
        for (size_t i = 0; i < D; i++) {
            expected[i] += p * stored_values[kv][t][i];
            magnitude[i] += p * fabs(stored_values[kv][t][i]);
        }
    }
    CHECK(fabs(lse[query][head] - (most + log(sum))) <= off + 1e-4);
    for (size_t i = 0; i < D; i++) {
        const double bound = expm1(2 * off) * magnitude[i] / sum + (3.0 / 256 + 1e-4) * largest_v;
        CHECK(fabs(out[query][head][i] - expected[i] / sum) <= bound);
        /* The bound must not be trivial. */
        CHECK(bound <= 0.2 * largest_v);
    }
}

static void check_causal(float scale, size_t first) {
    for (size_t query = 0; query < QUERIES; query++) {
        for (size_t head = 0; head < HEADS; head++) {
            check(query, head, scale, first, TOKENS - QUERIES + 1 + query);
        }
    }
}

int main(void) {
    uint32_t state = 1;
    for (size_t i = 0; i < TOKENS * KV * D; i++) (&keys[0][0][0])[i] = noise(&state);
    for (size_t i = 0; i < TOKENS * KV * D; i++) (&values[0][0][0])[i] = noise(&state);
    for (size_t i = 0; i < QUERIES * HEADS * D; i++) (&q[0][0][0])[i] = 2 * noise(&state);
    CHECK(qz1_abi_version() >> 16 == 1);
    CHECK(qz1_has(QZ1_FEATURE_ATTENTION) == 1);

    qz1_kv_layout layout = {.struct_size = sizeof layout};
    CHECK(qz1_kv_layout_of(QZ1_KV_4BIT, D, &layout, &message) == QZ1_STATUS_OK);
    CHECK(layout.page_tokens == PAGE);
    const qz1_heads heads = {.struct_size = sizeof heads, .scale = 0.125f, .query = HEADS, .kv = KV};

    /* A pool of pages, from which each head takes pages in any order. */
    const size_t pool_len = KV * BLOCKS * layout.page_bytes;
    uint8_t *pool = aligned_alloc(64, pool_len);
    CHECK(pool != NULL);
    uint32_t numbers[KV][BLOCKS];
    qz1_page_list lists[KV];
    for (size_t head = 0; head < KV; head++) {
        for (size_t block = 0; block < BLOCKS; block++) {
            numbers[head][block] = (uint32_t)(KV * BLOCKS - 1 - block * KV - head);
        }
        lists[head] = (qz1_page_list){.struct_size = sizeof lists[head], .pages = numbers[head],
                                      .pages_len = BLOCKS, .tokens = 0, .seen = PTRDIFF_MAX};
    }

    /* First a prompt, then one token at a time. */
    for (size_t at = 0; at < TOKENS;) {
        const size_t m = at == 0 ? TOKENS - 5 : 1;
        CHECK(qz1_kv_append(&layout, pool, pool_len, lists, KV, keys[at][0], m * KV * D, values[at][0], m * KV * D, NULL,
                            &message) == QZ1_STATUS_OK);
        at += m;
        for (size_t head = 0; head < KV; head++) lists[head].tokens = at;
    }
    for (size_t head = 0; head < KV; head++) {
        for (size_t t = 0; t < TOKENS; t++) {
            const uint8_t *page = pool + numbers[head][t / PAGE] * layout.page_bytes;
            CHECK(qz1_kv_read(&layout, page, layout.page_bytes, t % PAGE, stored_keys[head][t], D, stored_values[head][t],
                              D, &message) == QZ1_STATUS_OK);
            for (size_t i = 0; i < D; i++) {
                /* At most half of one of fifteen steps over a range of 2, plus the rounding of the scale. */
                CHECK(fabsf(stored_keys[head][t][i] - keys[t][head][i]) <= 1.0f / 15 + 1e-3f);
                CHECK(fabsf(stored_values[head][t][i] - values[t][head][i]) <= 1.0f / 15 + 1e-3f);
            }
        }
    }

    /* Causal: the last query sees all tokens, and each earlier one sees one token less than the next. */
    size_t words;
    CHECK(qz1_attend_workspace(&layout, &heads, QUERIES, TOKENS, &words, &message) == QZ1_STATUS_OK);
    uint32_t *workspace = malloc(words * sizeof *workspace);
    CHECK(workspace != NULL);
    for (size_t head = 0; head < KV; head++) lists[head].seen = TOKENS - QUERIES + 1;
#define ATTEND(o, l)                                                                                                  \
    qz1_attend(&layout, pool, pool_len, &heads, lists, KV, q[0][0], QUERIES * HEADS * D, (o)[0][0], QUERIES * HEADS * D, \
               (l)[0], QUERIES * HEADS, workspace, words, QZ1_ISA_DETECT, NULL, &message)
    CHECK(ATTEND(out, lse) == QZ1_STATUS_OK);
    check_causal(heads.scale, 0);

    /* A cache of the library does the same, with bit-identical results. */
    qz1_kv_cache *cache = NULL;
    CHECK(qz1_kv_cache_new(&layout, &heads, TOKENS, &cache, &message) == QZ1_STATUS_OK);
    CHECK(qz1_kv_cache_append(cache, keys[0][0], TOKENS * KV * D, values[0][0], TOKENS * KV * D, NULL, &message) ==
          QZ1_STATUS_OK);
    CHECK(qz1_kv_cache_tokens(cache) == TOKENS);
    CHECK(qz1_kv_cache_prefill(cache, q[0][0], QUERIES * HEADS * D, other[0][0], QUERIES * HEADS * D, other_lse[0],
                               QUERIES * HEADS, NULL, &message) == QZ1_STATUS_OK);
    CHECK(memcmp(out, other, sizeof out) == 0 && memcmp(lse, other_lse, sizeof lse) == 0);
    const size_t last = QUERIES - 1;
    CHECK(qz1_kv_cache_decode(cache, q[last][0], HEADS * D, other[0][0], HEADS * D, other_lse[0], HEADS, NULL, &message) ==
          QZ1_STATUS_OK);
    CHECK(memcmp(out[last], other[0], sizeof out[last]) == 0);

    /* Attend to all but the first 700 tokens, then to these 700, and merge: this is the result on all tokens. */
    for (size_t head = 0; head < KV; head++) lists[head].first = 700;
    CHECK(ATTEND(out, lse) == QZ1_STATUS_OK);
    check_causal(heads.scale, 700);
    for (size_t head = 0; head < KV; head++) {
        lists[head].first = 0;
        lists[head].tokens = 700;
    }
    CHECK(ATTEND(other, other_lse) == QZ1_STATUS_OK);
    CHECK(qz1_attend_merge(D, out[0][0], QUERIES * HEADS * D, lse[0], QUERIES * HEADS, other[0][0], QUERIES * HEADS * D,
                           other_lse[0], QUERIES * HEADS, &message) == QZ1_STATUS_OK);
    check_causal(heads.scale, 0);

    /* Errors give a status and a message. */
    numbers[1][0] = KV * BLOCKS;
    CHECK(ATTEND(out, lse) == QZ1_STATUS_MISMATCH);
    printf("a page outside the pool: %s\n", reason);
    words = 1;
    numbers[1][0] = 0;
    CHECK(ATTEND(out, lse) == QZ1_STATUS_LENGTH);
    printf("a short workspace: %s\n", reason);
    keys[0][0][0] = NAN;
    CHECK(qz1_kv_cache_truncate(cache, 0, &message) == QZ1_STATUS_OK);
    CHECK(qz1_kv_cache_append(cache, keys[0][0], KV * D, values[0][0], KV * D, NULL, &message) == QZ1_STATUS_SCHEME);
    printf("a key that is not a number: %s\n", reason);
    CHECK(qz1_kv_cache_tokens(cache) == 0);

    qz1_kv_cache_free(cache);
    free(workspace);
    free(pool);
    puts("done");
    return 0;
}
