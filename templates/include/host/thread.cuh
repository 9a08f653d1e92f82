// Thread indices, block and warp collectives; CUDA's own words for the host compiler.
#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// A block's threads are fibers of one operating system thread, so what they share is that thread's own.
#define __shared__ thread_local
alignas(1024) thread_local uint8_t shared_memory[232448];

// Vectors move as one access of their size, which must be aligned to it. Not inlined, so that the return address is the
// kernel's own place.
#define EMULATED_MOVE __attribute__((no_sanitize("thread"), noinline))

struct alignas(8) uint2 {
    uint32_t x, y;
    uint2() : x(0), y(0) {}
    EMULATED_MOVE uint2(const uint2& from) {
        emulator::vector_load(&from, 8, __builtin_return_address(0));
        x = from.x, y = from.y;
    }
    EMULATED_MOVE uint2& operator=(const uint2& from) {
        emulator::vector_load(&from, 8, __builtin_return_address(0));
        emulator::vector_store(this, 8, __builtin_return_address(0));
        x = from.x, y = from.y;
        return *this;
    }
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
    uint4() : x(0), y(0), z(0), w(0) {}
    EMULATED_MOVE uint4(const uint4& from) {
        emulator::vector_load(&from, 16, __builtin_return_address(0));
        x = from.x, y = from.y, z = from.z, w = from.w;
    }
    EMULATED_MOVE uint4& operator=(const uint4& from) {
        emulator::vector_load(&from, 16, __builtin_return_address(0));
        emulator::vector_store(this, 16, __builtin_return_address(0));
        x = from.x, y = from.y, z = from.z, w = from.w;
        return *this;
    }
};

namespace device {

__device__ __forceinline__ int block_index() { return emulator::block_index(); }
__device__ __forceinline__ int thread_index() { return emulator::thread_index(); }
__device__ __forceinline__ int warp_index() { return thread_index() / 32; }
__device__ __forceinline__ int lane_index() { return thread_index() % 32; }

__device__ __forceinline__ void block_sync(int line = __builtin_LINE()) { emulator::block_barrier(line); }

template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, int lane_mask, int line = __builtin_LINE()) {
    static_assert(sizeof(T) == 4, "shuffles move 32 bits");
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    bits = emulator::shuffle_xor(bits, lane_mask, line);
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
__device__ __forceinline__ bool warp_any(bool predicate, int line = __builtin_LINE()) {
    return emulator::ballot(predicate, line) != 0;
}
__device__ __forceinline__ uint32_t warp_ballot(bool predicate, int line = __builtin_LINE()) {
    return emulator::ballot(predicate, line);
}

}  // namespace device
