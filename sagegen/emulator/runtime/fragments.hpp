// Operands of mma.sync: the lanes' fragments (PTX ISA, "mma") as whole matrices.
#pragma once

#include <cstdint>
#include <vector>

#include "engine.hpp"
#include "numerics.hpp"

#include "emulator.cuh"

namespace emulator {

constexpr int ROWS = 16;
constexpr int COLUMNS = 8;

// What one lane brings: registers as 32-bit words, whatever they hold.
struct Lane {
    uint32_t* d;
    const uint32_t* a;
    uint32_t b[2];
    const uint32_t* c;
};

template <typename D>
Lane make_lane(D* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const D* c) {
    return {reinterpret_cast<uint32_t*>(d), a, {b0, b1}, reinterpret_cast<const uint32_t*>(c)};
}

struct Int8 {
    static constexpr int BITS = 8;
    static float value(uint32_t word) { return static_cast<int8_t>(word & 0xff); }
};
struct Int4 {
    static constexpr int BITS = 4;
    static float value(uint32_t word) { return static_cast<float>(static_cast<int32_t>(word << 28) >> 28); }
};
struct E4m3 {
    static constexpr int BITS = 8;
    static float value(uint32_t word) {
        static const std::vector<float> values = [] {
            std::vector<float> all(256);
            for (int i = 0; i < 256; ++i) all[i] = e4m3_to_float(static_cast<uint8_t>(i));
            return all;
        }();
        return values[word & 0xff];
    }
};
struct Half {
    static constexpr int BITS = 16;
    static float value(uint32_t word) {
        static const std::vector<float> values = [] {
            std::vector<float> all(65536);
            for (int i = 0; i < 65536; ++i) all[i] = half_to_float(static_cast<uint16_t>(i));
            return all;
        }();
        return values[word & 0xffff];
    }
};
struct Bfloat16 {
    static constexpr int BITS = 16;
    static float value(uint32_t word) { return bits_float(word << 16); }
};

// The matrices of one product. A register holds 32 / BITS neighbours along k; a fragment's k is 4 lanes wide, twice.
template <typename Element>
struct Operands {
    static constexpr int PER_WORD = 32 / Element::BITS;
    static constexpr int DEPTH = 8 * PER_WORD;
    float a[ROWS][DEPTH];
    float b[COLUMNS][DEPTH];

    explicit Operands(void* const* lanes) {
        for (int index = 0; index < WARP; ++index) {
            const Lane& lane = *static_cast<Lane*>(lanes[index]);
            const int group = index / 4;
            const int k = index % 4 * PER_WORD;
            for (int half = 0; half < 2; ++half) {
                unpack(&a[group][k + half * DEPTH / 2], lane.a[2 * half]);
                unpack(&a[group + 8][k + half * DEPTH / 2], lane.a[2 * half + 1]);
                unpack(&b[group][k + half * DEPTH / 2], lane.b[half]);
            }
        }
    }
    static void unpack(float* target, uint32_t word) {
        for (int i = 0; i < PER_WORD; ++i) target[i] = Element::value(word >> (Element::BITS * i));
    }
    // Exact but for the rounding of a double: products of these formats have at most 22 bits.
    double dot(int row, int column, int first = 0, int last = DEPTH) const {
        double sum = 0;
        for (int k = first; k < last; ++k) sum += static_cast<double>(a[row][k]) * b[column][k];
        return sum;
    }
};

}  // namespace emulator
