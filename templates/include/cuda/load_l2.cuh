// Loads that the L1 cache does not answer.
namespace device {

__device__ __forceinline__ uint4 load_l2(const uint4* global) {
    uint4 value;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(global)
                 : "memory");
    return value;
}

}  // namespace device
