// SPDX-License-Identifier: Apache-2.0
// Marks functions of the CPU ops that benefit from AVX2.
#pragma once

// Compiled with and without AVX2; the version is selected at run time based on the CPU's
// instruction set. AVX2 is twice as fast (AMD EPYC, gcc 12).
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__)
#define KV_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define KV_CLONES
#endif
