// Matrix stores, and barriers of some warps.
#include <cstring>

#include "engine.hpp"

#include "emulator.cuh"
#include "emulator_hopper.cuh"

namespace emulator {

namespace {

struct MatrixStore {
    const uint32_t* matrix;
    uint32_t row_address;
    bool transposed;
    Site site;
};

void perform_store_matrix(Engine& engine, int first_thread, void* const* lanes) {
    uint16_t rows[4][8][8];
    uint32_t offsets[WARP];
    for (int lane = 0; lane < WARP; ++lane) {
        const MatrixStore& own = *static_cast<MatrixStore*>(lanes[lane]);
        for (int i = 0; i < 4; ++i) {
            for (int j = 0; j < 2; ++j) {
                const int major = lane / 4;
                const int minor = lane % 4 * 2 + j;
                uint16_t& element = own.transposed ? rows[i][minor][major] : rows[i][major][minor];
                element = static_cast<uint16_t>(own.matrix[i] >> 16 * j);
            }
        }
    }
    const MatrixStore& first = *static_cast<MatrixStore*>(lanes[0]);
    for (int lane = 0; lane < WARP; ++lane) {
        offsets[lane] = static_cast<MatrixStore*>(lanes[lane])->row_address;
        engine.access_shared(first_thread + lane, offsets[lane], 16, true, first.site);
        memcpy(engine.shared_pointer(offsets[lane]), rows[lane / 8][lane % 8], 16);
    }
    if (engine.launch().count_banks) engine.count_warp(offsets, WARP, 16, true, first.site);
}

}  // namespace

void store_matrix(uint32_t row_address, const uint32_t (&matrix)[4], bool transposed, int line) {
    MatrixStore own{matrix, row_address, transposed, EMULATOR_SITE(line)};
    engine().meet(transposed ? "store_matrix_x4_transposed" : "store_matrix_x4", own.site, &own, perform_store_matrix);
}

void named_barrier(int barrier, int threads, bool waits, int line) {
    engine().named_barrier(barrier, threads, waits, EMULATOR_SITE(line));
}

}  // namespace emulator
