// Atomic operations: blocks may do them to the same word, in any order.
#include <cstring>

#include "engine.hpp"

#include "emulator.cuh"
#include "emulator_hopper.cuh"

namespace emulator {

namespace {

void check(uint32_t* address, Site site) {
    Engine& own = engine();
    if (own.is_shared(reinterpret_cast<uintptr_t>(address))) {
        const uint32_t offset = own.shared_offset(address, site);
        own.access_shared(own.current().thread, offset, 4, false, site, true);
        own.access_shared(own.current().thread, offset, 4, true, site, true);
    } else {
        own.access_global_atomic(reinterpret_cast<uintptr_t>(address), site);
    }
}

}  // namespace

uint32_t atomic_add(uint32_t* address, uint32_t value, int line) {
    check(address, EMULATOR_SITE(line));
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

void atomic_max(uint32_t* address, uint32_t value, int line) {
    check(address, EMULATOR_SITE(line));
    uint32_t before = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (before < value && !__atomic_compare_exchange_n(address, &before, value, true, __ATOMIC_RELAXED,
                                                          __ATOMIC_RELAXED)) {
    }
}

}  // namespace emulator
