// wgmma: a product is noted when a warp comes to it and computed at the first wait that covers it, from shared memory
// as it is then. Its accumulators hold poison in between. Operands are decoded through their descriptors as the
// hardware does it (PTX ISA, "wgmma").
#include "wgmma.hpp"

#include <algorithm>
#include <cstring>

#include "emulator.cuh"
#include "emulator_hopper.cuh"

namespace emulator {

namespace {

constexpr int CHUNK = 16;  // bytes that a swizzle leaves together

// What one lane brings to a product.
struct Request {
    Product product;
    uint32_t* d;
    const uint32_t* a;  // null: A is in shared memory
};

int row_of(int thread, int i) { return thread / WARP * 16 + 8 * (i / 2 % 2) + thread % WARP / 4; }
int column_of(int thread, int i) { return 8 * (i / 4) + 2 * (thread % 4) + i % 2; }

uint32_t poison_of(ProductType type) { return type == ProductType::s8 ? 0x7f7f7f7fu : 0x7fffffffu; }  // FP32: a NaN

const char* describe_difference(const Product& one, const Product& other) {
    if (one.type != other.type || one.columns != other.columns) return "their shapes differ";
    if (one.a_descriptor != other.a_descriptor || one.b_descriptor != other.b_descriptor) {
        return "their descriptors differ";
    }
    return one.accumulates != other.accumulates ? "one accumulates and the other does not" : nullptr;
}

}  // namespace

Wgmma::Wgmma(Engine& engine) : engine_(engine), threads_(static_cast<size_t>(engine.threads())) {
    groups_.resize((threads_.size() + GROUP_THREADS - 1) / GROUP_THREADS);
    for (Group& group : groups_) group.agent = engine.add_agent("wgmma");
    engine.at_block_end.push_back(check_end);
}

// ---- registers ----

void Wgmma::list_registers(const void* registers, int bytes) {
    const uint8_t* const begin = static_cast<const uint8_t*>(registers);
    threads_[static_cast<size_t>(engine_.current().thread)].listed.push_back({begin, {begin, begin + bytes}});
}

void Wgmma::perform_fence(Engine& engine, int first_thread, void* const*) {
    Wgmma& own = engine.state<Wgmma>();
    for (int thread = first_thread; thread < first_thread + WARP; ++thread) {
        Thread& state = own.threads_[static_cast<size_t>(thread)];
        for (RegisterCopy& copy : state.listed) {
            forget(state, copy.begin, copy.begin + copy.bytes.size());
            state.fenced.push_back(std::move(copy));
        }
        state.listed.clear();
    }
}

void Wgmma::forget(Thread& state, const void* begin, const void* end) {
    const auto overlaps = [&](const RegisterCopy& copy) {
        return copy.begin < end && copy.begin + copy.bytes.size() > begin;
    };
    state.fenced.erase(std::remove_if(state.fenced.begin(), state.fenced.end(), overlaps), state.fenced.end());
}

// Whether a wgmma_fence listed these registers and nothing has written them since.
void Wgmma::check_fenced(int thread, const void* registers, size_t bytes, const char* what, Site site) {
    const uint8_t* const begin = static_cast<const uint8_t*>(registers);
    for (const RegisterCopy& copy : threads_[static_cast<size_t>(thread)].fenced) {
        if (begin < copy.begin || begin + bytes > copy.begin + copy.bytes.size()) continue;
        if (!memcmp(copy.bytes.data() + (begin - copy.begin), begin, bytes)) return;
        engine_.fail("fence", thread, site,
                     describe_thread(thread) + " has written " + what + " of the wgmma at " + place(site) +
                         " since the last wgmma_fence that was given it");
    }
    engine_.fail("fence", thread, site,
                 std::string("no wgmma_fence has been given ") + what + " of the wgmma at " + place(site) +
                     " since it was last touched");
}

// ---- issue ----

void Wgmma::issue(const Product& product, uint32_t* d, const uint32_t* a) {
    Request request{product, d, a};
    engine_.meet("wgmma", product.site, &request, perform_issue);
}

void Wgmma::perform_issue(Engine& engine, int first_thread, void* const* lanes) {
    Wgmma& own = engine.state<Wgmma>();
    Group& group = own.groups_[static_cast<size_t>(first_thread / GROUP_THREADS)];
    const Request& first = *static_cast<Request*>(lanes[0]);
    if (engine.threads() % GROUP_THREADS) {
        engine.fail("divergence", first_thread, first.product.site,
                    "wgmma at " + place(first.product.site) + " in a block of " + std::to_string(engine.threads()) +
                        " threads, which are no whole warpgroups");
    }
    const size_t index = own.threads_[static_cast<size_t>(first_thread)].issued;
    if (index == group.products.size()) {
        group.products.push_back(first.product);
        group.products.back().tile = own.find_tile(group, first_thread % GROUP_THREADS, first.d, first.product.columns);
    }
    Product& product = group.products[index];
    for (int lane = 0; lane < WARP; ++lane) {
        const Request& request = *static_cast<Request*>(lanes[lane]);
        if (const char* difference = describe_difference(product, request.product)) {
            engine.fail("divergence", first_thread + lane, request.product.site,
                        describe_thread(first_thread + lane) + " comes to the wgmma at " +
                            place(request.product.site) + " and others of its warpgroup to the one at " +
                            place(product.site) + "; " + difference);
        }
        own.join(product, first_thread + lane, request.d, request.a);
    }
    if (++product.warps < GROUP_WARPS) return;
    own.read_operands(group, index);
    for (int thread : group.waiting) engine.wake(thread);
    group.waiting.clear();
}

// The accumulator that is on its way to these registers already, or a new one.
std::shared_ptr<Tile> Wgmma::find_tile(Group& group, int local, const uint32_t* d, int columns) {
    const auto found = std::find_if(group.tiles.begin(), group.tiles.end(), [&](const auto& tile) {
        return tile->registers[local] == d && !tile->is_returned[local];
    });
    if (found != group.tiles.end()) return *found;
    group.tiles.push_back(std::make_shared<Tile>());
    group.tiles.back()->columns = columns;
    group.tiles.back()->values.resize(static_cast<size_t>(TILE_ROWS * columns));
    return group.tiles.back();
}

void Wgmma::join(Product& product, int thread, uint32_t* d, const uint32_t* a) {
    const int local = thread % GROUP_THREADS;
    Thread& state = threads_[static_cast<size_t>(thread)];
    Tile& tile = *product.tile;
    const int count = product.columns / 2;
    if (a) {
        check_fenced(thread, a, 16, "operand A", product.site);
        for (int i = 0; i < 4; ++i) {
            const int row = row_of(local, 2 * i);
            memcpy(&product.a_rows[static_cast<size_t>(row * DEPTH + 16 * (i / 2) + 4 * (thread % 4))], &a[i], 4);
        }
    }
    if (tile.registers[local] && (tile.registers[local] != d || tile.columns != product.columns)) {
        engine_.fail("divergence", thread, product.site,
                     describe_thread(thread) + " gives the wgmma at " + place(product.site) +
                         " other registers than the rest of its warpgroup");
    }
    if (!tile.registers[local]) {
        check_fenced(thread, d, 4 * static_cast<size_t>(count), "the accumulator", product.site);
        tile.registers[local] = d;
        for (int i = 0; i < count; ++i) {
            tile.values[static_cast<size_t>(row_of(local, i) * tile.columns + column_of(thread, i))] = d[i];
            d[i] = poison_of(product.type);
        }
        engine_.fiber(thread).busy.push_back(
            {reinterpret_cast<uintptr_t>(d), reinterpret_cast<uintptr_t>(d + count), product.site});
    }
    tile.last[local] = ++state.issued;
    const Clock& clock = engine_.fiber(thread).clock;
    if (product.since.empty()) product.since = clock;
    product.since.resize(std::min(product.since.size(), clock.size()));
    for (size_t i = 0; i < product.since.size(); ++i) product.since[i] = std::min(product.since[i], clock[i]);
}

// ---- operands ----

namespace {

struct Descriptor {
    uint32_t start;
    uint32_t group_stride;  // from 8 rows to the next 8
    uint32_t row_bytes;

    // Shared address of a 16-byte chunk of a row. A swizzle works on bits of the address.
    uint32_t address(int row, int chunk) const {
        const uint32_t linear = start + static_cast<uint32_t>(row) / 8 * group_stride +
                                static_cast<uint32_t>(row) % 8 * row_bytes + static_cast<uint32_t>(chunk * CHUNK);
        return linear ^ (linear >> 7 & (row_bytes / CHUNK - 1)) << 4;
    }
};

Descriptor decode(Engine& engine, uint64_t bits, Site site) {
    const uint32_t mode = static_cast<uint32_t>(bits >> 62);
    if (mode == 0 || (bits >> 49 & 7)) {
        engine.fail("bad_descriptor", site,
                    "the wgmma at " + place(site) + " has a descriptor without swizzle or with a base offset");
    }
    return {static_cast<uint32_t>(bits & 0x3fff) * CHUNK, static_cast<uint32_t>(bits >> 32 & 0x3fff) * CHUNK,
            256u >> mode};
}

// Rows of an operand, DEPTH bytes each.
void gather(Engine& engine, const Descriptor& descriptor, int rows, uint8_t* target) {
    for (int row = 0; row < rows; ++row) {
        for (int chunk = 0; chunk < DEPTH / CHUNK; ++chunk) {
            memcpy(target, engine.shared_pointer(descriptor.address(row, chunk)), CHUNK);
            target += CHUNK;
        }
    }
}

}  // namespace

void Wgmma::read_operands(Group& group, size_t index) {
    const Product& product = group.products[index];
    const uint32_t ticket = engine_.agent(group.agent).started = static_cast<uint32_t>(index) + 1;
    const auto read = [&](uint64_t bits, int rows) {
        const Descriptor descriptor = decode(engine_, bits, product.site);
        for (int row = 0; row < rows; ++row) {
            for (int chunk = 0; chunk < DEPTH / CHUNK; ++chunk) {
                engine_.access_async(group.agent, ticket, product.since, descriptor.address(row, chunk), CHUNK, false,
                                     product.site);
            }
        }
    };
    if (product.a_rows.empty()) read(product.a_descriptor, TILE_ROWS);
    read(product.b_descriptor, product.columns);
}

// ---- wait ----

void Wgmma::perform_commit(Engine& engine, int first_thread, void* const*) {
    Wgmma& own = engine.state<Wgmma>();
    for (int thread = first_thread; thread < first_thread + WARP; ++thread) {
        Thread& state = own.threads_[static_cast<size_t>(thread)];
        state.commits.push_back(state.issued);
    }
}

void Wgmma::wait(size_t pending, Site site) {
    engine_.meet("wgmma_wait", site, nullptr, [](Engine&, int, void* const*) {});
    const int thread = engine_.current().thread;
    Thread& state = threads_[static_cast<size_t>(thread)];
    Group& group = groups_[static_cast<size_t>(thread / GROUP_THREADS)];
    if (state.commits.size() <= pending) return;
    const size_t covered = state.commits[state.commits.size() - 1 - pending];
    while (covered && group.products[covered - 1].warps < GROUP_WARPS) {
        group.waiting.push_back(thread);
        engine_.wait("wgmma_wait (another warp of the warpgroup has not come to its wgmma)", site);
    }
    for (; group.computed < covered; ++group.computed) compute(group.products[group.computed]);
    Agent& agent = engine_.agent(group.agent);
    agent.finished = std::max(agent.finished, static_cast<uint32_t>(covered));
    uint32_t& known = engine_.current().clock[static_cast<size_t>(group.agent)];
    known = std::max(known, static_cast<uint32_t>(covered));
    state.waited = std::max(state.waited, covered);
    give_back(group, thread, covered);
}

// Accumulators without unfinished products return to the thread's registers.
void Wgmma::give_back(Group& group, int thread, size_t covered) {
    const int local = thread % GROUP_THREADS;
    for (const std::shared_ptr<Tile>& tile : group.tiles) {
        uint32_t* const d = tile->registers[local];
        if (!d || tile->is_returned[local] || tile->last[local] > covered) continue;
        const int count = tile->columns / 2;
        for (int i = 0; i < count; ++i) {
            d[i] = tile->values[static_cast<size_t>(row_of(local, i) * tile->columns + column_of(thread, i))];
        }
        tile->is_returned[local] = true;
        ++tile->returned;
        forget(threads_[static_cast<size_t>(thread)], d, d + count);
        std::vector<BusyRegisters>& busy = engine_.current().busy;
        busy.erase(std::remove_if(busy.begin(), busy.end(),
                                  [d](const auto& some) { return some.begin == reinterpret_cast<uintptr_t>(d); }),
                   busy.end());
    }
    group.tiles.erase(std::remove_if(group.tiles.begin(), group.tiles.end(),
                                     [](const auto& tile) { return tile->returned == GROUP_THREADS; }),
                      group.tiles.end());
}

void Wgmma::compute(Product& product) {
    std::vector<uint8_t> a = std::move(product.a_rows);
    if (a.empty()) {
        a.resize(TILE_ROWS * DEPTH);
        gather(engine_, decode(engine_, product.a_descriptor, product.site), TILE_ROWS, a.data());
    }
    std::vector<uint8_t> b(static_cast<size_t>(product.columns * DEPTH));
    gather(engine_, decode(engine_, product.b_descriptor, product.site), product.columns, b.data());
    if (product.type == ProductType::s8) {
        multiply_s8(product.tile->values.data(), a.data(), b.data(), product.columns, product.accumulates);
    } else {
        multiply_e4m3(product.tile->values.data(), a.data(), b.data(), product.columns, product.accumulates);
    }
    product.tile.reset();
    product.a_rows.clear();
}

void Wgmma::check_end(Engine& engine) {
    Wgmma& own = engine.state<Wgmma>();
    for (size_t thread = 0; thread < own.threads_.size(); ++thread) {
        const Thread& state = own.threads_[thread];
        if (state.issued == state.waited) continue;
        const Site site = own.groups_[thread / GROUP_THREADS].products[state.waited].site;
        engine.fail("in_flight", static_cast<int>(thread), site,
                    describe_thread(static_cast<int>(thread)) + " has returned before a wait has covered the wgmma " +
                        "at " + place(site));
    }
}

// ---- what the host layer calls ----

namespace {

Wgmma& wgmma() { return engine().state<Wgmma>(); }

Product make_product(ProductType type, int columns, uint64_t a, uint64_t b, bool accumulates, Site site) {
    Product product;
    product.type = type;
    product.columns = columns;
    product.a_descriptor = a;
    product.b_descriptor = b;
    product.accumulates = accumulates;
    product.site = site;
    return product;
}

}  // namespace

void wgmma_list_registers(const void* registers, int bytes) { wgmma().list_registers(registers, bytes); }
void wgmma_fence(int line) {
    engine().meet("wgmma_fence", EMULATOR_SITE(line), nullptr, Wgmma::perform_fence);
}
void wgmma_commit(int line) {
    engine().meet("wgmma_commit", EMULATOR_SITE(line), nullptr, Wgmma::perform_commit);
}
void wgmma_wait(int pending, int line) { wgmma().wait(static_cast<size_t>(pending), EMULATOR_SITE(line)); }

void wgmma_s8(int* d, int columns, uint64_t a, uint64_t b, bool accumulate, int line) {
    const Product product = make_product(ProductType::s8, columns, a, b, accumulate, EMULATOR_SITE(line));
    wgmma().issue(product, reinterpret_cast<uint32_t*>(d), nullptr);
}
void wgmma_e4m3(float* d, int columns, uint64_t a, uint64_t b, bool accumulate, int line) {
    const Product product = make_product(ProductType::e4m3, columns, a, b, accumulate, EMULATOR_SITE(line));
    wgmma().issue(product, reinterpret_cast<uint32_t*>(d), nullptr);
}
void wgmma_e4m3(float* d, int columns, const uint32_t (&a)[4], uint64_t b, bool accumulate, int line) {
    Product product = make_product(ProductType::e4m3, columns, 0, b, accumulate, EMULATOR_SITE(line));
    product.a_rows.resize(TILE_ROWS * DEPTH);
    wgmma().issue(product, reinterpret_cast<uint32_t*>(d), a);
}

}  // namespace emulator
