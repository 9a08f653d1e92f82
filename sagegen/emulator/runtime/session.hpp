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

// A buffer with the record of who wrote each of its 4-byte words: 0 nobody, else launch number and block.
struct Memory {
    Buffer buffer;
    std::string name;
    uint64_t bytes = 0;  // from the first to past the last element
    std::vector<std::atomic<uint32_t>> writers;

    // Whether all bytes of an access belong to elements.
    bool holds(uintptr_t address, int size) const;

   private:
    bool is_element(uint64_t element) const;
};

struct Session {
    std::vector<std::unique_ptr<Memory>> memories;
    uint32_t launches = 0;  // started so far; stamps of the running one are `launches`
    std::mutex mutex;
    std::map<std::tuple<uintptr_t, int, int, bool>, BankCount> banks;  // by address, line, bytes, direction

    // The memory whose range holds `address`, or null.
    Memory* find(uintptr_t address) const;
    // In words: where an address lies that no buffer holds.
    std::string describe(uintptr_t address) const;
};

}  // namespace emulator
