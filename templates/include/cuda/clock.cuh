// The SM's own clock.
namespace device {

// Cycles since some time in the past; equal on all warps of an SM.
__device__ __forceinline__ int64_t clock_cycles() {
    int64_t cycles;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
    return cycles;
}

}  // namespace device
