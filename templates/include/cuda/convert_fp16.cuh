// fp16 inputs and outputs, two to a word, the first in the low half.
namespace device {

__device__ __forceinline__ void unpack_io(uint32_t word, float& first, float& second) {
    asm("{\n"
        ".reg .f16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}"
        : "=f"(first), "=f"(second)
        : "r"(word));
}
__device__ __forceinline__ uint32_t pack_io(float first, float second) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

}  // namespace device
