// The library's own place in memory, from the dynamic linker.
#include "module.hpp"

#include <link.h>

#include "interface.hpp"

extern thread_local uint8_t shared_memory[];  // defined by the rendered text (host/thread.cuh)

namespace emulator {

namespace {

struct Found {
    Module module;
    uintptr_t tls = 0;
    size_t tls_bytes = 0;
};

int visit(dl_phdr_info* info, size_t, void* result) {
    Found found;
    found.module.base = info->dlpi_addr;
    found.module.begin = UINTPTR_MAX;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr) & header = info->dlpi_phdr[i];
        const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
        if (header.p_type == PT_LOAD) {
            if (begin < found.module.begin) found.module.begin = begin;
            if (begin + header.p_memsz > found.module.end) found.module.end = begin + header.p_memsz;
        } else if (header.p_type == PT_TLS) {
            found.tls = reinterpret_cast<uintptr_t>(info->dlpi_tls_data);
            found.tls_bytes = header.p_memsz;
        }
    }
    const uintptr_t here = reinterpret_cast<uintptr_t>(&emulator_run);
    if (here < found.module.begin || here >= found.module.end) return 0;
    *static_cast<Found*>(result) = found;
    return 1;
}

Found find() {
    Found found;
    dl_iterate_phdr(visit, &found);
    return found;
}

}  // namespace

const Module& module_of_kernel() {
    static const Module module = find().module;
    return module;
}

SharedRange shared_range_of_this_thread() {
    volatile uint8_t* const dynamic = shared_memory;  // the first touch makes this thread's copy
    dynamic[0] = 0;
    const Found found = find();
    return {found.tls, found.tls_bytes, reinterpret_cast<uintptr_t>(dynamic)};
}

}  // namespace emulator
