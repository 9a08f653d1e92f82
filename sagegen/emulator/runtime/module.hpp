// Where the library of the emulated kernel lies in memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

struct Module {
    uintptr_t base = 0;   // load address: return addresses minus this are what addr2line takes
    uintptr_t begin = 0;  // of its image
    uintptr_t end = 0;
};

// The shared memory of the blocks that this operating system thread runs: all its thread-local variables.
struct SharedRange {
    uintptr_t base;
    size_t bytes;
    uintptr_t dynamic_base;  // of the extern array
};

const Module& module_of_kernel();
SharedRange shared_range_of_this_thread();

}  // namespace emulator
