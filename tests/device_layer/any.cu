// Kernels of the device layer's parts that every architecture has.

struct Params {
    const uint32_t* input;
    uint32_t* output;
    int64_t padding;  // the emulator takes only structs of more than 16 bytes
};

// Registers of one lane of one warp: A, B, C of an MMA.
template <int C_WORDS>
struct Fragments {
    uint32_t a[4];
    uint32_t b[2];
    uint32_t c[C_WORDS];
};

template <int C_WORDS>
__device__ __forceinline__ Fragments<C_WORDS> read_fragments(const Params& p) {
    Fragments<C_WORDS> f;
    const uint32_t* from = p.input + device::thread_index() * (6 + C_WORDS);
    for (int i = 0; i < 4; ++i) f.a[i] = from[i];
    for (int i = 0; i < 2; ++i) f.b[i] = from[4 + i];
    for (int i = 0; i < C_WORDS; ++i) f.c[i] = from[6 + i];
    return f;
}

extern "C" __global__ void __launch_bounds__(32) mma_s4_kernel(const __grid_constant__ Params p) {
    const Fragments<4> f = read_fragments<4>(p);
    int c[4], d[4];
    for (int i = 0; i < 4; ++i) c[i] = static_cast<int>(f.c[i]);
    device::mma_s4(d, f.a, f.b[0], f.b[1], c);
    for (int i = 0; i < 4; ++i) p.output[device::thread_index() * 4 + i] = static_cast<uint32_t>(d[i]);
}

extern "C" __global__ void __launch_bounds__(32) mma_f16_f16_kernel(const __grid_constant__ Params p) {
    const Fragments<2> f = read_fragments<2>(p);
    uint32_t d[2];
    device::mma_pv(d, f.a, f.b[0], f.b[1], f.c);
    for (int i = 0; i < 2; ++i) p.output[device::thread_index() * 2 + i] = d[i];
}

// Rows of four words: float bits to a pair, the pair's floats, the sums of two pairs and floats.
extern "C" __global__ void __launch_bounds__(128) convert_half2_kernel(const __grid_constant__ Params p) {
    const uint32_t* from = p.input + device::thread_index() * 4;
    uint32_t* to = p.output + device::thread_index() * 8;
    const float x = device::bits_to_float(from[0]), y = device::bits_to_float(from[1]);
    to[0] = device::pack_half2(x, y);
    float first, second;
    device::unpack_half2(from[2], first, second);
    to[1] = device::float_to_bits(first);
    to[2] = device::float_to_bits(second);
    float sum[4] = {x, y, y, x};
    const uint32_t accumulator[2] = {from[2], from[3]};
    device::promote(sum, accumulator);
    for (int i = 0; i < 4; ++i) to[3 + i] = device::float_to_bits(sum[i]);
    to[7] = 0;
}

// Rows of three words a, b, c.
extern "C" __global__ void __launch_bounds__(256) packed_kernel(const __grid_constant__ Params p) {
    const uint32_t* from = p.input + device::thread_index() * 3;
    const uint32_t a = from[0], b = from[1], c = from[2];
    uint32_t* to = p.output + device::thread_index() * 8;
    to[0] = device::permute_bytes(a, b, 0x6521);
    to[1] = device::permute_bytes(a, b, 0x6420);
    to[2] = static_cast<uint32_t>(device::max3(static_cast<int>(a), static_cast<int>(b), static_cast<int>(c)));
    to[3] = device::max3_s16x2(a, b, c);
    to[4] = device::add_max_s16x2(a, b, c);
    to[5] = device::fma_half2(a, b, c);
    to[6] = device::add_half2(a, b);
    to[7] = device::max_half2(a, b);
}

// Warps 2 and 3 wait for what warps 0 and 1 wrote; then each lane reads its neighbour's word.
extern "C" __global__ void __launch_bounds__(128) named_barrier_kernel(const __grid_constant__ Params p) {
    __shared__ uint32_t words[128];
    const int thread = device::thread_index();
    if (thread < 64) {
        words[thread] = p.input[thread];
        device::named_barrier_arrive(1, 128);
        device::named_barrier_sync(2, 64);
        p.output[thread] = words[63 - thread];
    } else {
        device::named_barrier_sync(1, 128);
        words[thread] = words[thread - 64] + 1;
        device::warp_sync();
        p.output[thread] = words[thread ^ 1];
    }
}

extern "C" __global__ void __launch_bounds__(64) zero_kernel(const __grid_constant__ Params p) {
    if (device::block_index() == 0) p.output[device::thread_index()] = 0;
}
// Of 64 words: the first counts blocks, the next 31 are sums, the last 32 maxima of floats.
extern "C" __global__ void __launch_bounds__(64) atomic_kernel(const __grid_constant__ Params p) {
    __shared__ uint32_t tickets;
    const int thread = device::thread_index();
    const uint32_t value = p.input[device::block_index() * 64 + thread];
    if (thread == 0) tickets = 0;
    device::block_sync();
    device::atomic_add(&tickets, 1);
    device::block_sync();
    if (thread == 0) device::atomic_add(p.output, tickets / 64);
    if (thread > 0 && thread < 32) device::atomic_add(p.output + thread, value);
    if (thread >= 32) {
        device::atomic_max_nonnegative(reinterpret_cast<float*>(p.output) + thread, device::bits_to_float(value));
    }
}
