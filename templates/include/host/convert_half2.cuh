// Pairs of fp16, the first in the low half: to and from floats and e4m3 bytes, and out of FP16 accumulators.
namespace device {

__device__ __forceinline__ void unpack_half2(uint32_t word, float& first, float& second) {
    first = emulator::half_to_float(static_cast<uint16_t>(word));
    second = emulator::half_to_float(static_cast<uint16_t>(word >> 16));
}
// Round to nearest even; values beyond the range of fp16 give an infinity.
__device__ __forceinline__ uint32_t pack_half2(float first, float second) {
    return emulator::float_to_half(first) | static_cast<uint32_t>(emulator::float_to_half(second)) << 16;
}
// Adds an MMA's FP16 accumulator to FP32 sums, which hold the elements as an MMA's FP32 accumulator does.
__device__ __forceinline__ void promote(float (&sum)[4], const uint32_t (&accumulator)[2]) {
    for (int row = 0; row < 2; ++row) {
        float first, second;
        unpack_half2(accumulator[row], first, second);
        sum[2 * row] += first;
        sum[2 * row + 1] += second;
    }
}
// Four fp16 to four e4m3 bytes, the first in the lowest byte; values beyond +-448 saturate, NaN stays NaN.
__device__ __forceinline__ uint32_t half2_to_e4m3(uint32_t first_pair, uint32_t second_pair) {
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t pair = i < 2 ? first_pair : second_pair;
        const float value = emulator::half_to_float(static_cast<uint16_t>(pair >> (16 * (i % 2))));
        word |= static_cast<uint32_t>(emulator::float_to_e4m3(value)) << (8 * i);
    }
    return word;
}
// Four e4m3 bytes to four fp16, which hold them exactly.
__device__ __forceinline__ void e4m3_to_half2(uint32_t word, uint32_t& first_pair, uint32_t& second_pair) {
    float values[4];
    for (int i = 0; i < 4; ++i) values[i] = emulator::e4m3_to_float(static_cast<uint8_t>(word >> (8 * i)));
    first_pair = pack_half2(values[0], values[1]);
    second_pair = pack_half2(values[2], values[3]);
}

}  // namespace device
