// Barriers, shuffles, votes, matrix loads and asynchronous copies.
#include <cstring>

#include "engine.hpp"
#include "session.hpp"

#include "emulator.cuh"

namespace emulator {

int block_index() { return engine().block(); }
int thread_index() { return engine().current().thread; }

void block_barrier(int line) { engine().block_barrier(EMULATOR_SITE(line)); }

namespace {

// __syncwarp: what the lanes did before is ordered before what any of them does after.
void join_warp(Engine& engine, int first_thread, void* const*) {
    Clock joined(engine.fiber(first_thread).clock.size(), 0);
    for (int lane = 0; lane < WARP; ++lane) {
        const Clock& own = engine.fiber(first_thread + lane).clock;
        for (size_t i = 0; i < joined.size(); ++i) joined[i] = joined[i] > own[i] ? joined[i] : own[i];
    }
    for (int lane = 0; lane < WARP; ++lane) {
        Fiber& fiber = engine.fiber(first_thread + lane);
        fiber.clock = joined;
        ++fiber.clock[fiber.thread];
    }
}

struct Shuffle {
    uint32_t value;
    int lane_mask;
    uint32_t result;
};

void perform_shuffle(Engine&, int, void* const* lanes) {
    for (int lane = 0; lane < WARP; ++lane) {
        Shuffle& own = *static_cast<Shuffle*>(lanes[lane]);
        own.result = static_cast<Shuffle*>(lanes[lane ^ (own.lane_mask & (WARP - 1))])->value;
    }
}

struct Vote {
    bool predicate;
    uint32_t result;
};

void perform_ballot(Engine&, int, void* const* lanes) {
    uint32_t bits = 0;
    for (int lane = 0; lane < WARP; ++lane) bits |= uint32_t{static_cast<Vote*>(lanes[lane])->predicate} << lane;
    for (int lane = 0; lane < WARP; ++lane) static_cast<Vote*>(lanes[lane])->result = bits;
}

struct MatrixLoad {
    uint32_t* matrix;
    uint32_t row_address;
    bool transposed;
    Site site;
};

void perform_load_matrix(Engine& engine, int first_thread, void* const* lanes) {
    uint16_t rows[4][8][8];
    uint32_t offsets[WARP];
    const MatrixLoad& first = *static_cast<MatrixLoad*>(lanes[0]);
    for (int lane = 0; lane < WARP; ++lane) {
        offsets[lane] = static_cast<MatrixLoad*>(lanes[lane])->row_address;
        engine.access_shared(first_thread + lane, offsets[lane], 16, false, first.site);
        memcpy(rows[lane / 8][lane % 8], engine.shared_pointer(offsets[lane]), 16);
    }
    if (engine.launch().count_banks) engine.count_warp(offsets, WARP, 16, false, first.site);
    for (int lane = 0; lane < WARP; ++lane) {
        const MatrixLoad& own = *static_cast<MatrixLoad*>(lanes[lane]);
        for (int i = 0; i < 4; ++i) {
            const int major = lane / 4;
            const int minor = lane % 4 * 2;
            const uint32_t low = own.transposed ? rows[i][minor][major] : rows[i][major][minor];
            const uint32_t high = own.transposed ? rows[i][minor + 1][major] : rows[i][major][minor + 1];
            own.matrix[i] = low | high << 16;
        }
    }
}

}  // namespace

void warp_barrier(int line) { engine().meet("warp_sync", EMULATOR_SITE(line), nullptr, join_warp); }

uint32_t shuffle_xor(uint32_t value, int lane_mask, int line) {
    Shuffle own{value, lane_mask, 0};
    engine().meet("shuffle_xor", EMULATOR_SITE(line), &own, perform_shuffle);
    return own.result;
}

uint32_t ballot(bool predicate, int line) {
    Vote own{predicate, 0};
    engine().meet("warp vote", EMULATOR_SITE(line), &own, perform_ballot);
    return own.result;
}

uint32_t shared_address(const void* pointer) { return engine().shared_offset(pointer, EMULATOR_SITE(0)); }

void load_matrix(uint32_t (&matrix)[4], uint32_t row_address, bool transposed, int line) {
    MatrixLoad own{matrix, row_address, transposed, EMULATOR_SITE(line)};
    engine().meet(transposed ? "load_matrix_x4_transposed" : "load_matrix_x4", own.site, &own, perform_load_matrix);
}

// ---- cp.async ----

namespace {

constexpr int COPY_BYTES = 16;

void finish(Engine& engine, const Copy& copy) {
    uint8_t* const target = engine.shared_pointer(copy.destination);
    if (copy.source) {
        memcpy(target, copy.source, COPY_BYTES);
    } else {
        memset(target, 0, COPY_BYTES);
    }
    engine.end_async_write(engine.current().thread, copy.destination, COPY_BYTES, copy.known, copy.site);
}

}  // namespace

void async_copy(void* shared, const void* global, bool valid, int line) {
    const Site site = EMULATOR_SITE(line);
    Engine& own = engine();
    const uint16_t known =
        valid ? own.check_copy_source(reinterpret_cast<uintptr_t>(global), COPY_BYTES, site) : uint16_t{0xffff};
    const uint32_t destination = own.shared_offset(shared, site);
    own.begin_async_write(own.current().thread, destination, COPY_BYTES, site);
    if (own.launch().count_banks) own.count_lane(destination, COPY_BYTES, true, site);
    own.current().open_group.push_back({destination, valid ? static_cast<const uint8_t*>(global) : nullptr, known, site});
}

void async_commit() {
    Fiber& own = engine().current();
    own.groups.push_back(std::move(own.open_group));
    own.open_group.clear();
}

void async_wait(int pending, int) {
    Fiber& own = engine().current();
    size_t finished = 0;
    while (own.groups.size() - finished > static_cast<size_t>(pending)) {
        for (const Copy& copy : own.groups[finished++]) finish(engine(), copy);
    }
    own.groups.erase(own.groups.begin(), own.groups.begin() + static_cast<long>(finished));
}

}  // namespace emulator
