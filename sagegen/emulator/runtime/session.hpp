// The memory of one call, as all blocks of its launches see it.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "interface.hpp"

namespace emulator {

// Who wrote a 4-byte word last.
struct Word {
    std::atomic<uint32_t> writer{0};  // 0: nobody; else launch number and block
    std::atomic<uint32_t> reader{0};  // the same of who read it last
    uint16_t thread = 0;
    uintptr_t address = 0;            // of the store in the kernel
};

// A buffer, and for outputs and scratch the record of its writers.
struct Memory {
    Buffer buffer;
    std::string name;
    uint64_t bytes = 0;  // from the first to past the last element
    std::vector<Word> words;

    // Whether all bytes of an access belong to elements.
    bool holds(uintptr_t address, int size) const;

   private:
    bool is_element(uint64_t element) const;
};

struct Session {
    std::vector<std::unique_ptr<Memory>> memories;
    uint32_t launches = 0;  // started so far; stamps of the running one are `launches`
    std::mutex mutex;
    std::atomic<bool> is_stopped{false};  // somebody wants all launches to end
    std::map<std::tuple<uintptr_t, int, int, bool>, BankCount> banks;  // by address, line, bytes, direction

    // The memory whose elements are at [address, address + bytes), or null. Ranges of strided views may overlap.
    Memory* find(uintptr_t address, int bytes) const;
    // In words: where an address lies that no buffer holds.
    std::string describe(uintptr_t address) const;
};

}  // namespace emulator
