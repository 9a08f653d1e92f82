// Kernels of what sm_90 brought and later architectures kept: matrix stores, mbarriers, bulk copies, dependent
// launches.

struct Params {
    const uint32_t* input;
    uint32_t* output;
    int64_t padding;  // the emulator takes only structs of more than 16 bytes
};

// One warp's registers to a row-major [4, 8, 8] of 16-bit elements, plain and transposed.
extern "C" __global__ void __launch_bounds__(32) store_matrix_kernel(const __grid_constant__ Params p) {
    __shared__ __align__(16) uint32_t rows[2][32][4];
    const int lane = device::lane_index();
    uint32_t matrix[4];
    for (int i = 0; i < 4; ++i) matrix[i] = p.input[lane * 4 + i];
    device::store_matrix_x4(device::shared_address(rows[0][lane]), matrix);
    device::store_matrix_x4_transposed(device::shared_address(rows[1][lane]), matrix);
    device::warp_sync();
    for (int i = 0; i < 8; ++i) p.output[i * 32 + lane] = (&rows[0][0][0])[i * 32 + lane];
}

constexpr int STAGES = 2;
constexpr int TILES = 7;
constexpr int TILE_WORDS = 1024;
constexpr int CONSUMERS = 128;

// A producer's warp copies tiles into a ring of stages; four consumer warps add each word of a tile to its sum; at last
// the sums leave by a bulk store.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 32) pipeline_kernel(const __grid_constant__ Params p) {
    __shared__ __align__(128) uint32_t stages[STAGES][TILE_WORDS];
    __shared__ __align__(128) uint32_t sums[TILE_WORDS];
    __shared__ uint64_t full[STAGES];
    __shared__ uint64_t empty[STAGES];
    const int thread = device::thread_index();
    if (thread == 0) {
        for (int s = 0; s < STAGES; ++s) {
            device::mbarrier_init(&full[s], 1);
            device::mbarrier_init(&empty[s], CONSUMERS);
        }
        device::mbarrier_init_fence();
    }
    device::block_sync();
    const uint32_t* tiles = p.input + device::block_index() * TILES * TILE_WORDS;
    if (thread >= CONSUMERS) {
        if (thread > CONSUMERS) return;
        for (int tile = 0; tile < TILES; ++tile) {
            const int s = tile % STAGES;
            const uint32_t round = tile / STAGES;
            device::mbarrier_wait(&empty[s], (round + 1) % 2);
            device::mbarrier_arrive_expect_tx(&full[s], 4 * TILE_WORDS);
            device::bulk_load(stages[s], tiles + tile * TILE_WORDS, 2 * TILE_WORDS, &full[s]);
            device::bulk_load(&stages[s][TILE_WORDS / 2], tiles + tile * TILE_WORDS + TILE_WORDS / 2, 2 * TILE_WORDS,
                              &full[s]);
        }
        return;
    }
    uint32_t sum[TILE_WORDS / CONSUMERS] = {};
    for (int tile = 0; tile < TILES; ++tile) {
        const int s = tile % STAGES;
        const uint32_t parity = tile / STAGES % 2;
        const bool is_ready = device::mbarrier_test_wait(&full[s], parity);
        if (!is_ready) device::mbarrier_wait(&full[s], parity);
        for (int i = 0; i < TILE_WORDS / CONSUMERS; ++i) sum[i] += stages[s][i * CONSUMERS + thread];
        device::mbarrier_arrive(&empty[s]);
    }
    for (int i = 0; i < TILE_WORDS / CONSUMERS; ++i) sums[i * CONSUMERS + thread] = sum[i];
    device::fence_proxy_async();
    device::named_barrier_sync(1, CONSUMERS);
    if (thread == 0) {
        device::bulk_store(p.output + device::block_index() * TILE_WORDS, sums, 4 * TILE_WORDS);
        device::bulk_commit();
        device::bulk_wait_read<0>();
        device::bulk_wait<0>();
    }
}

// Two launches: the second adds to what the first wrote.
extern "C" __global__ void __launch_bounds__(64) first_kernel(const __grid_constant__ Params p) {
    device::launch_dependents();
    p.output[device::thread_index()] = p.input[device::thread_index()] + 1;
}
extern "C" __global__ void __launch_bounds__(64) second_kernel(const __grid_constant__ Params p) {
    const uint32_t own = p.input[device::thread_index()];
    if (device::warp_index() == 0) device::wait_for_predecessor();
    device::block_sync();
    p.output[device::thread_index()] += own;
}
