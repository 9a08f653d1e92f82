// Kernels of wgmma and of register budgets: sm_90a.

struct Params {
    const uint32_t* input;
    uint32_t* output;
    int64_t padding;  // the emulator takes only structs of more than 16 bytes
};

extern __shared__ __align__(1024) uint8_t shared_memory[];

constexpr int ROWS = 64;
constexpr int GROUP = 128;

__device__ __forceinline__ int row_of(int i) {
    return device::warp_index() * 16 + 8 * (i / 2 % 2) + device::lane_index() / 4;
}
__device__ __forceinline__ int column_of(int i) { return 8 * (i / 4) + 2 * (device::lane_index() % 4) + i % 2; }

// Copies an image, whose rows are swizzled already, into shared memory.
__device__ __forceinline__ void copy_image(uint8_t* shared, const uint32_t* image, int bytes) {
    for (int i = device::thread_index(); i < bytes / 4; i += GROUP) reinterpret_cast<uint32_t*>(shared)[i] = image[i];
}

// Input: the images of A [64, ROW_BYTES] and B [N, ROW_BYTES], then D [64, N]. D + 2 A B, as two groups, the second one
// accumulating on the first.
template <int N, int ROW_BYTES>
__device__ __forceinline__ void multiply_s8(const Params& p) {
    uint8_t* const a_tile = shared_memory;
    uint8_t* const b_tile = shared_memory + 8192;
    copy_image(a_tile, p.input, ROWS * ROW_BYTES);
    copy_image(b_tile, p.input + ROWS * ROW_BYTES / 4, N * ROW_BYTES);
    const uint32_t* const before = p.input + (ROWS + N) * ROW_BYTES / 4;
    int d[N / 2];
    for (int i = 0; i < N / 2; ++i) d[i] = static_cast<int>(before[row_of(i) * N + column_of(i)]);
    device::fence_proxy_async();
    device::block_sync();
    const uint64_t a = device::wgmma_descriptor<ROW_BYTES>(device::shared_address(a_tile));
    const uint64_t b = device::wgmma_descriptor<ROW_BYTES>(device::shared_address(b_tile));
    device::wgmma_fence(d);
#pragma unroll
    for (int repeat = 0; repeat < 2; ++repeat) {
#pragma unroll
        for (int k = 0; k < ROW_BYTES; k += 32) {
            device::wgmma_s8(d, device::advance_descriptor(a, k), device::advance_descriptor(b, k), true);
        }
        device::wgmma_commit();
    }
    device::wgmma_wait<1>();
    device::wgmma_wait<0>(d);
    for (int i = 0; i < N / 2; ++i) p.output[row_of(i) * N + column_of(i)] = static_cast<uint32_t>(d[i]);
}

#define S8(N, ROW_BYTES)                                                                                           \
    extern "C" __global__ void __launch_bounds__(GROUP) s8_##N##_##ROW_BYTES(const __grid_constant__ Params p) {   \
        multiply_s8<N, ROW_BYTES>(p);                                                                              \
    }
S8(64, 128)
S8(96, 128)
S8(128, 128)
S8(192, 128)
S8(224, 128)
S8(256, 128)
S8(128, 64)
S8(128, 32)

// Input as above, of e4m3 and FP32. With A in registers it is read from the image, without a swizzle. Every block has
// its own input. `accumulate`: whether the first product adds to D.
template <int N, int ROW_BYTES, bool A_IN_REGISTERS>
__device__ __forceinline__ void multiply_e4m3(const Params& p, bool accumulate) {
    uint8_t* const a_tile = shared_memory;
    uint8_t* const b_tile = shared_memory + 8192;
    const uint32_t* const image = p.input + device::block_index() * ((ROWS + N) * ROW_BYTES / 4 + ROWS * N);
    const uint32_t* const before = image + (ROWS + N) * ROW_BYTES / 4;
    constexpr int STEPS = ROW_BYTES / 32;
    uint32_t a_registers[STEPS][4];
    if constexpr (A_IN_REGISTERS) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            for (int i = 0; i < 4; ++i) {
                const int row = device::warp_index() * 16 + 8 * (i % 2) + device::lane_index() / 4;
                const int word = row * ROW_BYTES / 4 + 8 * step + 4 * (i / 2) + device::lane_index() % 4;
                a_registers[step][i] = image[word];
            }
        }
    } else {
        copy_image(a_tile, image, ROWS * ROW_BYTES);
    }
    copy_image(b_tile, image + ROWS * ROW_BYTES / 4, N * ROW_BYTES);
    float d[N / 2];
    for (int i = 0; i < N / 2; ++i) d[i] = device::bits_to_float(before[row_of(i) * N + column_of(i)]);
    device::fence_proxy_async();
    device::block_sync();
    const uint64_t b = device::wgmma_descriptor<ROW_BYTES>(device::shared_address(b_tile));
    if constexpr (A_IN_REGISTERS) {
        device::wgmma_fence(d, a_registers);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            device::wgmma_e4m3(d, a_registers[step], device::advance_descriptor(b, 32 * step), step > 0 || accumulate);
        }
        device::wgmma_commit();
        device::wgmma_wait<0>(d, a_registers);
    } else {
        const uint64_t a = device::wgmma_descriptor<ROW_BYTES>(device::shared_address(a_tile));
        device::wgmma_fence(d);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            device::wgmma_e4m3(d, device::advance_descriptor(a, 32 * step), device::advance_descriptor(b, 32 * step),
                               step > 0 || accumulate);
        }
        device::wgmma_commit();
        device::wgmma_wait<0>(d);
    }
    uint32_t* const to = p.output + device::block_index() * ROWS * N;
    for (int i = 0; i < N / 2; ++i) to[row_of(i) * N + column_of(i)] = device::float_to_bits(d[i]);
}

#define E4M3(NAME, N, ROW_BYTES, A_IN_REGISTERS, ACCUMULATE)                                            \
    extern "C" __global__ void __launch_bounds__(GROUP) e4m3_##NAME(const __grid_constant__ Params p) { \
        multiply_e4m3<N, ROW_BYTES, A_IN_REGISTERS>(p, ACCUMULATE);                                     \
    }
E4M3(rs_64, 64, 128, true, true)
E4M3(rs_128, 128, 64, true, false)
E4M3(rs_136, 136, 128, true, true)
E4M3(ss_64, 64, 128, false, false)
E4M3(ss_128, 128, 128, false, true)
// One product a block, for finding out how the accumulator is cut.
E4M3(probe, 64, 32, false, true)

// One element of an accumulator is read and one zeroed between two equal products: by thread d[1] after the first, then
// d[0] and d[1] after both.
extern "C" __global__ void __launch_bounds__(GROUP) element_kernel(const __grid_constant__ Params p) {
    uint8_t* const b_tile = shared_memory;
    copy_image(b_tile, p.input + ROWS * 32 / 4, 64 * 32);
    uint32_t a[4];
    for (int i = 0; i < 4; ++i) {
        const int row = device::warp_index() * 16 + 8 * (i % 2) + device::lane_index() / 4;
        a[i] = p.input[row * 8 + 4 * (i / 2) + device::lane_index() % 4];
    }
    float d[32];
    for (int i = 0; i < 32; ++i) d[i] = 0.0f;
    device::fence_proxy_async();
    device::block_sync();
    const uint64_t b = device::wgmma_descriptor<32>(device::shared_address(b_tile));
    float first = 0.0f;
#pragma unroll 1
    for (int repeat = 0; repeat < 2; ++repeat) {
        device::wgmma_fence(d, a);
        device::wgmma_e4m3(d, a, b, true);
        device::wgmma_commit();
        device::wgmma_wait<0>(d, a);
        if (repeat == 0) {
            first = device::accumulator_element(d[1]);
            device::zero_accumulator_element(d[0]);
        }
    }
    device::pin(first);
    p.output[device::thread_index()] = device::float_to_bits(first);
    p.output[GROUP + device::thread_index()] = device::float_to_bits(d[0]);
    p.output[2 * GROUP + device::thread_index()] = device::float_to_bits(d[1]);
}

// A producer's warpgroup gives registers to two others.
extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) registers_kernel(const __grid_constant__ Params p) {
    uint32_t value = p.input[device::thread_index()];
    if (device::warp_index() < 4) {
        device::lower_registers<24>();
        value += 1;
    } else {
        device::raise_registers<240>();
        value += 2;
    }
    p.output[device::thread_index()] = value;
}
