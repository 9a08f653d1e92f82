// fp16 inputs and outputs, two to a word, the first in the low half.
namespace device {

__device__ __forceinline__ void unpack_io(uint32_t word, float& first, float& second) {
    first = emulator::half_to_float(static_cast<uint16_t>(word));
    second = emulator::half_to_float(static_cast<uint16_t>(word >> 16));
}
__device__ __forceinline__ uint32_t pack_io(float first, float second) {
    return emulator::float_to_half(first) | static_cast<uint32_t>(emulator::float_to_half(second)) << 16;
}

}  // namespace device
