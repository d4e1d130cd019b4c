/* XXH3-64 of memory, with the widest vector registers of the CPU.

   xxhash.h compiles its loops for one instruction set. On x86-64, that is SSE2, because the library must run on every
   CPU. Here, its loops for AVX2 and AVX-512 are compiled, too, and chosen at run time. All compute the same digest. On
   other architectures, the compiler's target decides: NEON on AArch64. */

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && !defined(XXH_VECTOR)
#include <immintrin.h>
#define XXH_DISPATCH_AVX2 1
#define XXH_DISPATCH_AVX512 1
#define XXH_TARGET_AVX2 __attribute__((target("avx2")))
#define XXH_TARGET_AVX512 __attribute__((target("avx512f")))
#define XXH_ACC_ALIGN 64 /* required by 512-bit registers */
#endif

#define XXH_INLINE_ALL
#include "xxhash.h"
#include "hash.h"

#ifdef XXH_DISPATCH_AVX2
#define LONG_INPUT(name, target)                                                                                       \
    target static uint64_t name(const void *data, size_t nbytes) {                                                     \
        return XXH3_hashLong_64b_internal(data, nbytes, XXH3_kSecret, sizeof XXH3_kSecret, XXH3_accumulate_##name,     \
                                          XXH3_scrambleAcc_##name);                                                    \
    }

LONG_INPUT(avx2, XXH_TARGET_AVX2)
LONG_INPUT(avx512, XXH_TARGET_AVX512)
#endif

/* If `widest` is 0, only instructions that every CPU of the architecture has are used; on x86-64, 1 allows AVX2, and 2
   also AVX-512. */
uint64_t reshard_hash(const void *data, int64_t nbytes, int widest) {
#ifdef XXH_DISPATCH_AVX2
    if (nbytes > XXH3_MIDSIZE_MAX) { /* shorter input does not use these loops */
        if (widest >= 2 && __builtin_cpu_supports("avx512f"))
            return avx512(data, (size_t)nbytes);
        if (widest >= 1 && __builtin_cpu_supports("avx2"))
            return avx2(data, (size_t)nbytes);
    }
#else
    (void)widest;
#endif
    return XXH3_64bits(data, (size_t)nbytes);
}
