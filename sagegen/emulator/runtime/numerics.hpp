// Number formats and roundings of the hardware.
#pragma once

#include <cstdint>

namespace emulator {

float bits_float(uint32_t bits);
uint32_t float_bits(float x);
float e4m3_to_float(uint8_t bits);
uint16_t double_to_half(double x);  // as float_to_half, rounded once
// Cut toward zero to 13 mantissa bits: the accumulator of native FP8 matrix products (SageAttention2, section 3.4).
float cut_to_fp22(double x);
// Whether FP8 products accumulate in FP22; emulated ones (mma.sync on sm_90, sm_100) do it in FP32.
bool has_fp22_mma(int architecture);

}  // namespace emulator
