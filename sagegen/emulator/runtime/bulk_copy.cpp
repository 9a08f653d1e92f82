// Bulk copies. Those into shared memory land with their mbarrier's phase (mbarrier.cpp). Those out of it read shared
// memory at the wait that guarantees that they have, and reach global memory at the wait that guarantees that.
#include <cstring>
#include <map>
#include <vector>

#include "engine.hpp"
#include "mbarrier.hpp"

#include "emulator.cuh"
#include "emulator_hopper.cuh"

namespace emulator {

namespace {

struct BulkStore {
    uint32_t source;
    uint8_t* destination;
    uint32_t bytes;
    Site site;
    std::vector<uint8_t> taken;  // what was read
};

// One thread's stores out of shared memory.
struct Stores {
    int agent = 0;
    std::vector<BulkStore> open_group;
    std::vector<std::vector<BulkStore>> groups;  // committed, oldest first
    size_t groups_read = 0;                      // of those: have read their sources
    uint32_t ticket = 0;                         // groups committed
    uint32_t groups_done = 0;
};

class BulkStores {
   public:
    explicit BulkStores(Engine& engine) : engine_(engine) { engine.at_block_end.push_back(check_end); }

    void start(BulkStore store);
    void commit();
    void wait(size_t pending, bool only_reads);

   private:
    static void check_end(Engine& engine);
    Stores& own();
    void read(std::vector<BulkStore>& group);
    static void write(const std::vector<BulkStore>& group);

    Engine& engine_;
    std::map<int, Stores> stores_;  // by thread
};

Stores& BulkStores::own() {
    Stores& stores = stores_[engine_.current().thread];
    if (!stores.agent) stores.agent = engine_.add_agent("a bulk store");
    return stores;
}

void BulkStores::start(BulkStore store) {
    Stores& stores = own();
    Agent& agent = engine_.agent(stores.agent);
    agent.started = stores.ticket + 1;  // ends with its group
    for (uint32_t done = 0; done < store.bytes; done += GRANULE) {
        engine_.access_async(stores.agent, agent.started, engine_.current().clock, store.source + done, GRANULE, false,
                             store.site);
        engine_.access_global(reinterpret_cast<uintptr_t>(store.destination) + done, GRANULE, true, store.site);
    }
    memset(store.destination, POISON, store.bytes);
    stores.open_group.push_back(std::move(store));
}

void BulkStores::commit() {
    Stores& stores = own();
    stores.groups.push_back(std::move(stores.open_group));
    stores.open_group.clear();
    ++stores.ticket;
}

void BulkStores::read(std::vector<BulkStore>& group) {
    for (BulkStore& store : group) {
        const uint8_t* const source = engine_.shared_pointer(store.source);
        store.taken.assign(source, source + store.bytes);
    }
}

void BulkStores::write(const std::vector<BulkStore>& group) {
    for (const BulkStore& store : group) memcpy(store.destination, store.taken.data(), store.bytes);
}

void BulkStores::wait(size_t pending, bool only_reads) {
    Stores& stores = own();
    for (; stores.groups.size() > pending + stores.groups_read; ++stores.groups_read) {
        read(stores.groups[stores.groups_read]);
    }
    Agent& agent = engine_.agent(stores.agent);
    agent.finished = stores.groups_done + static_cast<uint32_t>(stores.groups_read);
    engine_.current().clock[stores.agent] = agent.finished;
    if (only_reads) return;
    while (stores.groups.size() > pending) {
        write(stores.groups.front());
        stores.groups.erase(stores.groups.begin());
        --stores.groups_read;
        ++stores.groups_done;
    }
}

void BulkStores::check_end(Engine& engine) {
    for (auto& entry : engine.state<BulkStores>().stores_) {
        Stores& stores = entry.second;
        const BulkStore* unread = stores.open_group.empty() ? nullptr : &stores.open_group[0];
        for (size_t i = stores.groups_read; i < stores.groups.size() && !unread; ++i) {
            if (!stores.groups[i].empty()) unread = &stores.groups[i][0];
        }
        if (unread) {
            engine.fail("in_flight", entry.first, unread->site,
                        describe_thread(entry.first) + " has returned while the bulk store started at " +
                            place(unread->site) + " still reads the block's shared memory; no bulk_wait_read has " +
                            "covered it");
        }
        for (const auto& group : stores.groups) write(group);
    }
}

void check_alignment(uintptr_t shared, uintptr_t global, uint32_t bytes, Site site) {
    if (bytes && !(shared % GRANULE) && !(global % GRANULE) && !(bytes % GRANULE)) return;
    engine().fail("misaligned", site,
                  describe_thread(engine().current().thread) + " starts a bulk copy of " + std::to_string(bytes) +
                      " bytes between shared address " + std::to_string(shared) + " and global memory at " +
                      std::to_string(global % GRANULE) + " modulo 16, at " + place(site) +
                      ": addresses and sizes must be multiples of 16");
}

}  // namespace

void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, int line) {
    const Site site = EMULATOR_SITE(line);
    Mbarriers& mbarriers = engine().state<Mbarriers>();
    const uint32_t destination = engine().shared_offset(shared, site);
    check_alignment(destination, reinterpret_cast<uintptr_t>(global), bytes, site);
    mbarriers.load(mbarriers.find(barrier, site), {destination, static_cast<const uint8_t*>(global), bytes, site});
}

void bulk_store(void* global, const void* shared, uint32_t bytes, int line) {
    const Site site = EMULATOR_SITE(line);
    const uint32_t source = engine().shared_offset(shared, site);
    check_alignment(source, reinterpret_cast<uintptr_t>(global), bytes, site);
    engine().state<BulkStores>().start({source, static_cast<uint8_t*>(global), bytes, site, {}});
}

void bulk_commit() { engine().state<BulkStores>().commit(); }

void bulk_wait(int pending, bool only_reads, int) {
    engine().state<BulkStores>().wait(static_cast<size_t>(pending), only_reads);
}

}  // namespace emulator
