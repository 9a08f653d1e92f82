// The schedule of an attention kernel: a producer that copies tiles in bulk, two consumers that take turns at
// multiplying, Q K^T of the next tile under way together with P V of this one.

struct Params {
    const uint32_t* input;
    uint32_t* output;
    int64_t padding;  // the emulator takes only structs of more than 16 bytes
};

extern __shared__ __align__(1024) uint8_t shared_memory[];

constexpr int GROUP = 128;  // threads
constexpr int TILES = 5;
constexpr int STAGES = 2;
constexpr int DIM = 64;               // channels, and keys of a tile
constexpr int TILE_BYTES = 64 * DIM;  // of Q (for each consumer), K and V
constexpr int WORDS = TILE_BYTES / 4;

struct Barriers {
    uint64_t q_full;
    uint64_t k_full[STAGES], k_empty[STAGES];
    uint64_t v_full[STAGES], v_empty[STAGES];
};

// One thread copies Q, and K and V tile by tile. Input: Q [2, 64, 64], then K [64, 64] and V^T [64, 64] of each tile.
__device__ __forceinline__ void produce(const Params& p, Barriers& barriers, uint8_t* q, uint8_t* k, uint8_t* v) {
    device::mbarrier_arrive_expect_tx(&barriers.q_full, 2 * TILE_BYTES);
    device::bulk_load(q, p.input, 2 * TILE_BYTES, &barriers.q_full);
    for (int tile = 0; tile < TILES; ++tile) {
        const int s = tile % STAGES;
        const uint32_t parity = (tile / STAGES + 1) % 2;
        const uint32_t* const source = p.input + (2 + 2 * tile) * WORDS;
        device::mbarrier_wait(&barriers.k_empty[s], parity);
        device::mbarrier_arrive_expect_tx(&barriers.k_full[s], TILE_BYTES);
        device::bulk_load(k + s * TILE_BYTES, source, TILE_BYTES, &barriers.k_full[s]);
        device::mbarrier_wait(&barriers.v_empty[s], parity);
        device::mbarrier_arrive_expect_tx(&barriers.v_full[s], TILE_BYTES);
        device::bulk_load(v + s * TILE_BYTES, source + WORDS, TILE_BYTES, &barriers.v_full[s]);
    }
}

__device__ __forceinline__ void multiply_qk(int (&scores)[32], const uint8_t* q, const uint8_t* k) {
    const uint64_t a = device::wgmma_descriptor<DIM>(device::shared_address(q));
    const uint64_t b = device::wgmma_descriptor<DIM>(device::shared_address(k));
#pragma unroll
    for (int step = 0; step < DIM; step += 32) {
        device::wgmma_s8(scores, device::advance_descriptor(a, step), device::advance_descriptor(b, step), step > 0);
    }
    device::wgmma_commit();
}

__device__ __forceinline__ void multiply_pv(float (&out)[32], const uint32_t (&weights)[2][4], const uint8_t* v,
                                            bool accumulate) {
    const uint64_t b = device::wgmma_descriptor<DIM>(device::shared_address(v));
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        device::wgmma_e4m3(out, weights[step], device::advance_descriptor(b, 32 * step), step > 0 || accumulate);
    }
    device::wgmma_commit();
}

// A weight is its score / 256. V's tokens lie in the order that the scores have in registers.
__device__ __forceinline__ void pack(uint32_t (&weights)[2][4], const float (&scaled)[32]) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* const pair = &scaled[16 * step + 8 * (i / 2) + 2 * (i % 2)];
            weights[step][i] = device::pack_e4m3(pair[0], pair[1], pair[4], pair[5]);
        }
    }
}

__device__ __forceinline__ void consume(const Params& p, Barriers& barriers, const uint8_t* q, const uint8_t* k,
                                        const uint8_t* v, float* result) {
    const int consumer = device::warp_index() / 4 - 1;
    const bool is_first = device::thread_index() % GROUP == 0;
    int scores[32];
    float scaled[32], out[32];
    uint32_t weights[2][4];
    q += consumer * TILE_BYTES;
    device::mbarrier_wait(&barriers.q_full, 0);
    device::mbarrier_wait(&barriers.k_full[0], 0);
    device::wgmma_fence(scores);
    multiply_qk(scores, q, k);
    device::wgmma_wait<0>(scores);
    if (is_first) device::mbarrier_arrive(&barriers.k_empty[0]);
#pragma unroll
    for (int i = 0; i < 32; ++i) scaled[i] = device::int_to_float(scores[i]) * 0.00390625f;
    pack(weights, scaled);
#pragma unroll 1
    for (int tile = 0; tile < TILES - 1; ++tile) {
        const int s = tile % STAGES;
        const int next = (tile + 1) % STAGES;
        device::named_barrier_sync(1 + consumer, 2 * GROUP);  // taking turns
        device::mbarrier_wait(&barriers.k_full[next], (tile + 1) / STAGES % 2);
        device::wgmma_fence(scores);
        multiply_qk(scores, q, k + next * TILE_BYTES);
        device::mbarrier_wait(&barriers.v_full[s], tile / STAGES % 2);
        device::wgmma_fence(out, weights);
        multiply_pv(out, weights, v + s * TILE_BYTES, tile > 0);
        // after the last turn nobody waits for another
        if (consumer == 0 || tile + 2 < TILES) device::named_barrier_arrive(2 - consumer, 2 * GROUP);
        device::wgmma_wait<1>(scores);
        if (is_first) device::mbarrier_arrive(&barriers.k_empty[next]);
#pragma unroll
        for (int i = 0; i < 32; ++i) scaled[i] = device::int_to_float(scores[i]) * 0.00390625f;
        device::wgmma_wait<0>(out, weights);
        if (is_first) device::mbarrier_arrive(&barriers.v_empty[s]);
        pack(weights, scaled);
    }
    constexpr int LAST = TILES - 1;
    device::mbarrier_wait(&barriers.v_full[LAST % STAGES], LAST / STAGES % 2);
    device::wgmma_fence(out, weights);
    multiply_pv(out, weights, v + LAST % STAGES * TILE_BYTES, true);
    device::wgmma_wait<0>(out, weights);
    result += consumer * 64 * DIM;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int row = (device::warp_index() % 4) * 16 + 8 * (i / 2 % 2) + device::lane_index() / 4;
        result[row * DIM + 8 * (i / 4) + 2 * (device::lane_index() % 4) + i % 2] = out[i];
    }
    device::fence_proxy_async();
    device::named_barrier_sync(3 + consumer, GROUP);
    if (!is_first) return;
    device::bulk_store(p.output + consumer * 64 * DIM, result, 4 * 64 * DIM);
    device::bulk_commit();
    device::bulk_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) flow_kernel(const __grid_constant__ Params p) {
    __shared__ Barriers barriers;
    uint8_t* const q = shared_memory;
    uint8_t* const k = q + 2 * TILE_BYTES;
    uint8_t* const v = k + STAGES * TILE_BYTES;
    float* const result = reinterpret_cast<float*>(v + STAGES * TILE_BYTES);
    if (device::thread_index() == 0) {
        device::mbarrier_init(&barriers.q_full, 1);
        for (int s = 0; s < STAGES; ++s) {
            device::mbarrier_init(&barriers.k_full[s], 1);
            device::mbarrier_init(&barriers.k_empty[s], 2);
            device::mbarrier_init(&barriers.v_full[s], 1);
            device::mbarrier_init(&barriers.v_empty[s], 2);
        }
        device::mbarrier_init_fence();
    }
    device::block_sync();
    if (device::warp_index() < 4) {
        device::lower_registers<24>();
        if (device::thread_index() == 0) produce(p, barriers, q, k, v);
    } else {
        device::raise_registers<240>();
        if (device::warp_index() >= 8) device::named_barrier_arrive(1, 2 * GROUP);  // the first consumer's turn
        consume(p, barriers, q, k, v, result);
    }
}
