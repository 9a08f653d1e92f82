// Every load and store of the kernel, checked before it happens: the compiler calls the __tsan hooks for each.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "engine.hpp"
#include "module.hpp"
#include "session.hpp"

namespace emulator {

namespace {

uint16_t mask_of(uint32_t first, uint32_t last) {  // bytes [first, last) of a granule
    return static_cast<uint16_t>((1u << last) - (1u << first));
}

// Calls `visit(granule index, mask)` for every granule that an access touches.
template <typename Visit>
void for_granules(uint32_t offset, int bytes, Visit visit) {
    const uint32_t end = offset + bytes;
    for (uint32_t index = offset / GRANULE; index * GRANULE < end; ++index) {
        const uint32_t first = std::max(offset, index * GRANULE) - index * GRANULE;
        const uint32_t last = std::min(end, (index + 1) * GRANULE) - index * GRANULE;
        visit(index, mask_of(first, last));
    }
}

std::string bytes_text(int bytes) { return std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes"); }

constexpr uint32_t ANY_BLOCK = 0xffffff;  // stamp of words that blocks change atomically

const char* action(bool is_write) { return is_write ? "writes" : "reads"; }

}  // namespace

// ---- shared memory ----

Granule& Engine::granule(uint32_t index) {
    Granule& granule = granules_[index];
    if (granule.generation != generation_) {
        granule.generation = generation_;
        granule.written = granule.pending = 0;
        granule.accesses.clear();
    }
    return granule;
}

uint32_t Engine::shared_offset(const void* pointer, Site site) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (!is_shared(address)) fail("out_of_bounds", site, "a shared address was asked for a pointer to other memory");
    return static_cast<uint32_t>(address - shared_base_);
}

void Engine::check_shared_bounds(int thread, uint32_t offset, int bytes, Site site) {
    const uint32_t dynamic = static_cast<uint32_t>(dynamic_base_ - shared_base_);
    const bool is_dynamic = offset >= dynamic && offset < dynamic + 232448;
    if (size_t{offset} + bytes > shared_bytes_ || (is_dynamic && offset + bytes > dynamic + launch_.smem_bytes)) {
        fail("out_of_bounds", thread, site,
             describe_thread(thread) + " accesses " + bytes_text(bytes) + " of shared memory at dynamic offset " +
                 std::to_string(static_cast<int64_t>(offset) - dynamic) + ", of which the launch has " +
                 std::to_string(launch_.smem_bytes) + ", at " + place(site));
    }
    if (offset % bytes && bytes <= 16) {
        fail("misaligned", thread, site,
             describe_thread(thread) + " accesses " + bytes_text(bytes) + " at shared address " +
                 std::to_string(offset) + ", no multiple of its size, at " + place(site));
    }
}

std::string Engine::name_of(int thread_or_agent) const {
    if (thread_or_agent < threads()) return describe_thread(thread_or_agent);
    return agents_[static_cast<size_t>(thread_or_agent - threads() - 1)].name;
}

void Engine::fail_race(const Actor& actor, uint32_t offset, bool is_write, Site site, const Access& earlier) {
    const bool is_agent = earlier.thread > threads();
    const bool in_flight = is_agent && earlier.clock > agent(earlier.thread).finished;
    fail(in_flight ? "in_flight" : "race", actor.index < threads() ? actor.index : running_, site,
         name_of(actor.index) + " " + action(is_write) + " shared address " + std::to_string(offset) + " at " +
             place(site) + " and " + name_of(earlier.thread) + " " + action(earlier.is_write) + " it at " +
             place(earlier.site) + "; " +
             (is_agent ? "no wait for that has ended before" : "no barrier orders the two"));
}

void Engine::fail_proxy(uint32_t offset, bool is_write, Site site, const Access& earlier) {
    fail("proxy", site,
         std::string("an asynchronous ") + (is_write ? "write to" : "read of") + " shared address " +
             std::to_string(offset) + " at " + place(site) + " follows an ordinary write by " +
             describe_thread(earlier.thread) + " at " + place(earlier.site) +
             "; the writer needs fence.proxy.async in between, before what orders the two");
}

// Whether its thread fenced it before what makes `clock` know of it.
bool Engine::is_fenced(const Access& earlier, const Clock& clock) const {
    const std::vector<uint32_t>& fences = fibers_[earlier.thread].proxy_fences;
    const auto fence = std::lower_bound(fences.begin(), fences.end(), earlier.clock);
    return fence != fences.end() && *fence <= clock[earlier.thread];
}

void Engine::check_conflicts(const Actor& actor, Granule& granule, uint32_t offset, uint16_t mask, bool is_write,
                             Site site) {
    size_t kept = 0;
    for (size_t i = 0; i < granule.accesses.size(); ++i) {
        Access& earlier = granule.accesses[i];
        const bool overlaps = earlier.mask & mask;
        const bool is_ordered = (earlier.thread == actor.index && !actor.is_async) ||
                                (earlier.thread < actor.clock.size() && earlier.clock <= actor.clock[earlier.thread]);
        const bool conflicts = (is_write || earlier.is_write) && !(actor.is_atomic && earlier.is_atomic);
        if (overlaps && !is_ordered && conflicts) fail_race(actor, offset, is_write, site, earlier);
        if (overlaps && actor.is_async && earlier.is_write && !earlier.is_async && !is_fenced(earlier, actor.clock)) {
            fail_proxy(offset, is_write, site, earlier);
        }
        // What comes later and is ordered after this access is ordered after the earlier one too. The last write stays,
        // since reads need it; a fence may still be missing for it.
        const bool superseded = is_ordered && !(earlier.mask & ~mask) && (is_write || !earlier.is_write);
        if (!superseded) granule.accesses[kept++] = earlier;
    }
    granule.accesses.resize(kept);
}

void Engine::record_access(const Actor& actor, uint32_t offset, int bytes, bool is_write, uint16_t known, Site site) {
    const int thread = actor.index < threads() ? actor.index : running_;
    check_shared_bounds(thread, offset, bytes, site);
    for_granules(offset, bytes, [&](uint32_t index, uint16_t mask) {
        Granule& one = granule(index);
        if (one.pending & mask) {
            fail("in_flight", thread, site,
                 name_of(actor.index) + " " + action(is_write) + " shared address " + std::to_string(offset) + " at " +
                     place(site) + " while the asynchronous copy started at " + place(one.async_site) +
                     " is on its way there; no wait has covered it");
        }
        if (!is_write && (one.written & mask) != mask) {
            fail("uninitialized", thread, site,
                 name_of(actor.index) + " reads shared address " + std::to_string(offset) + " at " + place(site) +
                     ", which nothing has written");
        }
        check_conflicts(actor, one, offset, mask, is_write, site);
        if (is_write) one.written = static_cast<uint16_t>((one.written & ~mask) | (known & mask));
        one.accesses.push_back(
            {actor.now, static_cast<uint16_t>(actor.index), mask, site, is_write, actor.is_async, actor.is_atomic});
    });
}

void Engine::access_shared(int thread, uint32_t offset, int bytes, bool is_write, Site site, bool is_atomic) {
    const Clock& clock = fibers_[thread].clock;
    record_access({thread, clock, clock[thread], false, is_atomic}, offset, bytes, is_write, 0xffff, site);
}

void Engine::access_async(int agent, uint32_t ticket, const Clock& since, uint32_t offset, int bytes, bool is_write,
                          Site site, uint16_t known) {
    record_access({agent, since, ticket, true, false}, offset, bytes, is_write, known, site);
    if (is_write) memset(shared_pointer(offset), POISON, bytes);
}

void Engine::begin_async_write(int thread, uint32_t offset, int bytes, Site site) {
    access_shared(thread, offset, bytes, true, site);
    for_granules(offset, bytes, [&](uint32_t index, uint16_t mask) {
        Granule& one = granule(index);
        one.pending |= mask;
        one.async_site = site;
    });
    memset(shared_pointer(offset), POISON, bytes);
}

void Engine::end_async_write(int thread, uint32_t offset, int bytes, uint16_t known, Site site) {
    for_granules(offset, bytes, [&](uint32_t index, uint16_t mask) {
        Granule& one = granule(index);
        one.pending &= static_cast<uint16_t>(~mask);
        one.written = static_cast<uint16_t>((one.written & ~mask) | (known & mask));
        const uint32_t now = fibers_[thread].clock[thread];
        one.accesses.push_back({now, static_cast<uint16_t>(thread), mask, site, true, false, false});
    });
}

// ---- global memory ----

Memory& Engine::check_global(uintptr_t address, int bytes, bool is_write, Site site) {
    Memory* const memory = session_.find(address, bytes);
    if (!memory) {
        fail("out_of_bounds", site,
             describe_thread(running_) + " " + action(is_write) + " " + bytes_text(bytes) + " " +
                 session_.describe(address) + " at " + place(site));
    }
    if (address % bytes) {
        fail("misaligned", site,
             describe_thread(running_) + " " + action(is_write) + " " + bytes_text(bytes) + " of " + memory->name +
                 " at an address that is no multiple of its size, at " + place(site));
    }
    if (is_write && !memory->buffer.is_writable) {
        fail("read_only", site, describe_thread(running_) + " writes to " + memory->name + " at " + place(site));
    }
    return *memory;
}

// Who writes: launch and block.
uint32_t Engine::stamp() const {
    return (session_.launches & 0xff) << 24 | ((static_cast<uint32_t>(block_) + 1) & 0xffffff);
}

// An access to a word that `writer` wrote: other blocks of this launch are not ordered with this one, and earlier
// launches are only after griddepcontrol.wait.
void Engine::check_order(Memory& memory, uint64_t word, uint32_t writer, bool is_write, Site site) {
    if (writer == 0) return;
    const bool is_same_launch = writer >> 24 == stamp() >> 24;
    const std::string what = describe_thread(running_) + " " + action(is_write) + " " + memory.name + " at byte " +
                             std::to_string(word * 4);
    if (is_same_launch && writer != stamp()) {
        const uint32_t block = writer & 0xffffff;
        fail("race", site,
             what + ", which " +
                 (block == ANY_BLOCK ? "blocks of the same launch change atomically"
                                     : "block " + std::to_string(block - 1) + " of the same launch wrote") +
                 ", at " + place(site));
    }
    if (!is_same_launch && launch_.is_programmatic && !current().clock[predecessor()]) {
        fail("dependency", site, what + " of an earlier launch before waiting for its end, at " + place(site));
    }
}

// A write to a word that another block of the launch has read.
void Engine::check_reader(Memory& memory, uint64_t word, Site site) {
    const uint32_t reader = memory.words[word].reader.load(std::memory_order_relaxed);
    if (reader >> 24 != stamp() >> 24 || reader == stamp()) return;
    fail("race", site,
         describe_thread(running_) + " writes " + memory.name + " at byte " + std::to_string(word * 4) + ", which block " +
             std::to_string((reader & 0xffffff) - 1) + " of the same launch read, at " + place(site));
}

void Engine::access_global_atomic(uintptr_t address, Site site) {
    Memory& memory = check_global(address, 4, true, site);
    Word& word = memory.words[(address - memory.buffer.base) / 4];
    const uint32_t any = stamp() | ANY_BLOCK;
    const uint32_t writer = word.writer.exchange(any, std::memory_order_relaxed);
    const uint64_t index = (address - memory.buffer.base) / 4;
    if (writer == 0) {
        fail("uninitialized", site,
             describe_thread(running_) + " changes " + memory.name + " at byte " + std::to_string(4 * index) +
                 " atomically, which nothing has written, at " + place(site));
    }
    if (writer != stamp() && writer != any) check_order(memory, index, writer, true, site);
    word.thread = static_cast<uint16_t>(running_);
    word.address = site.address;
}

void Engine::access_global(uintptr_t address, int bytes, bool is_write, Site site) {
    const Module& module = module_of_kernel();
    if (!is_write && address >= module.begin && address + bytes <= module.end) return;  // constants
    Memory& memory = check_global(address, bytes, is_write, site);
    if (!memory.buffer.is_writable) return;
    const uint64_t offset = address - memory.buffer.base;
    for (uint64_t word = offset / 4; word * 4 < offset + bytes; ++word) {
        const uint32_t writer = is_write ? memory.words[word].writer.exchange(stamp(), std::memory_order_relaxed)
                                         : memory.words[word].writer.load(std::memory_order_relaxed);
        if (is_write) {
            memory.words[word].thread = static_cast<uint16_t>(running_);
            memory.words[word].address = site.address;
            check_reader(memory, word, site);
        } else {
            memory.words[word].reader.store(stamp(), std::memory_order_relaxed);
        }
        if (writer == 0 && !is_write) {
            fail("uninitialized", site,
                 describe_thread(running_) + " reads " + memory.name + " at byte " + std::to_string(word * 4) +
                     ", which nothing has written, at " + place(site));
        }
        if (writer != stamp()) check_order(memory, word, writer, is_write, site);
    }
}

uint16_t Engine::check_copy_source(uintptr_t address, int bytes, Site site) {
    Memory& memory = check_global(address, bytes, false, site);
    if (!memory.buffer.is_writable) return 0xffff;
    uint16_t known = 0;
    const uint64_t offset = address - memory.buffer.base;
    for (int byte = 0; byte < bytes; byte += 4) {
        const uint64_t word = (offset + byte) / 4;
        const uint32_t writer = memory.words[word].writer.load(std::memory_order_relaxed);
        if (writer) known |= static_cast<uint16_t>(15u << byte);
        memory.words[word].reader.store(stamp(), std::memory_order_relaxed);
        if (writer != stamp()) check_order(memory, word, writer, false, site);
    }
    return known;
}

void Engine::check_registers(uintptr_t address, int bytes, bool is_write, Site site) {
    for (const BusyRegisters& registers : current().busy) {
        if (address >= registers.end || address + bytes <= registers.begin) continue;
        fail("in_flight", site,
             describe_thread(running_) + " " + action(is_write) + " at " + place(site) +
                 " registers that belong to the asynchronous operation started at " + place(registers.site) +
                 "; no wait has covered it");
    }
}

void Engine::access(uintptr_t address, int bytes, bool is_write, Site site) {
    if (address - reinterpret_cast<uintptr_t>(current().stack) < STACK_BYTES) {  // the thread's own variables
        if (!current().busy.empty()) check_registers(address, bytes, is_write, site);
        return;
    }
    if (!is_shared(address)) {
        access_global(address, bytes, is_write, site);
        return;
    }
    const uint32_t offset = static_cast<uint32_t>(address - shared_base_);
    access_shared(running_, offset, bytes, is_write, site);
    if (launch_.count_banks) count_lane(offset, bytes, is_write, site);
}

void vector_load(const void* pointer, int bytes, void* caller) {
    engine().access(reinterpret_cast<uintptr_t>(pointer), bytes, false, {reinterpret_cast<uintptr_t>(caller), 0});
}
void vector_store(void* pointer, int bytes, void* caller) {
    engine().access(reinterpret_cast<uintptr_t>(pointer), bytes, true, {reinterpret_cast<uintptr_t>(caller), 0});
}

}  // namespace emulator

// ---- hooks of the compiler's instrumentation ----

#define HOOK(name, bytes, is_write)                                                                               \
    void name(void* address) {                                                                                    \
        emulator::engine().access(reinterpret_cast<uintptr_t>(address), bytes, is_write, EMULATOR_SITE(0));        \
    }
#define HOOKS(bytes)                              \
    HOOK(__tsan_read##bytes, bytes, false)        \
    HOOK(__tsan_write##bytes, bytes, true)        \
    HOOK(__tsan_unaligned_read##bytes, bytes, false) \
    HOOK(__tsan_unaligned_write##bytes, bytes, true)

extern "C" {

HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

// Copies of whole structs, byte by byte: no vector type is moved that way.
void __tsan_read_range(void* address, unsigned long bytes) {
    for (unsigned long i = 0; i < bytes; ++i) {
        emulator::engine().access(reinterpret_cast<uintptr_t>(address) + i, 1, false, EMULATOR_SITE(0));
    }
}
void __tsan_write_range(void* address, unsigned long bytes) {
    for (unsigned long i = 0; i < bytes; ++i) {
        emulator::engine().access(reinterpret_cast<uintptr_t>(address) + i, 1, true, EMULATOR_SITE(0));
    }
}
// -fsanitize-coverage=trace-pc: every basic block, those that run as the library is loaded included.
void __sanitizer_cov_trace_pc() {
    if (emulator::has_engine()) emulator::engine().step(EMULATOR_SITE(0));
}

void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

// -fsanitize=bounds: an index outside an array whose size the compiler knows.
void __ubsan_handle_out_of_bounds(const void* data, unsigned long index) {
    struct Place {
        const char* file;
        uint32_t line;
        uint32_t column;
    };
    const Place& where = *static_cast<const Place*>(data);
    const emulator::Site site = EMULATOR_SITE(static_cast<int>(where.line));
    emulator::Engine& engine = emulator::engine();
    engine.fail("out_of_bounds", site,
                emulator::describe_thread(engine.current().thread) + " uses index " +
                    std::to_string(static_cast<long>(index)) + " of a smaller array at " + emulator::place(site));
}
// -fsanitize=integer-divide-by-zero.
void __ubsan_handle_divrem_overflow(const void* data, unsigned long, unsigned long) {
    struct Place {
        const char* file;
        uint32_t line;
        uint32_t column;
    };
    const emulator::Site site = EMULATOR_SITE(static_cast<int>(static_cast<const Place*>(data)->line));
    emulator::Engine& engine = emulator::engine();
    engine.fail("division_by_zero", site,
                emulator::describe_thread(engine.current().thread) + " divides by zero at " + emulator::place(site));
}
void __ubsan_handle_out_of_bounds_abort(const void* data, unsigned long index) {
    __ubsan_handle_out_of_bounds(data, index);
}
}
