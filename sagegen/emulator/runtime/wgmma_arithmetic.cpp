// The arithmetic of wgmma.
#include <cstring>
#include <vector>

#include "numerics.hpp"
#include "wgmma.hpp"

namespace emulator {

namespace {

// The tensor core's FP32 accumulator of e4m3 products: the exact sum, cut toward zero to 13 mantissa bits. A double has
// 52 of them.
float cut(double sum) {
    constexpr uint64_t dropped = (uint64_t{1} << (52 - 13)) - 1;
    uint64_t bits;
    memcpy(&bits, &sum, 8);
    if (sum == sum) bits &= ~dropped;
    memcpy(&sum, &bits, 8);
    return static_cast<float>(sum);
}

const double* e4m3_values() {
    static const std::vector<double> values = [] {
        std::vector<double> all(256);
        for (int i = 0; i < 256; ++i) all[static_cast<size_t>(i)] = e4m3_to_float(static_cast<uint8_t>(i));
        return all;
    }();
    return values.data();
}

}  // namespace

void multiply_s8(uint32_t* d, const uint8_t* a, const uint8_t* b, int columns, bool accumulates) {
    const auto* const left = reinterpret_cast<const int8_t*>(a);
    const auto* const right = reinterpret_cast<const int8_t*>(b);
    for (int row = 0; row < TILE_ROWS; ++row) {
        for (int column = 0; column < columns; ++column) {
            int sum = 0;
            for (int k = 0; k < DEPTH; ++k) sum += left[row * DEPTH + k] * right[column * DEPTH + k];
            uint32_t& element = d[row * columns + column];
            element = (accumulates ? element : 0u) + static_cast<uint32_t>(sum);  // wraps
        }
    }
}

void multiply_e4m3(uint32_t* d, const uint8_t* a, const uint8_t* b, int columns, bool accumulates) {
    const double* const values = e4m3_values();
    std::vector<double> right(static_cast<size_t>(DEPTH * columns));  // [DEPTH, columns]
    for (int column = 0; column < columns; ++column) {
        for (int k = 0; k < DEPTH; ++k) right[static_cast<size_t>(k * columns + column)] = values[b[column * DEPTH + k]];
    }
    std::vector<double> sums(static_cast<size_t>(columns));
    for (int row = 0; row < TILE_ROWS; ++row) {
        for (int column = 0; column < columns; ++column) {
            sums[static_cast<size_t>(column)] = accumulates ? bits_float(d[row * columns + column]) : 0.0;
        }
        // products have 8 bits and sums of 32 of them under 53: exact
        for (int k = 0; k < DEPTH; ++k) {
            const double factor = values[a[row * DEPTH + k]];
            const double* const from = &right[static_cast<size_t>(k * columns)];
            double* const to = sums.data();
            for (int column = 0; column < columns; ++column) to[column] += factor * from[column];
        }
        for (int column = 0; column < columns; ++column) {
            d[row * columns + column] = float_bits(cut(sums[static_cast<size_t>(column)]));
        }
    }
}

}  // namespace emulator
