// Bulk copies of contiguous bytes between global and shared memory by the copy engine. Addresses and sizes are
// multiples of 16. The engine reads and writes shared memory through the async proxy: fence_proxy_async orders a
// thread's earlier accesses before its later bulk copies (and before wgmma's operand reads). sm_90 and later.
namespace device {

__device__ __forceinline__ void fence_proxy_async() { emulator::fence_proxy_async(); }

// One thread starts it; `bytes` count towards the barrier's phase as they land, and waiting for it shows them.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                                          int line = __builtin_LINE()) {
    emulator::bulk_load(shared, global, bytes, barrier, line);
}
// Belongs to this thread's next committed group.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes,
                                           int line = __builtin_LINE()) {
    emulator::bulk_store(global, shared, bytes, line);
}
__device__ __forceinline__ void bulk_commit() { emulator::bulk_commit(); }
// Waits until at most PENDING of this thread's committed groups are unfinished.
template <int PENDING>
__device__ __forceinline__ void bulk_wait(int line = __builtin_LINE()) {
    emulator::bulk_wait(PENDING, false, line);
}
// Waits until at most PENDING of them still read shared memory, which then may be written again.
template <int PENDING>
__device__ __forceinline__ void bulk_wait_read(int line = __builtin_LINE()) {
    emulator::bulk_wait(PENDING, true, line);
}

}  // namespace device
