// bf16 inputs and outputs, two to a word, the first in the low half.
namespace device {

__device__ __forceinline__ void unpack_io(uint32_t word, float& first, float& second) {
    first = __uint_as_float(word << 16);
    second = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ uint32_t pack_io(float first, float second) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

}  // namespace device
