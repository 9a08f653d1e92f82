// Registers of a warpgroup's threads, a multiple of 8 from 24 to 256. All four warps call it; the kernel has
// __launch_bounds__. sm_90a and later.
namespace device {

// Waits until the block has that many registers to give.
template <int REGISTERS>
__device__ __forceinline__ void raise_registers(int line = __builtin_LINE()) {
    emulator::set_registers(REGISTERS, true, line);
}
template <int REGISTERS>
__device__ __forceinline__ void lower_registers(int line = __builtin_LINE()) {
    emulator::set_registers(REGISTERS, false, line);
}

}  // namespace device
