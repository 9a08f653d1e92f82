// Shared-memory wavefronts: 32 banks of 4 bytes; a warp's access takes one wavefront per distinct word of its fullest bank.
#include <algorithm>
#include <cstring>

#include "engine.hpp"
#include "module.hpp"
#include "session.hpp"

namespace emulator {

namespace {

constexpr uint32_t ABSENT = UINT32_MAX;
constexpr int BANKS = 32;

// Most distinct 4-byte words in one bank over the lanes [first, last).
int wavefronts_of(const uint32_t* offsets, int first, int last, int bytes) {
    uint32_t words[WARP];
    int most = 0;
    for (int bank = 0; bank < BANKS; ++bank) {
        int count = 0;
        for (int lane = first; lane < last; ++lane) {
            if (offsets[lane] == ABSENT) continue;
            for (uint32_t word = offsets[lane] / 4; word * 4 < offsets[lane] + bytes; ++word) {
                if (word % BANKS != static_cast<uint32_t>(bank)) continue;
                if (std::find(words, words + count, word) == words + count) words[count++] = word;
            }
        }
        most = std::max(most, count);
    }
    return most;
}

}  // namespace

void Engine::count_warp(const uint32_t* offsets, int lanes, int bytes, bool is_write, Site site) {
    const int together = std::max(1, std::min(WARP, WARP * 4 / bytes));  // lanes that one wavefront can serve
    uint64_t wavefronts = 0;
    uint64_t ideal = 0;
    for (int first = 0; first < lanes; first += together) {
        const int needed = wavefronts_of(offsets, first, std::min(lanes, first + together), bytes);
        wavefronts += needed;
        ideal += needed > 0;
    }
    const std::lock_guard<std::mutex> lock(session_.mutex);
    const uintptr_t address = site.address - module_of_kernel().base;
    BankCount& count = session_.banks[{address, site.line, bytes, is_write}];
    count.site = address;
    count.line = site.line;
    count.bytes = bytes;
    count.is_write = is_write;
    ++count.accesses;
    count.wavefronts += wavefronts;
    count.ideal += ideal;
}

void Engine::count_lane(uint32_t offset, int bytes, bool is_write, Site site) {
    Lanes& lanes = lanes_[running_ / WARP][{site.address, bytes * 2 + is_write}];
    lanes.site = site;
    lanes.bytes = bytes;
    lanes.is_write = is_write;
    lanes.visits.resize(WARP);
    const uint32_t turn = lanes.visits[running_ % WARP]++;
    if (turn >= lanes.turns.size()) lanes.turns.emplace_back(WARP, ABSENT);
    lanes.turns[turn][running_ % WARP] = offset;
}

// The lanes of a warp that were at a site equally often since the last collective were there together.
void Engine::flush_lanes(int warp) {
    for (auto& entry : lanes_[warp]) {
        Lanes& lanes = entry.second;
        for (const std::vector<uint32_t>& turn : lanes.turns) {
            count_warp(turn.data(), WARP, lanes.bytes, lanes.is_write, lanes.site);
        }
    }
    lanes_[warp].clear();
}

}  // namespace emulator
