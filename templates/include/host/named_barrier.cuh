// Barriers of some of a block's warps. Barrier 0 is block_sync's; 1 to 15 are free. `threads`, a multiple of 32, counts
// all that take part, those that wait and those that only arrive.
namespace device {

__device__ __forceinline__ void named_barrier_sync(int barrier, int threads, int line = __builtin_LINE()) {
    emulator::named_barrier(barrier, threads, true, line);
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads, int line = __builtin_LINE()) {
    emulator::named_barrier(barrier, threads, false, line);
}
// Orders the memory accesses of a warp's lanes.
__device__ __forceinline__ void warp_sync(int line = __builtin_LINE()) { emulator::warp_barrier(line); }

}  // namespace device
