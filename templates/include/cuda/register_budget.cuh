// Registers of a warpgroup's threads, a multiple of 8 from 24 to 256. All four warps call it; the kernel has
// __launch_bounds__. sm_90a and later.
namespace device {

// Waits until the block has that many registers to give.
template <int REGISTERS>
__device__ __forceinline__ void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace device
