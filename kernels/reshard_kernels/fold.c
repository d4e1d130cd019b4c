/* Computes the sum of a tile's words, each times the weights of its row and column, modulo P = 2^48 - 59, in integers.

   A tile has rows of signed 32-bit words. Each row and each column has a weight ("number") in each of two lanes:

       sums[lane] = sum over r, c of  numbers[lane][r] * words[r][c] * column number[lane][c]   modulo P

   Why nothing overflows: A column's number is low + 2^24 high, with both digits in (-2^23, 2^23] (`table` in
   __init__.py). So the product of a word, in [-2^31, 2^31), and a digit is in [-2^54, 2^54). A strip has at most 512
   columns, so each sum of products over any of them is in [-2^63, 2^63), and fits into a signed 64-bit integer. The two
   sums, low and high, are then joined modulo P, where 2^48 = 59. The result of `joined` is below 2^50 in absolute
   value. At most 2^11 strips per row (2^20 columns) add up to less than 2^61, times a row's number below 2^48 to less
   than 2^109, and over at most 2^17 rows to less than 2^126.

   With IFMA, a strip multiplies a word plus 2^31, in [0, 2^32), by the column's number itself, in [0, P). The product
   is below 2^80. Its low 52 bits and its high bits, below 2^28, are summed separately: over 512 columns, the sums are
   below 2^61 and 2^37. Finally, 2^31 times the sum of the numbers is subtracted.

   The caller must not exceed 2^20 columns and 2^17 rows. Words need not be aligned. */

#include <stdint.h>
#include <string.h>

#ifndef __SIZEOF_INT128__
#error "integers of 128 bits are needed, as gcc and clang have them on 64-bit processors"
#endif

#define P 281474976710597LL
#define LANES 2
#define DIGITS 4  /* low and high of lane 0, low and high of lane 1 */
#define GROUP 8   /* columns per group of the table: 4 x 8 digits of 32 bits, then 2 x 8 numbers of 64 bits */
#define ENTRY 64  /* size of a group in the table, in 32-bit words */
#define STRIP 512 /* columns */
#define MOST 4    /* most rows at a time */

typedef __int128 wide;

/* Returns low + 2^24 high modulo P, not reduced: 2^48 = 59, and right shifts of negative integers round down. */
static inline int64_t joined(int64_t low, int64_t high) {
    return (low & ((1LL << 48) - 1)) + 59 * (low >> 48) + ((high & ((1LL << 24) - 1)) << 24) + 59 * (high >> 24);
}

/* Computes sums[row][lane] of a strip, below 2^50 in absolute value. Each function handles a fixed number of rows.
   `step` is the number of bytes between rows. */
typedef void strip_sums(const char *words, int64_t step, int64_t columns, const int32_t *table, int64_t *sums);

static void portable(const char *words, int64_t step, int64_t columns, const int32_t *table, int64_t *sums) {
    int64_t found[DIGITS][GROUP] = {{0}};
    (void)step;
    for (int64_t c = 0; c < columns; c += GROUP, table += ENTRY) {
        int32_t word[GROUP] = {0};
        memcpy(word, words + 4 * c, 4 * (columns - c < GROUP ? columns - c : GROUP));
        for (int d = 0; d < DIGITS; d++)
            for (int j = 0; j < GROUP; j++)
                found[d][j] += (int64_t)word[j] * table[GROUP * d + j];
    }
    for (int d = 0; d < DIGITS; d++)
        for (int j = 1; j < GROUP; j++)
            found[d][0] += found[d][j];
    for (int lane = 0; lane < LANES; lane++)
        sums[lane] = joined(found[2 * lane][0], found[2 * lane + 1][0]);
}

#ifdef __x86_64__
#include <immintrin.h>

/* One vpmuldq multiplies the even ones of 8 words. Another multiplies the odd ones, after a shift. */
__attribute__((target("avx2"), always_inline)) static inline void avx2(const char *words, int64_t step,
                                                                       int64_t columns, const int32_t *table,
                                                                       int64_t *sums, const int rows) {
    __m256i found[2][DIGITS], even[2], odd[2];
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < DIGITS; d++)
            found[r][d] = _mm256_setzero_si256();
    for (int64_t c = 0; c < columns; c += GROUP, table += ENTRY) {
        if (c + GROUP <= columns) {
            for (int r = 0; r < rows; r++)
                even[r] = _mm256_loadu_si256((const __m256i *)(words + r * step + 4 * c));
        } else { /* do not read past the end of the row */
            const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(columns - c)), place);
            for (int r = 0; r < rows; r++)
                even[r] = _mm256_maskload_epi32((const int *)(words + r * step + 4 * c), inside);
        }
        if (c % 16 == 0) /* prefetch the cache line for the turn after next; past the end, this has no effect */
            for (int r = 0; r < rows; r++)
                _mm_prefetch((const char *)((uintptr_t)words + (r + 4) * step + 4 * c), _MM_HINT_T0);
        for (int r = 0; r < rows; r++)
            odd[r] = _mm256_srli_epi64(even[r], 32);
        for (int d = 0; d < DIGITS; d++) {
            const __m256i digit = _mm256_loadu_si256((const __m256i *)(table + GROUP * d));
            const __m256i next = _mm256_srli_epi64(digit, 32);
            for (int r = 0; r < rows; r++) {
                found[r][d] = _mm256_add_epi64(found[r][d], _mm256_mul_epi32(even[r], digit));
                found[r][d] = _mm256_add_epi64(found[r][d], _mm256_mul_epi32(odd[r], next));
            }
        }
    }
    for (int r = 0; r < rows; r++) { /* add up the four lanes of each vector */
        const __m256i *f = found[r];
        const __m256i a = _mm256_add_epi64(_mm256_unpacklo_epi64(f[0], f[1]), _mm256_unpackhi_epi64(f[0], f[1]));
        const __m256i b = _mm256_add_epi64(_mm256_unpacklo_epi64(f[2], f[3]), _mm256_unpackhi_epi64(f[2], f[3]));
        const __m256i all = _mm256_add_epi64(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
        int64_t digits[DIGITS];
        _mm256_storeu_si256((__m256i *)digits, all);
        for (int lane = 0; lane < LANES; lane++)
            sums[LANES * r + lane] = joined(digits[2 * lane], digits[2 * lane + 1]);
    }
}

__attribute__((target("avx2"))) static void avx2_one(const char *words, int64_t step, int64_t columns,
                                                     const int32_t *table, int64_t *sums) {
    avx2(words, step, columns, table, sums, 1);
}

__attribute__((target("avx2"))) static void avx2_two(const char *words, int64_t step, int64_t columns,
                                                     const int32_t *table, int64_t *sums) {
    avx2(words, step, columns, table, sums, 2);
}

#define IFMA "avx512f,avx512vl,avx512ifma"

/* 8 sums of products: of their low 52 bits, and of their high bits. */
typedef struct {
    __m512i low[LANES], high[LANES];
} products;

/* Adds 8 columns of one row to the sums. Does not read past the end of the row, where the table has zeros. */
__attribute__((target(IFMA), always_inline)) static inline products
more(products sums, const char *words, __mmask8 inside, __m512i first, __m512i second) {
    const __m256i word = _mm256_maskz_loadu_epi32(inside, words);
    const __m512i shifted = _mm512_cvtepu32_epi64(_mm256_xor_si256(word, _mm256_set1_epi32(INT32_MIN)));
    sums.low[0] = _mm512_madd52lo_epu64(sums.low[0], shifted, first);
    sums.high[0] = _mm512_madd52hi_epu64(sums.high[0], shifted, first);
    sums.low[1] = _mm512_madd52lo_epu64(sums.low[1], shifted, second);
    sums.high[1] = _mm512_madd52hi_epu64(sums.high[1], shifted, second);
    return sums;
}

__attribute__((target(IFMA), always_inline)) static inline void ifma(const char *words, int64_t step, int64_t columns,
                                                                     const int32_t *table, int64_t *sums,
                                                                     const int rows) {
    const __m512i zero = _mm512_setzero_si512();
    const products none = {{zero, zero}, {zero, zero}};
    products a = none, b = none, c = none, d = none; /* not an array: compilers would store it in memory at each turn */
    __m512i numbers[LANES] = {zero, zero};
    for (int64_t at = 0; at < columns; at += GROUP, words += 4 * GROUP, table += ENTRY) {
        const __m512i first = _mm512_loadu_si512(table + DIGITS * GROUP);
        const __m512i second = _mm512_loadu_si512(table + DIGITS * GROUP + 2 * GROUP);
        const __mmask8 inside = (__mmask8)(at + GROUP <= columns ? 0xff : (1 << (columns - at)) - 1);
        numbers[0] = _mm512_add_epi64(numbers[0], first);
        numbers[1] = _mm512_add_epi64(numbers[1], second);
        if (at % 16 == 0)
            for (int r = 0; r < rows; r++)
                _mm_prefetch((const char *)((uintptr_t)words + (r + MOST) * step), _MM_HINT_T0);
        a = more(a, words, inside, first, second);
        if (rows == 1)
            continue;
        b = more(b, words + step, inside, first, second);
        c = more(c, words + 2 * step, inside, first, second);
        d = more(d, words + 3 * step, inside, first, second);
    }
    const products found[MOST] = {a, b, c, d};
    for (int lane = 0; lane < LANES; lane++) { /* the sum of the numbers is below 2^57, and 2^31 = 2^7 2^24 */
        const int64_t all = joined(_mm512_reduce_add_epi64(numbers[lane]), 0);
        const int64_t offset = joined(0, all << 7);
        for (int r = 0; r < rows; r++) { /* 2^52 = 16 * 59 */
            const int64_t low = _mm512_reduce_add_epi64(found[r].low[lane]);
            const int64_t high = _mm512_reduce_add_epi64(found[r].high[lane]);
            sums[LANES * r + lane] = joined(low, 0) + 16 * 59 * high - offset;
        }
    }
}

__attribute__((target(IFMA))) static void ifma_one(const char *words, int64_t step, int64_t columns,
                                                   const int32_t *table, int64_t *sums) {
    ifma(words, step, columns, table, sums, 1);
}

__attribute__((target(IFMA))) static void ifma_most(const char *words, int64_t step, int64_t columns,
                                                    const int32_t *table, int64_t *sums) {
    ifma(words, step, columns, table, sums, MOST);
}
#endif

static inline int64_t reduced(wide value) {
    const int64_t rest = (int64_t)(value % P);
    return rest < 0 ? rest + P : rest;
}

/* With `numbers`, (LANES, rows) in [0, P), writes the tile's sum to `sums`, (LANES). Without, writes the sum of each row
   to `sums`, (LANES, rows). `step` is the number of bytes between rows. If `widest` is 0, only instructions that every
   CPU of the architecture has are used; on x86-64, 1 allows AVX2, and 2 also AVX-512. */
void reshard_fold(const char *words, int64_t rows, int64_t step, int64_t columns, const int32_t *table,
                  const int64_t *numbers, int64_t *sums, int widest) {
    strip_sums *one = portable, *more = portable;
    int64_t height = 1;
    wide total[LANES] = {0};
#ifdef __x86_64__
    if (widest >= 2 && __builtin_cpu_supports("avx512ifma") && __builtin_cpu_supports("avx512vl")) {
        one = ifma_one;
        more = ifma_most;
        height = MOST;
    } else if (widest >= 1 && __builtin_cpu_supports("avx2")) {
        one = avx2_one;
        more = avx2_two;
        height = 2;
    }
#else
    (void)widest;
#endif
    for (int64_t r = 0; r < rows;) {
        const int64_t some = r + height <= rows ? height : 1;
        int64_t found[MOST * LANES], row[MOST][LANES] = {{0}};
        for (int64_t c = 0; c < columns; c += STRIP) {
            const int64_t width = columns - c < STRIP ? columns - c : STRIP;
            (some == 1 ? one : more)(words + r * step + 4 * c, step, width, table + ENTRY / GROUP * c, found);
            for (int i = 0; i < some; i++)
                for (int lane = 0; lane < LANES; lane++)
                    row[i][lane] += found[LANES * i + lane];
        }
        for (int i = 0; i < some; i++, r++)
            for (int lane = 0; lane < LANES; lane++) {
                if (numbers)
                    total[lane] += (wide)row[i][lane] * numbers[lane * rows + r];
                else
                    sums[lane * rows + r] = reduced(row[i][lane]);
            }
    }
    if (numbers)
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] = reduced(total[lane]);
}
