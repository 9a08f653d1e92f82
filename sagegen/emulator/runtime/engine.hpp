// The engine: one operating system thread runs one block at a time, its threads as fibers.
//
// Every fiber has a vector clock. A barrier joins the clocks of those that it orders; two accesses to the same byte of
// which one is a write are a race unless the clocks order them. So a race is found in any schedule, not only in one
// where it does harm.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "interface.hpp"

namespace emulator {

constexpr int WARP = 32;
constexpr int MAX_THREADS = 1024;
constexpr int GRANULE = 16;            // bytes of shared memory that share a record of accesses
constexpr uint8_t POISON = 0x7f;       // NaN in e4m3, huge in every other type
constexpr int64_t MAX_STEPS = 1'000'000'000;  // of a thread between two collectives: seconds, where real ones take ms
constexpr int64_t MAX_BLOCK_STEPS = 20'000'000'000;  // of all threads of a block: minutes
constexpr int64_t STEPS_PER_LOOK = 4096;      // how often a thread looks whether it is to stop
constexpr int STACK_BYTES = 512 << 10;  // of a fiber; touched pages only take memory
constexpr int POISONED_STACK_BYTES = 16 << 10;  // where kernels keep their variables; NaN until they are set

// By thread; then whether the preceding launch has ended; then one entry for each asynchronous agent.
using Clock = std::vector<uint32_t>;

// A place in the kernel: the return address into it, and the rendered text's line when the wrapper knew it.
struct Site {
    uintptr_t address;
    int line;
};

// One access to a granule that later accesses may conflict with.
struct Access {
    uint32_t clock;
    uint16_t thread;    // or agent
    uint16_t mask;      // bytes of the granule
    Site site;
    bool is_write;
    bool is_async;      // made by the asynchronous proxy (bulk copies, wgmma)
    bool is_atomic;
};

// What accesses shared memory beside the threads and in its own time: an mbarrier's bulk copies, a warpgroup's wgmma.
// Its entry in a clock counts its operations; threads learn of their end where they wait for it.
struct Agent {
    const char* name;        // for messages
    uint32_t started = 0;
    uint32_t finished = 0;
};

// Registers that an asynchronous operation will write.
struct BusyRegisters {
    uintptr_t begin;
    uintptr_t end;
    Site site;
};

// What is known about 16 bytes of shared memory.
struct Granule {
    uint32_t generation = 0;  // of the block that wrote this record; an older one means untouched
    uint16_t written = 0;
    uint16_t pending = 0;     // destination of a cp.async in flight
    Site async_site = {};     // who started that
    std::vector<Access> accesses;
};

// A cp.async in flight.
struct Copy {
    uint32_t destination;
    const uint8_t* source;  // null: zeros
    uint16_t known;         // bytes of the source that somebody has written: padding may be copied, but not used
    Site site;
};

enum class State : uint8_t { ready, waiting, done };

struct Fiber {
    jmp_buf context;
    uint8_t* stack = nullptr;
    int thread = 0;
    State state = State::done;
    const char* waits_for = "";
    Site waits_at = {};
    Clock clock;
    std::vector<uint32_t> proxy_fences;       // own clock at each fence.proxy.async
    std::vector<BusyRegisters> busy;
    std::vector<Copy> open_group;
    std::vector<std::vector<Copy>> groups;    // committed, oldest first
};

// A rendezvous: how many have come, what they brought, and whom to wake.
struct Warp {
    int arrived = 0;
    const char* operation = "";
    Site site = {};
    void* arguments[WARP] = {};
};

struct Barrier {
    int arrived = 0;
    int expected = 0;
    Site site = {};
    Clock clock;                 // joined clocks of those that came
    std::vector<int> waiting;
};

struct Memory;
struct Session;

// Key of one access site's traffic.
struct BankSite {
    Site site;
    int bytes;
    bool is_write;
};

class Engine {
   public:
    Engine(Session& session, const Launch& launch);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Runs one block. False: `report` says what went wrong.
    bool run_block(int block);

    // ---- what wrappers and hooks call, on a fiber ----

    Fiber& current() { return fibers_[running_]; }
    int block() const { return block_; }
    int threads() const { return static_cast<int>(launch_.threads); }
    const Launch& launch() const { return launch_; }
    Session& session() { return session_; }

    // Ends the block with a report about `thread`.
    [[noreturn]] void fail(const char* kind, int thread, Site site, const std::string& message);
    [[noreturn]] void fail(const char* kind, Site site, const std::string& message);

    // Lets others run until `wake` is called for this fiber.
    void wait(const char* what, Site site);
    void wake(int thread);

    // All 32 lanes of a warp meet; the last one performs the operation with all arguments, by lane.
    void meet(const char* operation, Site site, void* argument, void (*perform)(Engine&, int first_thread, void* const*));
    void block_barrier(Site site);
    // Barrier `id` of `count` threads; those that only arrive do not wait.
    void named_barrier(int id, int count, bool waits, Site site);

    // Order of events: `release` publishes what this fiber did, `acquire` learns what others published.
    void release(Clock& into);
    void acquire(const Clock& from);
    int predecessor() const { return threads(); }  // its entry in a clock
    // A new agent's entry in clocks.
    int add_agent(const char* name);
    Agent& agent(int index) { return agents_[static_cast<size_t>(index - threads() - 1)]; }
    void fence_proxy();

    // ---- shared memory ----

    bool is_shared(uintptr_t address) const { return address - shared_base_ < shared_bytes_; }
    uint32_t shared_offset(const void* pointer, Site site);
    uint8_t* shared_pointer(uint32_t offset) const { return reinterpret_cast<uint8_t*>(shared_base_ + offset); }
    // Checks and records an access by `thread` to bytes [offset, offset + bytes), before it happens.
    void access_shared(int thread, uint32_t offset, int bytes, bool is_write, Site site, bool is_atomic = false);
    // The same for operation `ticket` of an agent, which may do it from now on until threads learn of the operation's
    // end. `since`: what is ordered before it. `known`: bytes of each granule that a write gives something.
    void access_async(int agent, uint32_t ticket, const Clock& since, uint32_t offset, int bytes, bool is_write,
                      Site site, uint16_t known = 0xffff);
    void check_shared_bounds(int thread, uint32_t offset, int bytes, Site site);
    // cp.async: marks bytes as the destination of one in flight, and poisons them.
    void begin_async_write(int thread, uint32_t offset, int bytes, Site site);
    // `known`: the bytes of each granule that hold something.
    void end_async_write(int thread, uint32_t offset, int bytes, uint16_t known, Site site);
    Granule& granule(uint32_t index);

    // ---- global memory ----

    void access_global(uintptr_t address, int bytes, bool is_write, Site site);
    void access_global_atomic(uintptr_t address, Site site);  // 4 bytes, by any block
    // Checks a source of an asynchronous copy; gives the bytes of it that somebody has written.
    uint16_t check_copy_source(uintptr_t address, int bytes, Site site);
    void access(uintptr_t address, int bytes, bool is_write, Site site);

    // A step of the running thread; ends threads that go on for ever without meeting others, and blocks that are to stop.
    void step(Site site);

    // ---- bank conflicts ----

    // One lane's access outside a collective; accesses of a warp are put together by how often a lane was there.
    void count_lane(uint32_t offset, int bytes, bool is_write, Site site);
    // A collective's access by all lanes.
    void count_warp(const uint32_t* offsets, int lanes, int bytes, bool is_write, Site site);

    // Progress that only waiting allows: called when no fiber can run. True: somebody was woken.
    std::vector<bool (*)(Engine&)> late_progress;
    // Called when all threads have returned; may fail.
    std::vector<void (*)(Engine&)> at_block_end;
    // State of a feature that the core does not know (mbarriers, wgmma), made when it is first asked for in a block.
    // Its constructor takes the engine and may add to the two above, which are the block's as well.
    template <typename State>
    State& state();

    Report report = {};
    Fiber& fiber(int thread) { return fibers_[thread]; }
    Warp& warp(int index) { return warps_[index]; }

   private:
    struct Lanes {
        Site site;
        int bytes;
        bool is_write;
        std::vector<std::vector<uint32_t>> turns;  // by how often a lane was there: its lanes' offsets
        std::vector<uint32_t> visits;              // by lane
    };

    void start_block(int block);
    void create_fiber(Fiber& fiber);
    static void fiber_main(unsigned low, unsigned high);
    void run_fiber();
    [[noreturn]] void switch_from(Fiber& from);
    void yield();
    [[noreturn]] void to_scheduler();
    void diagnose_deadlock();
    std::string waiting_places() const;
    // Who accesses shared memory: a thread or an agent, what is ordered before, and its own time.
    struct Actor {
        int index;
        const Clock& clock;
        uint32_t now;
        bool is_async;
        bool is_atomic;
    };
    std::string name_of(int thread_or_agent) const;
    void record_access(const Actor& actor, uint32_t offset, int bytes, bool is_write, uint16_t known, Site site);
    [[noreturn]] void fail_race(const Actor& actor, uint32_t offset, bool is_write, Site site, const Access& earlier);
    [[noreturn]] void fail_proxy(uint32_t offset, bool is_write, Site site, const Access& earlier);
    bool is_fenced(const Access& earlier, const Clock& clock) const;
    void check_conflicts(const Actor& actor, Granule& granule, uint32_t offset, uint16_t mask, bool is_write, Site site);
    void check_registers(uintptr_t address, int bytes, bool is_write, Site site);
    void flush_lanes(int warp);
    Memory& check_global(uintptr_t address, int bytes, bool is_write, Site site);
    void check_reader(Memory& memory, uint64_t word, Site site);
    void check_order(Memory& memory, uint64_t word, uint32_t writer, bool is_write, Site site);
    uint32_t stamp() const;

    Session& session_;
    Launch launch_;
    int block_ = 0;
    int running_ = 0;
    int live_ = 0;
    std::vector<Fiber> fibers_;
    std::vector<Warp> warps_;
    Barrier block_barrier_;
    std::map<int, Barrier> named_;
    std::vector<int> queue_;   // ring of ready threads
    size_t head_ = 0, count_ = 0;
    jmp_buf scheduler_;
    bool failed_ = false;
    int64_t steps_ = 0;        // of the running thread since it was switched to
    int64_t block_steps_ = 0;  // of all threads, as far as they looked
    uintptr_t shared_base_ = 0;
    size_t shared_bytes_ = 0;
    uintptr_t dynamic_base_ = 0;
    uint32_t generation_ = 0;
    std::vector<Granule> granules_;
    std::vector<Agent> agents_;
    std::map<const void*, std::shared_ptr<void>> states_;  // by type
    std::vector<std::map<std::pair<uintptr_t, int>, Lanes>> lanes_;  // by warp
};

template <typename State>
State& Engine::state() {
    static const char type = 0;
    std::shared_ptr<void>& slot = states_[&type];
    if (!slot) slot = std::make_shared<State>(*this);
    return *static_cast<State*>(slot.get());
}

// The engine of the running operating system thread; whether it has one.
Engine& engine();
bool has_engine();

// Text of a place for messages.
std::string place(Site site);
std::string describe_thread(int thread);

#define EMULATOR_SITE(line) (::emulator::Site{reinterpret_cast<uintptr_t>(__builtin_return_address(0)), (line)})

}  // namespace emulator
