// SPDX-License-Identifier: Apache-2.0
// Compiles the project's .cu sources as C++17 and runs their kernels on the CPU, so that CI without
// a GPU executes the shipped code. scheduler.h describes the method and its cost.
//
// Clusters must extend along x, with whole warps per block and only dynamic shared memory.
//
// Not supported: tensor maps, cooperative groups, textures, launches from kernels, __constant__
// memory, __noinline__ (libstdc++ uses this word), ThreadSanitizer, and spinning on a value that
// another thread or block writes later, because that thread never runs. A kernel must not wait
// inside a catch block.
#pragma once

#include "emul/alignment.h"
#include "emul/async_copy.h"
#include "emul/atomics.h"
#include "emul/bulk_copy.h"
#include "emul/cluster.h"
#include "emul/intrinsics.h"
#include "emul/launch.h"
#include "emul/runtime.h"
#include "emul/sync.h"
#include "emul/types.h"
