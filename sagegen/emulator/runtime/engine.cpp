// Fibers, their scheduler, and what ends a block.
#include "engine.hpp"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "module.hpp"
#include "session.hpp"

namespace emulator {

namespace {

thread_local Engine* running_engine = nullptr;
thread_local ucontext_t creator;  // where a fiber returns to once it can be jumped to

// The ABIs of x86-64 and AArch64 pass big structs in memory, so a kernel sees its own, shorter one at the same place.
struct AnyParams {
    alignas(16) uint8_t bytes[1024];
};
using Kernel = void (*)(AnyParams);

}  // namespace

Engine& engine() { return *running_engine; }
bool has_engine() { return running_engine != nullptr; }

std::string place(Site site) {
    char text[48];
    if (site.address) {
        snprintf(text, sizeof text, "{0x%lx}", static_cast<unsigned long>(site.address - module_of_kernel().base));
    } else {
        snprintf(text, sizeof text, "line %d", site.line);
    }
    return text;
}

std::string describe_thread(int thread) {
    char text[64];
    snprintf(text, sizeof text, "thread %d (warp %d, lane %d)", thread, thread / WARP, thread % WARP);
    return text;
}

Engine::Engine(Session& session, const Launch& launch) : session_(session), launch_(launch) {
    const size_t threads = launch.threads;
    fibers_.resize(threads);
    warps_.resize(threads / WARP);
    lanes_.resize(threads / WARP);
    queue_.resize(threads);
    void* const stacks =
        mmap(nullptr, threads * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) abort();  // address space alone; nothing is committed
    for (size_t i = 0; i < threads; ++i) {
        fibers_[i].thread = static_cast<int>(i);
        fibers_[i].stack = static_cast<uint8_t*>(stacks) + i * STACK_BYTES;
        memset(fibers_[i].stack + STACK_BYTES - POISONED_STACK_BYTES, 0xff, POISONED_STACK_BYTES);
    }
    const SharedRange shared = shared_range_of_this_thread();
    shared_base_ = shared.base;
    shared_bytes_ = shared.bytes;
    dynamic_base_ = shared.dynamic_base;
    granules_.resize(shared_bytes_ / GRANULE + 1);
    running_engine = this;
    for (Fiber& fiber : fibers_) create_fiber(fiber);
}

Engine::~Engine() {
    munmap(fibers_[0].stack, fibers_.size() * STACK_BYTES);
    running_engine = nullptr;
}

void Engine::create_fiber(Fiber& fiber) {
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = fiber.stack;
    start.uc_stack.ss_size = STACK_BYTES;
    start.uc_link = nullptr;
    const uintptr_t self = reinterpret_cast<uintptr_t>(this);
    running_ = fiber.thread;
    makecontext(&start, reinterpret_cast<void (*)()>(fiber_main), 2, static_cast<unsigned>(self),
                static_cast<unsigned>(self >> 32));
    swapcontext(&creator, &start);
}

// Signal masks are saved only here: switching by _longjmp makes no system call.
void Engine::fiber_main(unsigned low, unsigned high) {
    Engine* const self = reinterpret_cast<Engine*>(static_cast<uintptr_t>(high) << 32 | low);
    Fiber& own = self->current();
    if (_setjmp(own.context) == 0) setcontext(&creator);
    for (;;) self->run_fiber();
}

void Engine::run_fiber() {
    AnyParams params;
    memcpy(params.bytes, launch_.params, launch_.params_bytes);
    reinterpret_cast<Kernel>(launch_.function)(params);
    current().state = State::done;
    --live_;
    yield();
}

void Engine::yield() {
    Fiber& from = current();
    if (_setjmp(from.context) != 0) return;
    if (count_ == 0) to_scheduler();
    running_ = queue_[head_];
    head_ = (head_ + 1) % queue_.size();
    --count_;
    steps_ = 0;
    _longjmp(fibers_[running_].context, 1);
}

void Engine::step(Site site) {
    if (++steps_ % STEPS_PER_LOOK) return;
    block_steps_ += STEPS_PER_LOOK;
    if (session_.is_stopped.load(std::memory_order_relaxed)) fail("stopped", site, "the launch was told to stop");
    if (steps_ > MAX_STEPS || block_steps_ > MAX_BLOCK_STEPS) {
        fail("endless_loop", site, describe_thread(running_) + " goes on and on at " + place(site));
    }
}

void Engine::to_scheduler() { _longjmp(scheduler_, 1); }

void Engine::wait(const char* what, Site site) {
    Fiber& own = current();
    own.state = State::waiting;
    own.waits_for = what;
    own.waits_at = site;
    yield();
}

void Engine::wake(int thread) {
    fibers_[thread].state = State::ready;
    queue_[(head_ + count_) % queue_.size()] = thread;
    ++count_;
}

void Engine::start_block(int block) {
    block_ = block;
    block_steps_ = 0;
    late_progress.clear();
    at_block_end.clear();
    states_.clear();
    agents_.clear();
    ++generation_;
    head_ = count_ = 0;
    live_ = threads();
    block_barrier_ = Barrier{};
    named_.clear();
    for (Warp& warp : warps_) warp.arrived = 0;
    for (Fiber& fiber : fibers_) {
        fiber.clock.assign(fibers_.size() + 1, 0);
        fiber.clock[fiber.thread] = 1;
        fiber.proxy_fences.clear();
        fiber.busy.clear();
        fiber.open_group.clear();
        fiber.groups.clear();
        wake(fiber.thread);
    }
}

bool Engine::run_block(int block) {
    start_block(block);
    _setjmp(scheduler_);  // fibers come back here when none can run, and when one failed
    if (!failed_ && count_ == 0 && live_ > 0) {
        bool moved = false;
        for (auto* progress : late_progress) moved = moved || progress(*this);
        if (!moved) diagnose_deadlock();
    }
    if (!failed_ && live_ > 0) {
        running_ = queue_[head_];
        head_ = (head_ + 1) % queue_.size();
        --count_;
        _longjmp(fibers_[running_].context, 1);
    }
    if (!failed_ && launch_.count_banks) {
        for (size_t warp = 0; warp < warps_.size(); ++warp) flush_lanes(static_cast<int>(warp));
    }
    if (!failed_) {
        for (auto* end : at_block_end) end(*this);  // one that fails comes back above, too
    }
    return !failed_;
}

void Engine::fail(const char* kind, int thread, Site site, const std::string& message) {
    failed_ = true;
    snprintf(report.kind, sizeof report.kind, "%s", kind);
    report.block = block_;
    report.thread = thread;
    report.line = site.line;
    report.site = site.address ? site.address - module_of_kernel().base : 0;
    snprintf(report.message, sizeof report.message, "%s", message.c_str());
    to_scheduler();
}

void Engine::fail(const char* kind, Site site, const std::string& message) {
    fail(kind, current().thread, site, message);
}

// Threads that wait at the same place, put together: "threads 0-31 wait for ... at line 12".
std::string Engine::waiting_places() const {
    std::string text;
    size_t first = 0;
    while (first < fibers_.size()) {
        const Fiber& one = fibers_[first];
        size_t last = first;
        while (last + 1 < fibers_.size() && fibers_[last + 1].state == one.state &&
               (one.state == State::done || (fibers_[last + 1].waits_at.line == one.waits_at.line &&
                                             !strcmp(fibers_[last + 1].waits_for, one.waits_for)))) {
            ++last;
        }
        if (!text.empty()) text += "; ";
        text += last > first ? "threads " + std::to_string(first) + "-" + std::to_string(last)
                             : "thread " + std::to_string(first);
        text += one.state == State::done
                    ? (last > first ? " have returned" : " has returned")
                    : std::string(last > first ? " wait at " : " waits at ") + one.waits_for + ", " + place(one.waits_at);
        first = last + 1;
    }
    return text;
}

void Engine::diagnose_deadlock() {
    for (size_t w = 0; w < warps_.size(); ++w) {
        const Warp& warp = warps_[w];
        if (warp.arrived == 0) continue;
        const Fiber* waiting = nullptr;
        for (int lane = 0; lane < WARP && !waiting; ++lane) {
            const Fiber& fiber = fibers_[w * WARP + lane];
            if (fiber.state == State::waiting && !strcmp(fiber.waits_for, warp.operation)) waiting = &fiber;
        }
        if (!waiting) continue;
        fail("divergence", waiting->thread, warp.site,
             std::string("only ") + std::to_string(warp.arrived) + " of 32 lanes of warp " + std::to_string(w) +
                 " came to " + warp.operation + ": " + waiting_places());
    }
    const auto waiting = std::find_if(fibers_.begin(), fibers_.end(),
                                      [](const Fiber& fiber) { return fiber.state == State::waiting; });
    fail("deadlock", waiting->thread, waiting->waits_at, "no thread can go on: " + waiting_places());
}

// ---- order ----

void Engine::release(Clock& into) {
    Fiber& own = current();
    if (into.size() < own.clock.size()) into.resize(own.clock.size());
    for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], own.clock[i]);
    ++own.clock[own.thread];
}

void Engine::acquire(const Clock& from) {
    Fiber& own = current();
    for (size_t i = 0; i < from.size(); ++i) own.clock[i] = std::max(own.clock[i], from[i]);
}

int Engine::add_agent(const char* name) {
    agents_.push_back({name});
    for (Fiber& fiber : fibers_) fiber.clock.push_back(0);
    return threads() + static_cast<int>(agents_.size());
}

void Engine::fence_proxy() {
    Fiber& own = current();
    own.proxy_fences.push_back(own.clock[own.thread]++);
}

// ---- rendezvous ----

void Engine::meet(const char* operation, Site site, void* argument,
                  void (*perform)(Engine&, int first_thread, void* const*)) {
    Fiber& own = current();
    const int index = own.thread / WARP;
    Warp& warp = warps_[index];
    if (warp.arrived == 0) {
        warp.operation = operation;
        warp.site = site;
    } else if (warp.site.line != site.line || strcmp(warp.operation, operation)) {
        fail("divergence", site,
             describe_thread(own.thread) + " comes to " + operation + " at " + place(site) +
                 " while other lanes of its warp wait at " + warp.operation + ", " + place(warp.site));
    }
    warp.arguments[own.thread % WARP] = argument;
    if (++warp.arrived < WARP) {
        wait(operation, site);
        return;
    }
    warp.arrived = 0;
    if (launch_.count_banks) flush_lanes(index);
    perform(*this, index * WARP, warp.arguments);
    for (int thread = index * WARP; thread < (index + 1) * WARP; ++thread) {
        if (thread != own.thread) wake(thread);
    }
}

void Engine::block_barrier(Site site) {
    Barrier& barrier = block_barrier_;
    if (barrier.arrived == 0) {
        barrier.site = site;
    } else if (barrier.site.line != site.line) {
        fail("divergence", site,
             describe_thread(current().thread) + " comes to the block barrier at " + place(site) +
                 " while others wait at the one at " + place(barrier.site));
    }
    release(barrier.clock);
    if (++barrier.arrived < threads()) {
        wait("block_sync", site);
        return;
    }
    if (launch_.count_banks) {
        for (size_t warp = 0; warp < warps_.size(); ++warp) flush_lanes(static_cast<int>(warp));
    }
    const int last = running_;
    for (running_ = 0; running_ < threads(); ++running_) {
        acquire(barrier.clock);
        if (running_ != last) wake(running_);
    }
    running_ = last;
    barrier.arrived = 0;
    barrier.clock.clear();
}

void Engine::named_barrier(int id, int count, bool waits, Site site) {
    if (id < 1 || id > 15) fail("bad_barrier", site, "barrier id " + std::to_string(id) + " is not one of 1 to 15");
    if (count % WARP || count <= 0 || count > threads()) {
        fail("bad_barrier", site, "barrier of " + std::to_string(count) + " threads: not whole warps of the block");
    }
    Barrier& barrier = named_[id];
    if (barrier.arrived == 0) {
        barrier.expected = count;
        barrier.site = site;
    } else if (barrier.expected != count) {
        fail("bad_barrier", site,
             "barrier " + std::to_string(id) + " is for " + std::to_string(count) + " threads at " + place(site) +
                 " and for " + std::to_string(barrier.expected) + " at " + place(barrier.site));
    }
    release(barrier.clock);
    const bool complete = ++barrier.arrived == count;
    if (waits) barrier.waiting.push_back(running_);
    if (complete) {
        const int last = running_;
        for (int thread : barrier.waiting) {
            running_ = thread;
            acquire(barrier.clock);
            if (thread != last) wake(thread);
        }
        running_ = last;
        barrier.arrived = 0;
        barrier.waiting.clear();
        barrier.clock.clear();
    } else if (waits) {
        wait("named barrier", site);
    }
}

}  // namespace emulator
