// What Python calls (sagegen/emulator/library.py mirrors these structs with ctypes).
#pragma once

#include <cstdint>

namespace emulator {

// Memory that a call may touch: the elements of one strided tensor. Gaps between rows are nobody's.
struct Buffer {
    const char* name;
    uint64_t base;          // address of the first element
    int32_t item_bytes;     // of one element
    int32_t dims;           // at most 4
    int64_t sizes[4];       // elements
    int64_t strides[4];     // in elements
    int32_t is_writable;    // scratch and outputs; they hold nothing before they are written
};

// One launch of a 1-D grid.
struct Launch {
    const char* kernel;     // name for messages
    void* function;         // extern "C" void kernel(Params), Params by value
    uint32_t grid;
    uint32_t threads;       // of a block; a multiple of 32
    uint32_t smem_bytes;    // dynamic shared memory
    uint32_t params_bytes;
    const void* params;
    int32_t architecture;   // 89 for sm_89: which accumulators FP8 products have
    int32_t is_programmatic;  // starts before its predecessor has ended (programmatic dependent launch)
    int32_t workers;        // operating system threads that share the blocks
    int32_t count_banks;    // count shared-memory wavefronts by access site
};

// What went wrong first (lowest block). Places in the code are written {0x1234}: addresses relative to the library.
struct Report {
    char kind[32];          // race, deadlock, out_of_bounds, ...
    int32_t block;
    int32_t thread;
    int32_t line;           // of the rendered text where the wrapper was called; 0: look up `site`
    uint64_t site;          // return address, relative to the library
    char message[6144];
};

// Shared-memory traffic of one access site.
struct BankCount {
    uint64_t site;
    int32_t line;
    int32_t bytes;          // of one lane's access
    int32_t is_write;
    uint64_t accesses;      // warp-wide
    uint64_t wavefronts;    // that they took
    uint64_t ideal;         // that they would take without conflicts
};

}  // namespace emulator

extern "C" {

// A session knows the memory of one call, and what its launches have written so far. Null when memory is short.
void* emulator_open(const emulator::Buffer* buffers, int32_t count);
void emulator_close(void* session);

// Runs one launch to its end. 0: well; 1: `report` says what went wrong.
int32_t emulator_run(void* session, const emulator::Launch* launch, emulator::Report* report);

// From another thread: the running launch ends soon, and later ones at once.
void emulator_stop(void* session);

// Who wrote the word at `address` last: fills block, thread and site, and returns 1; 0 when nobody did.
int32_t emulator_writer_of(void* session, uint64_t address, emulator::Report* report);

// Copies up to `capacity` counts of the session's launches; returns how many there are.
int32_t emulator_bank_counts(void* session, emulator::BankCount* counts, int32_t capacity);
}
