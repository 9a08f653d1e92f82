// mbarriers of a block, and the bulk copies that complete on them.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine.hpp"

namespace emulator {

// A bulk copy on its way into shared memory.
struct BulkLoad {
    uint32_t destination;
    const uint8_t* source;
    uint32_t bytes;
    Site site;
};

struct Mbarrier {
    int agent;                   // of its copies
    uint32_t arrivals;           // that complete a phase
    uint32_t missing;            // in the current phase
    uint32_t expected_bytes = 0;  // in the current phase, by expect_tx
    uint32_t bytes = 0;          // of the copies in flight
    uint32_t phase = 0;          // completed phases; the current one has parity phase % 2
    Clock arrived;               // joined clocks of the current phase's arrivals
    Clock completed;             // what the end of the last phase tells those that wait for it
    int owner;                   // who initialized it, and when
    uint32_t since;
    bool is_visible = false;     // to bulk copies
    std::vector<BulkLoad> loads;
    std::vector<std::pair<int, uint32_t>> waiting;  // threads and parities
    Site site;                   // of its initialization
};

class Mbarriers {
   public:
    explicit Mbarriers(Engine& engine);

    void init(const uint64_t* barrier, uint32_t arrivals, Site site);
    // Those that the running thread initialized become visible to bulk copies.
    void show();
    Mbarrier& find(const uint64_t* barrier, Site site);
    void arrive(Mbarrier& barrier, uint32_t bytes, Site site);
    bool ask(Mbarrier& barrier, uint32_t parity, Site site);
    void wait(Mbarrier& barrier, uint32_t parity, Site site);
    void load(Mbarrier& barrier, const BulkLoad& load);

   private:
    static bool land_late(Engine& engine);
    static void check_end(Engine& engine);
    bool test(Mbarrier& barrier, uint32_t parity);
    void land(Mbarrier& barrier);
    void complete(Mbarrier& barrier);
    void check_bytes(const Mbarrier& barrier, Site site);
    std::string describe(const Mbarrier& barrier, uint32_t offset, uint32_t parity) const;

    Engine& engine_;
    int objects_;                          // agent whom the barriers' own bytes belong to
    std::map<uint32_t, Mbarrier> barriers_;  // by shared address
    std::map<int, int> refused_;           // how often test_wait said no since it said yes, by thread
    std::list<std::string> texts_;         // what waiting threads are said to wait for
};

}  // namespace emulator
