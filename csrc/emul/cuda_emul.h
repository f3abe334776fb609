// Compiles the project's .cu sources as C++17 and runs their kernels on the CPU, so that CI without
// a GPU executes the code that ships. See scheduler.h for how, and for what it costs.
//
// Clusters have blocks along x, whole warps in a block and only dynamic shared memory.
//
// Not supported: tensor maps, cooperative groups, textures, launches from
// kernels, __constant__ memory, __noinline__ (libstdc++ uses that word),
// ThreadSanitizer, and spinning on a value that another thread or block writes later (it never gets
// to run). A kernel must not wait inside a catch block.
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
