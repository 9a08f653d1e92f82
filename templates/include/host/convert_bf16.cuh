// bf16 inputs and outputs, two to a word, the first in the low half.
namespace device {

__device__ __forceinline__ void unpack_io(uint32_t word, float& first, float& second) {
    first = bits_to_float(word << 16);
    second = bits_to_float(word & 0xffff0000u);
}
__device__ __forceinline__ uint32_t pack_io(float first, float second) {
    return emulator::float_to_bfloat16(first) | static_cast<uint32_t>(emulator::float_to_bfloat16(second)) << 16;
}

}  // namespace device
