/* The sum over a tile of words times the numbers of their places, modulo P = 2^48 - 59, in integers.

   A tile has rows of signed 32-bit words. Each column has a number in each of two lanes, and so has each row:

       sums[lane] = sum over r, c of  numbers[lane][r] * words[r][c] * column number[lane][c]   modulo P

   Why nothing overflows. A column's number is low + 2^24 high with both digits in (-2^23, 2^23]
   (`table` in __init__.py), so that a product of a word, in [-2^31, 2^31), and a digit lies in [-2^54, 2^54), where
   -2^54 is reached and 2^54 is not. A strip has at most 512 columns, so each sum of products over any of them lies in
   [-2^63, 2^63): a signed integer of 64 bits. Two such sums, low and high, are then one number modulo P with
   2^48 = 59: see `joined`, which is below 2^50 in absolute value. At most 2^11 strips a row (2^20 columns) add up to
   less than 2^61, times a row's number below 2^48 to less than 2^109, and over at most 2^17 rows to less than 2^126.

   The caller keeps to 2^20 columns and 2^17 rows. Words need not be aligned. */

#include <stdint.h>
#include <string.h>

#ifndef __SIZEOF_INT128__
#error "integers of 128 bits are needed, as gcc and clang have them on 64-bit processors"
#endif

#define P 281474976710597LL
#define LANES 2
#define DIGITS 4  /* low and high of lane 0, low and high of lane 1 */
#define GROUP 8   /* columns whose digits lie together: table[column / 8][digit][column % 8] */
#define STRIP 512 /* columns */
#define MOST 2    /* rows at a time */

typedef __int128 wide;

/* sums[row][digit] over a strip of 1 or of MOST rows. `step` is the bytes from row to row. */
typedef void strip_sums(const char *words, int64_t step, int64_t columns, const int32_t *table, int64_t *sums);

static void portable(const char *words, int64_t step, int64_t columns, const int32_t *table, int64_t *sums) {
    int64_t found[DIGITS][GROUP] = {{0}};
    (void)step;
    for (int64_t c = 0; c < columns; c += GROUP, table += DIGITS * GROUP) {
        int32_t word[GROUP] = {0};
        memcpy(word, words + 4 * c, 4 * (columns - c < GROUP ? columns - c : GROUP));
        for (int d = 0; d < DIGITS; d++)
            for (int j = 0; j < GROUP; j++)
                found[d][j] += (int64_t)word[j] * table[GROUP * d + j];
    }
    for (int d = 0; d < DIGITS; d++) {
        sums[d] = 0;
        for (int j = 0; j < GROUP; j++)
            sums[d] += found[d][j];
    }
}

#ifdef __x86_64__
#include <immintrin.h>

/* One vpmuldq multiplies the even ones of 8 words, and one the odd ones when they were shifted down. */
__attribute__((target("avx2"), always_inline)) static inline void avx2(const char *words, int64_t step,
                                                                       int64_t columns, const int32_t *table,
                                                                       int64_t *sums, const int rows) {
    __m256i found[MOST][DIGITS], even[MOST], odd[MOST];
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < DIGITS; d++)
            found[r][d] = _mm256_setzero_si256();
    for (int64_t c = 0; c < columns; c += GROUP, table += DIGITS * GROUP) {
        if (c + GROUP <= columns) {
            for (int r = 0; r < rows; r++)
                even[r] = _mm256_loadu_si256((const __m256i *)(words + r * step + 4 * c));
        } else { /* what lies behind the row is not read */
            const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(columns - c)), place);
            for (int r = 0; r < rows; r++)
                even[r] = _mm256_maskload_epi32((const int *)(words + r * step + 4 * c), inside);
        }
        if (c % 16 == 0) /* a line of the cache of what comes in two turns; past the end that does nothing */
            for (int r = 0; r < rows; r++)
                _mm_prefetch((const char *)((uintptr_t)words + (r + 2 * MOST) * step + 4 * c), _MM_HINT_T0);
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
    for (int r = 0; r < rows; r++) { /* the four sums of four */
        const __m256i *f = found[r];
        const __m256i a = _mm256_add_epi64(_mm256_unpacklo_epi64(f[0], f[1]), _mm256_unpackhi_epi64(f[0], f[1]));
        const __m256i b = _mm256_add_epi64(_mm256_unpacklo_epi64(f[2], f[3]), _mm256_unpackhi_epi64(f[2], f[3]));
        const __m256i all = _mm256_add_epi64(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
        _mm256_storeu_si256((__m256i *)(sums + DIGITS * r), all);
    }
}

__attribute__((target("avx2"))) static void avx2_one(const char *words, int64_t step, int64_t columns,
                                                     const int32_t *table, int64_t *sums) {
    avx2(words, step, columns, table, sums, 1);
}

__attribute__((target("avx2"))) static void avx2_most(const char *words, int64_t step, int64_t columns,
                                                      const int32_t *table, int64_t *sums) {
    avx2(words, step, columns, table, sums, MOST);
}
#endif

/* low + 2^24 high modulo P, not reduced: 2^48 = 59, and right shifts of negative integers round down. */
static inline int64_t joined(int64_t low, int64_t high) {
    return (low & ((1LL << 48) - 1)) + 59 * (low >> 48) + ((high & ((1LL << 24) - 1)) << 24) + 59 * (high >> 24);
}

static inline int64_t reduced(wide value) {
    const int64_t rest = (int64_t)(value % P);
    return rest < 0 ? rest + P : rest;
}

/* With `numbers`, of (LANES, rows) in [0, P), `sums` of (LANES) gets the sum over the tile; without, `sums` of
   (LANES, rows) gets that of each row. `step` is the bytes from row to row. What processors differ in is left out with
   `plain`. */
void reshard_fold(const char *words, int64_t rows, int64_t step, int64_t columns, const int32_t *table,
                  const int64_t *numbers, int64_t *sums, int plain) {
    strip_sums *one = portable, *most = 0;
    wide total[LANES] = {0};
#ifdef __x86_64__
    if (!plain && __builtin_cpu_supports("avx2")) {
        one = avx2_one;
        most = avx2_most;
    }
#else
    (void)plain;
#endif
    for (int64_t r = 0; r < rows;) {
        const int height = most && r + MOST <= rows ? MOST : 1;
        int64_t found[MOST * DIGITS], row[MOST][LANES] = {{0}};
        for (int64_t c = 0; c < columns; c += STRIP) {
            const int64_t width = columns - c < STRIP ? columns - c : STRIP;
            (height == MOST ? most : one)(words + r * step + 4 * c, step, width, table + DIGITS * c, found);
            for (int i = 0; i < height; i++)
                for (int lane = 0; lane < LANES; lane++)
                    row[i][lane] += joined(found[DIGITS * i + 2 * lane], found[DIGITS * i + 2 * lane + 1]);
        }
        for (int i = 0; i < height; i++, r++)
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
