// mbarriers: phases of arrivals and bytes (PTX ISA, "mbarrier"). A copy that completes on one lands when a thread waits
// for its phase, every arrival is in, and no thread can go on otherwise: as late as the program allows.
#include "mbarrier.hpp"

#include <cstring>

#include "emulator.cuh"
#include "emulator_hopper.cuh"

namespace emulator {

namespace {

constexpr uint32_t NEVER = UINT32_MAX;     // ticket of an operation without end
constexpr uint32_t MAX_COUNT = (1 << 20) - 1;  // of arrivals, and of bytes
constexpr int PATIENCE = 1000;             // a loop of this many test_waits is a wait

std::string count_text(uint32_t count, const char* what) {
    return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

}  // namespace

Mbarriers::Mbarriers(Engine& engine) : engine_(engine), objects_(engine.add_agent("the mbarrier")) {
    engine.late_progress.push_back(land_late);
    engine.at_block_end.push_back(check_end);
}

void Mbarriers::init(const uint64_t* barrier, uint32_t arrivals, Site site) {
    const uint32_t offset = engine_.shared_offset(barrier, site);
    const Fiber& own = engine_.current();
    if (arrivals < 1 || arrivals > MAX_COUNT) {
        engine_.fail("bad_barrier", site, "an mbarrier cannot have " + count_text(arrivals, "arrival"));
    }
    if (barriers_.count(offset)) {
        engine_.fail("bad_barrier", site,
                     "the mbarrier at shared address " + std::to_string(offset) + " was initialized before, at " +
                         place(barriers_.at(offset).site));
    }
    engine_.access_async(objects_, NEVER, own.clock, offset, 8, true, site);
    Mbarrier& made = barriers_[offset];
    made.agent = engine_.add_agent("a bulk copy");
    made.arrivals = made.missing = arrivals;
    made.owner = own.thread;
    made.since = own.clock[own.thread];
    made.site = site;
}

void Mbarriers::show() {
    for (auto& entry : barriers_) {
        if (entry.second.owner == engine_.current().thread) entry.second.is_visible = true;
    }
}

Mbarrier& Mbarriers::find(const uint64_t* barrier, Site site) {
    const uint32_t offset = engine_.shared_offset(barrier, site);
    const auto found = barriers_.find(offset);
    if (found == barriers_.end()) {
        engine_.fail("bad_barrier", site, "no mbarrier was initialized at shared address " + std::to_string(offset));
    }
    Mbarrier& own = found->second;
    if (engine_.current().clock[own.owner] < own.since && engine_.current().thread != own.owner) {
        engine_.fail("race", site,
                     describe_thread(engine_.current().thread) + " uses at " + place(site) + " the mbarrier that " +
                         describe_thread(own.owner) + " initializes at " + place(own.site) +
                         "; no barrier orders the two");
    }
    return own;
}

// More bytes on their way than the phase waits for, though nobody can expect more of them any longer.
void Mbarriers::check_bytes(const Mbarrier& barrier, Site site) {
    if (barrier.missing || barrier.bytes <= barrier.expected_bytes) return;
    engine_.fail("bad_barrier", site,
                 "bulk copies of " + std::to_string(barrier.bytes) + " bytes are to complete a phase that expects " +
                     std::to_string(barrier.expected_bytes) + ", of the mbarrier initialized at " +
                     place(barrier.site));
}

void Mbarriers::arrive(Mbarrier& barrier, uint32_t bytes, Site site) {
    if (barrier.missing == 0) {
        engine_.fail("bad_barrier", site,
                     describe_thread(engine_.current().thread) + " arrives at " + place(site) +
                         " in a phase whose " + count_text(barrier.arrivals, "arrival") +
                         " have all come and whose bytes may still be in flight; it has not waited for its end");
    }
    barrier.expected_bytes += bytes;
    if (barrier.expected_bytes > MAX_COUNT) {
        engine_.fail("bad_barrier", site, std::to_string(barrier.expected_bytes) + " bytes are too many for one phase");
    }
    engine_.release(barrier.arrived);
    --barrier.missing;
    check_bytes(barrier, site);
    if (barrier.missing == 0 && barrier.expected_bytes == 0) complete(barrier);
}

void Mbarriers::complete(Mbarrier& barrier) {
    Agent& copies = engine_.agent(barrier.agent);
    copies.finished = copies.started;
    barrier.completed = std::move(barrier.arrived);
    if (barrier.completed.size() <= static_cast<size_t>(barrier.agent)) barrier.completed.resize(barrier.agent + 1);
    barrier.completed[barrier.agent] = copies.finished;
    barrier.arrived.clear();
    barrier.missing = barrier.arrivals;
    barrier.expected_bytes = barrier.bytes = 0;
    ++barrier.phase;
    for (const auto& waiting : barrier.waiting) engine_.wake(waiting.first);
    barrier.waiting.clear();
}

bool Mbarriers::test(Mbarrier& barrier, uint32_t parity) {
    if (barrier.phase % 2 == (parity & 1)) return false;
    engine_.acquire(barrier.completed);
    return true;
}

// test_wait: a thread that goes on asking waits in the end, or nothing that it asks for would ever happen.
bool Mbarriers::ask(Mbarrier& barrier, uint32_t parity, Site site) {
    int& refused = refused_[engine_.current().thread];
    if (!test(barrier, parity)) {
        if (++refused < PATIENCE) return false;
        wait(barrier, parity, site);
    }
    refused = 0;
    return true;
}

void Mbarriers::wait(Mbarrier& barrier, uint32_t parity, Site site) {
    while (!test(barrier, parity)) {
        barrier.waiting.push_back({engine_.current().thread, parity & 1});
        engine_.wait("mbarrier_wait", site);
    }
}

void Mbarriers::load(Mbarrier& barrier, const BulkLoad& load) {
    if (!barrier.is_visible) {
        engine_.fail("proxy", load.site,
                     "the bulk copy at " + place(load.site) + " completes on the mbarrier initialized at " +
                         place(barrier.site) + " without mbarrier_init_fence after that");
    }
    const uint32_t ticket = ++engine_.agent(barrier.agent).started;
    for (uint32_t done = 0; done < load.bytes; done += GRANULE) {
        const uint16_t known =
            engine_.check_copy_source(reinterpret_cast<uintptr_t>(load.source) + done, GRANULE, load.site);
        engine_.access_async(barrier.agent, ticket, engine_.current().clock, load.destination + done, GRANULE, true,
                             load.site, known);
    }
    barrier.bytes += load.bytes;
    barrier.loads.push_back(load);
    check_bytes(barrier, load.site);
}

void Mbarriers::land(Mbarrier& barrier) {
    for (const BulkLoad& load : barrier.loads) {
        memcpy(engine_.shared_pointer(load.destination), load.source, load.bytes);
    }
    barrier.loads.clear();
    complete(barrier);
}

std::string Mbarriers::describe(const Mbarrier& barrier, uint32_t offset, uint32_t parity) const {
    return "mbarrier_wait for parity " + std::to_string(parity) + " (shared address " + std::to_string(offset) + ": " +
           count_text(barrier.phase, "phase") + " done; the next lacks " + std::to_string(barrier.missing) + " of " +
           count_text(barrier.arrivals, "arrival") + " and " +
           count_text(barrier.expected_bytes - barrier.bytes, "byte") + ")";
}

bool Mbarriers::land_late(Engine& engine) {
    Mbarriers& own = engine.state<Mbarriers>();
    for (auto& entry : own.barriers_) {
        Mbarrier& barrier = entry.second;
        if (barrier.waiting.empty() || barrier.missing || barrier.bytes != barrier.expected_bytes) continue;
        own.land(barrier);
        return true;
    }
    for (auto& entry : own.barriers_) {  // the deadlock's message should say more
        for (const auto& waiting : entry.second.waiting) {
            own.texts_.push_back(own.describe(entry.second, entry.first, waiting.second));
            engine.fiber(waiting.first).waits_for = own.texts_.back().c_str();
        }
    }
    return false;
}

void Mbarriers::check_end(Engine& engine) {
    for (const auto& entry : engine.state<Mbarriers>().barriers_) {
        if (entry.second.loads.empty()) continue;
        const Site site = entry.second.loads[0].site;
        engine.fail("in_flight", 0, site,
                    "the block has ended while the bulk copy started at " + place(site) +
                        " is on its way into its shared memory; no wait has covered it");
    }
}

// ---- what the host layer calls ----

namespace {

Mbarriers& mbarriers() { return engine().state<Mbarriers>(); }

}  // namespace

void mbarrier_init(uint64_t* barrier, uint32_t arrivals, int line) {
    mbarriers().init(barrier, arrivals, EMULATOR_SITE(line));
}

void mbarrier_init_fence() { mbarriers().show(); }

void mbarrier_arrive(uint64_t* barrier, uint32_t expected_bytes, int line) {
    const Site site = EMULATOR_SITE(line);
    mbarriers().arrive(mbarriers().find(barrier, site), expected_bytes, site);
}

bool mbarrier_test_wait(uint64_t* barrier, uint32_t parity, int line) {
    const Site site = EMULATOR_SITE(line);
    return mbarriers().ask(mbarriers().find(barrier, site), parity, site);
}

void mbarrier_wait(uint64_t* barrier, uint32_t parity, int line) {
    const Site site = EMULATOR_SITE(line);
    mbarriers().wait(mbarriers().find(barrier, site), parity, site);
}

void fence_proxy_async() {
    engine().fence_proxy();
    mbarriers().show();
}

}  // namespace emulator
