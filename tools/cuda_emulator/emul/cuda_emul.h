// SPDX-License-Identifier: Apache-2.0
// An emulator that compiles the project's .cu sources as C++17 and runs their kernels on the CPU,
// so that CI machines without a GPU execute the code that is shipped. scheduler.h describes the
// method and its cost.
//
// Clusters must extend along x, consist of thread blocks with whole warps, and use only dynamic
// shared memory.
//
// Not supported: tensor maps, cooperative groups, textures, launches from kernels, __constant__
// memory, __noinline__ (which libstdc++ uses as an identifier), ThreadSanitizer, and spinning on a
// value that another thread or block writes later (that thread would never run). A kernel must not
// wait inside a catch block.
#pragma once

#include "emul/alignment.h"
#include "emul/atomics.h"
#include "emul/cluster.h"
#include "emul/intrinsics.h"
#include "emul/launch.h"
#include "emul/runtime.h"
#include "emul/sync.h"
#include "emul/types.h"
